"""Small models of every family, for tables of layouts."""

from __future__ import annotations

from typing import Any

from support.hf_tiny import sizes
from titanlike.config.keys import Model


def ours(family: str, **changes: Any) -> Model:
    plain = {"vocab_size": None, "dim": 32, "heads": 4, "layers": 4}
    return Model(family, plain | changes)


def llama(**changes: Any) -> Model:
    return ours("llama", **{"kv_heads": 2, "ffn_dim": 64, **changes})


def moe(**changes: Any) -> Model:
    plain = {"kv_heads": 2, "layers": 2, "experts": 4, "expert_dim": 32, "bias_rate": 0.01}
    return ours("moe", **{**plain, **changes})


def hf(family: str, vocab_size: int | None = 66, **changes: Any) -> Model:
    args = {"vocab_size": vocab_size, "max_seq_len": 32}
    return Model("hf", {"family": family, "config": sizes(family, **changes), **args})
