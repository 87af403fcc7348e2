"""ep gives each rank a part of every layer's experts.

Each layout is verified against one process in plain torch, gradients and balance included; how ep goes
with the other axes is in `tests/proof/test_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.cells import cells
from support.families import hf, moe
from support.models import tiny
from support.proven import assert_proven
from titanlike.config.schema import Config, Fsdp
from titanlike.config.validate import problems
from titanlike.training.draft import draft, preflight


def of(model: Any, **layout: Any) -> Config:
    return tiny(model=model, batch_size=8, seq_len=16, steps=3, **layout)


MOE = moe(shared_experts=1, balance_loss=0.01, z_loss=0.001)
# ranks have other tokens, other experts and other shards of them
QUICK = {"moe": of(MOE, dp=2, cp=2, ep=2, fsdp=Fsdp(2))}
MORE = {
    "hf mixtral": of(hf("mixtral", num_hidden_layers=2), dp=2, cp=2, ep=4),
    "hf qwen3 moe": of(hf("qwen3_moe", num_hidden_layers=2), dp=4, ep=2, fsdp=Fsdp(3)),
}


@pytest.mark.parametrize("config", cells(QUICK, MORE))
def test_a_mixture_trains_as_one_process_does(config: Config, tmp_path: Path) -> None:
    assert preflight(config) == []
    assert_proven(config, tmp_path)


@pytest.mark.parametrize(
    "layout, model, reason, fix",
    [
        ({"dp": 2, "ep": 4}, MOE, "does not divide the ranks that share weights, dp = 2", "ep=2"),
        ({"dp": 3, "ep": 3}, MOE, "does not divide the 4 experts of a layer", "ep=1"),
        ({"dp": 2, "ep": 2}, tiny().model, "the model has no experts", "ep=1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    layout: dict[str, int], model: Any, reason: str, fix: str
) -> None:
    config = replace(of(model, **layout), batch_size=12)
    found = problems(config, config.world_size) or preflight(config)
    [problem] = [one for one in found if one.key == "ep"]
    assert (problem.value, problem.fix) == (layout["ep"], fix)
    assert reason in problem.reason


def test_a_rank_has_a_part_of_the_experts() -> None:
    whole, divided = (
        sum(draft(of(MOE, dp=4, ep=ep)).stage_parameters[0].values()) for ep in (1, 4)
    )
    experts = 2 * 3 * 4 * 32 * 32
    assert whole - divided == experts * 3 // 4
