"""ep gives each rank a part of every layer's experts; all axes go with each other.

Each layout is verified against one process in plain torch, gradients and balance included.
"""

from __future__ import annotations

import copy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from support.cells import GRID, slow
from support.families import hf, moe
from support.models import tiny
from support.proven import assert_proven
from titanlike.config.groups import ActivationCheckpoint
from titanlike.config.schema import Config
from titanlike.training.draft import draft, preflight

PATIENCE = 300
LOSSES = {"balance_loss": 0.01, "z_loss": 0.001}
MODELS = {
    "moe": moe(shared_experts=1, **LOSSES),
    "hf mixtral": hf("mixtral", num_hidden_layers=2),
    "hf qwen3 moe": hf("qwen3_moe", num_hidden_layers=2),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2 ep=2": {"dp": 2, "ep": 2},
    "dp=4 ep=2, sharded parameters": {"dp": 4, "ep": 2, "zero": 3},
    "dp=4 ep=4": {"dp": 4, "ep": 4},
    "pp=2 dp=2 ep=2": {"pp": 2, "dp": 2, "ep": 2},
    "dp=2 tp=2 ep=2": {"dp": 2, "tp": 2, "ep": 2},
    "cp=2 ep=2": {"cp": 2, "ep": 2},
    "dp=2 cp=2 ep=4": {"dp": 2, "cp": 2, "ep": 4},
    "zero bubble, recomputed": {
        "pp": 2,
        "dp": 2,
        "ep": 2,
        "schedule": "zbvzerobubble",
        "recomputed": "full",
    },
}


def config_of(
    model: str, zero: int | str = "auto", recomputed: str = "none", **layout: Any
) -> Config:
    config = tiny(
        model=copy.deepcopy(MODELS[model]),
        batch_size=8,
        seq_len=16,
        steps=3,
        activation_checkpoint=ActivationCheckpoint(recomputed),
        **layout,
    )
    config.fsdp.zero = zero
    if config.schedule.name == "zbvzerobubble":
        args, layers = config.model.args, "layers"
        if "config" in args:
            args, layers = args["config"], "num_hidden_layers"
        args[layers] = 4
    return config


QUICK = [
    ("moe", "zero bubble, recomputed"),
    ("hf mixtral", "dp=2 cp=2 ep=4"),
]
LEFT_OUT = [  # by .ci/run, too
    (("moe", "zero bubble, recomputed"),),
    (("hf mixtral", "dp=2 cp=2 ep=4"),),
]


def every() -> list[tuple[str, str]]:
    return [(model, layout) for model in MODELS for layout in LAYOUTS]


REST = [(c,) for c in every() if c not in QUICK and (c,) not in LEFT_OUT]


@pytest.mark.parametrize("cell", [*QUICK, *slow(*LEFT_OUT, marks=GRID), *slow(*REST)], ids=str)
def test_a_mixture_trains_as_one_process_does(cell: tuple[str, str], tmp_path: Path) -> None:
    model, layout = cell
    if model.startswith("hf") and "tp" in LAYOUTS[layout]:
        pytest.skip("these families have no plan of their own for tp")
    config = config_of(model, **LAYOUTS[layout])
    assert preflight(config) == []
    assert_proven(config, tmp_path, PATIENCE)


# each pair of axes is larger than one; ep is taken from dp and cp
PAIRS = {
    ("pp", "dp"): {},
    ("pp", "replicate"): {"dp": 2},
    ("pp", "tp"): {},
    ("pp", "cp"): {},
    ("pp", "ep"): {"dp": 2},
    ("dp", "replicate"): {"dp": 4},
    ("dp", "tp"): {},
    ("dp", "cp"): {},
    ("dp", "ep"): {},
    ("replicate", "tp"): {"dp": 2},
    ("replicate", "cp"): {"dp": 2},
    ("replicate", "ep"): {"dp": 4},
    ("tp", "cp"): {},
    ("tp", "ep"): {"dp": 2},
    ("cp", "ep"): {},
}


def test_all_pairs_of_axes_are_there() -> None:
    every = combinations(("pp", "dp", "replicate", "tp", "cp", "ep"), 2)
    assert {frozenset(pair) for pair in PAIRS} == {frozenset(pair) for pair in every}


@pytest.mark.parametrize(
    "pair", [*slow(*((p,) for p in PAIRS if p != ("tp", "cp"))), *slow((("tp", "cp"),), marks=GRID)]
)
def test_each_pair_of_axes(pair: tuple[str, str], tmp_path: Path) -> None:
    layout = dict.fromkeys(pair, 2) | PAIRS[pair]
    config = config_of("moe", recomputed="full" if "pp" in pair else "none", **layout)
    assert config.world_size == 4 or "dp" in pair or "ep" in pair
    assert_proven(config, tmp_path, PATIENCE)


@pytest.mark.parametrize(
    "layout, model, reason, fix",
    [
        ({"dp": 2, "ep": 4}, "moe", "does not divide the ranks that share weights, dp = 2", "ep=2"),
        ({"dp": 3, "ep": 3}, "moe", "does not divide the 4 experts of a layer", "ep=1"),
        ({"dp": 2, "ep": 2}, "llama", "the model has no experts", "ep=1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    layout: dict[str, int], model: str, reason: str, fix: str
) -> None:
    from titanlike.config.validate import problems

    config = config_of("moe", **layout)
    config.batch_size = 12
    if model == "llama":
        config.model = tiny().model
    found = problems(config, config.world_size) or preflight(config)
    [problem] = [one for one in found if one.key == "ep"]
    assert (problem.value, problem.fix) == (layout["ep"], fix)
    assert reason in problem.reason


def test_a_rank_has_a_part_of_the_experts() -> None:
    whole, divided = (
        sum(draft(config_of("moe", dp=4, ep=ep)).stage_parameters[0].values()) for ep in (1, 4)
    )
    experts = 2 * 3 * 4 * 32 * 32
    assert whole - divided == experts * 3 // 4
