"""Models that know nothing of a pipeline are cut anywhere, and what cannot be cut is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.cells import slow
from support.models import tiny
from support.proven import assert_proven
from titanlike.core.config.groups.pipeline import PointSplit
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan


def config(name: str, *mesh: Any, points: list[str] | None = None, **changes: Any) -> Config:
    model = Custom(f"support.any_models.{name}")
    if points:
        changes["split"] = PointSplit(points=points)
    return tiny(*mesh, model=model, **changes)


INSIDE = ["trunk", "trunk.blocks.b0.mlp", "trunk.blocks.b2.norm"]


@pytest.mark.parametrize(
    "case",
    [
        config("Deep", 2, 1, "interleaved1f1b", points=INSIDE),
        *slow(
            config("Unused", 2, 2, "zbvzerobubble"),
            config(  # what is sent around a norm is what the norm has saved
                "Deep",
                2,
                1,
                "zbvzerobubble",
                points=["trunk.blocks.b0.mlp", "trunk.blocks.b2.mlp", "trunk.blocks.b3"],
            ),
        ),
    ],
    ids=lambda case: f"{case.model.name.partition('.')[2]} {case.schedule.name}",
)
def test_models_are_cut_where_the_user_says(case: Config, tmp_path: Path) -> None:
    assert_proven(case, tmp_path)


def test_a_stage_may_begin_inside_of_a_block() -> None:
    plan = make_plan(config("Deep", 2, 1, points=["trunk.blocks.b2.mlp"]))
    assert plan.stages[0][-1] == "trunk.blocks.b2.norm"
    assert plan.stages[1] == ["trunk.blocks.b2.mlp", "trunk.blocks.b3", "write"]
    second = plan.model_graph.graphs(plan.fields, True)[1]
    assert len(second.receives) == 2, "the residual goes around the cut"


@pytest.mark.parametrize(
    "case, key, told",
    [
        (
            config("Unregistered"),
            "model.name",
            "self.register_buffer('table', ..., persistent=False)",
        ),
        (config("Misshapen"), "model", "its forward on inputs [16, 16] raised RuntimeError"),
        (config("Deep", 2, points=["trunk.blocks.b2.mpl"]), "split.points", "blocks.b2.mlp]"),
        (
            config("Deep", 3, points=["trunk", "trunk.blocks.b0"], batch_size=15),
            "split.points",
            "trunk.blocks.b0 begins where trunk does",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_model_is_refused_by_name(case: Config, key: str, told: str) -> None:
    (problem,) = preflight(case)
    assert problem.key == key and told in str(problem), str(problem)
