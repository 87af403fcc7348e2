"""Latent attention, as DeepSeek-V3 has it, in layouts and with a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from support.cells import cells
from support.families import deepseek, gpt_oss
from support.models import tiny
from support.proven import assert_proven
from titanlike.core.config.groups.computation import ActivationCheckpoint
from titanlike.core.config.groups.data import TextData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.models.cache import KeyValueCache
from titanlike.core.models.registry import build_model
from titanlike.core.training.preflight import preflight
from titanlike.techniques.mixture.moe import RoutedMLP


def latent(*mesh: Any, **changes: Any) -> Config:
    return tiny(*mesh, **{"model": deepseek(num_hidden_layers=4), **changes})


DOCUMENTS = TextData(documents=True)


@pytest.mark.parametrize(
    "config",
    cells(
        {"tp": latent(tp=2, model=deepseek())},
        {
            "tp and pp": latent(2, 1, "zbvzerobubble", tp=2),
            "tp, whole sequences": latent(tp=2, tp_sequence=False),
            "cp, documents": latent(cp=2, data=DOCUMENTS, context_parallel="gather"),
            "cp and tp": latent(cp=2, tp=2, activation_checkpoint=ActivationCheckpoint("full")),
            "ep, documents": latent(2, 2, "zbh1", ep=2, data=DOCUMENTS),
        },
    ),
)
def test_latent_attention_in_layouts_matches_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_the_cache_holds_latents_only(q_lora_rank: int | None) -> None:
    args = deepseek(q_lora_rank=q_lora_rank).args | {"vocab_size": 64}
    model = build_model(Custom("moe", args), "cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = KeyValueCache(torch.zeros(2, dtype=torch.int64), 12)
    parts = [model(part, cache=cache) for part in ids.split([7, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-4, atol=1e-5)
    for kept in cache._layers.values():
        assert [tensor.numel() for tensor in kept] == [2 * 12 * 16, 2 * 12 * 8]


@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_latent_attention_flops_count_its_matmuls(name: str) -> None:
    """With windows, too, in which attention multiplies as many keys as a query sees."""
    made = deepseek() if name == "deepseek" else gpt_oss()
    model: Any = build_model(Custom("moe", made.args | {"vocab_size": 64}))
    ids = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    layers = sum(isinstance(module, RoutedMLP) for module in model.modules())
    sums_of_experts = layers * 3 * 2 * 2 * 32  # two a token
    expected = ids.numel() * (model.flops_per_token(32) + sums_of_experts)
    assert counter.get_total_flops() == expected


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"qk_norm": True}, "model.qk_norm=true: latent attention (kv_lora_rank) has its own"),
        ({"head_dim": 8}, "write model.head_dim=null"),
        ({"qk_rope_head_dim": 7}, "write model.qk_rope_head_dim=8"),
        ({"rope_scaling": {"factor": 4}}, "write model.rope_scaling={rope_type:yarn,factor:4,"),
        ({"rope_scaling": YARN | {"factor": 0}}, "rope_type:yarn,factor:40,original_max"),
        ({"rope_scaling": YARN | {"beta_slow": 0.0}}, "rope_scaling={rope_type:yarn,factor:4"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "max_position_embeddings=4096"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "needs factor, original_max_position_embeddings;",
        ),
    ],
)
def test_invalid_latent_attention_sizes_are_refused(changes: dict, said: str) -> None:
    [problem] = preflight(tiny(model=deepseek(**changes)))
    assert said in str(problem)
