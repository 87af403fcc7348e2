"""Small models of every family, for tables of layouts."""

from __future__ import annotations

from typing import Any

from support.hf_tiny import sizes
from titanlike.core.config.groups.user_code import Model

_ATTENTION = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**changes: Any) -> Model:
    plain = {"vocab_size": None, "intermediate_size": 64, "num_hidden_layers": 4}
    return Model("llama", {**plain, **_ATTENTION, **changes})


def gpt2(**changes: Any) -> Model:
    plain = {"vocab_size": None, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": None}
    return Model("gpt2", plain | changes)


def moe(**changes: Any) -> Model:
    plain = {"vocab_size": None, "num_hidden_layers": 2, "bias_rate": 0.01}
    plain |= {"num_local_experts": 4, "moe_intermediate_size": 32}
    return Model("moe", {**plain, **_ATTENTION, **changes})


def deepseek(**changes: Any) -> Model:
    """Latent attention, and sigmoid scores in groups of experts beside one for all."""
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    experts = {"scoring_func": "sigmoid", "n_shared_experts": 1, "first_k_dense_replace": 1}
    groups = {"n_group": 2, "routed_scaling_factor": 1.5, "intermediate_size": 64}
    return moe(**{**latent, "v_head_dim": 16, **experts, **groups, **changes})


def gpt_oss(**changes: Any) -> Model:
    """Sinks, a window in each second layer, biases, and experts that clamp."""
    attention = {"attention_bias": True, "attention_sinks": True, "sliding_window": 5}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    routed = {"swiglu_limit": 0.5, "bias_rate": 0.0, "rope_scaling": scaling}
    return moe(**{**attention, **routed, **changes})


def hf(family: str, vocab_size: int | None = 66, **changes: Any) -> Model:
    args = {"vocab_size": vocab_size, "max_seq_len": 32}
    return Model("hf", {"family": family, "config": sizes(family, **changes), **args})
