"""A layout that fails verify is told where: the first wrong tensor, what is wrong in it, and the
dimension of the layout that does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from support.families import moe
from support.models import tiny
from support.world import run_world
from titanlike.config.schema import ActivationCheckpoint, Config, Fsdp, Schedule
from titanlike.launch.worker import Worker
from titanlike.pipeline.pipeline import Pipeline
from titanlike.proof.localization import Attempts, Recorder
from titanlike.proof.verification import Found, verify


def located(config: Config, worker: Worker, break_it: Callable[[], None]) -> dict[str, Any]:
    break_it()
    return verify(config, worker)


def recorded(config: Config, worker: Worker) -> tuple[Found | None, int]:
    """As a layout that fails is; (what is found, compared tensors)."""
    recorder = Recorder()
    return Attempts(config, worker, frozenset()).run(config, recorder), recorder.compared_tensors


def summed_over_dp() -> None:
    right = Pipeline.forward_backward

    def train(self: Pipeline, batch: dict[str, Tensor], *options: Any) -> Any:
        result = right(self, batch, *options)
        if self._mesh.dp > 1:
            for stage in self._stages.values():
                for parameter in stage.parameters():
                    parameter.grad.mul_(2)
        return result

    Pipeline.forward_backward = train


FAULTS = {
    "summed over dp": (
        tiny(dp=2, pp=2, layers=2, schedule=Schedule("1f1b", 2)),
        summed_over_dp,
        ["2 times: summed instead of averaged over dp", "what is done to gradients"],
        "fails with dp=2 alone; passes without it",
    ),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS.keys())
def test_the_first_wrong_place_is_named(case: Any, tmp_path: Path) -> None:
    config, break_it, texts, axis = case
    result = run_world(located, config, tmp_path, break_it)[0]
    first = result["first_difference"]
    assert result["exit_code"] == 1
    assert all(text in "\n".join(first["first"]) for text in texts), first
    assert first["axis"] == axis, first


ALL = {
    "pp=2 dp=2": tiny(dp=2, pp=2, layers=2, schedule=Schedule("1f1b", 2)),
    "tp=2": tiny(tp=2, layers=2),
    "tp=2, whole": tiny(tp=2, layers=2, tp_sequence=False),
    "cp=2": tiny(cp=2, layers=2),
    "cp=2 tp=2": tiny(cp=2, tp=2, layers=2),
    "gpt2 tp=2": tiny(tp=2, layers=2, family="gpt2"),
    "dp=2 ep=2": tiny(dp=2, ep=2, model=moe()),
    "dualpipev": tiny(pp=2, layers=4, schedule="dualpipev"),
    "recomputed": tiny(
        dp=2, layers=2, activation_checkpoint=ActivationCheckpoint("full"), fsdp=Fsdp(3)
    ),
}


def table(cases: dict[str, Any], default: str) -> Any:
    slow = pytest.mark.slow
    return [pytest.param(c, id=n, marks=() if n == default else slow) for n, c in cases.items()]


@pytest.mark.parametrize("config", table(ALL, "tp=2"))
def test_a_layout_that_is_right_is_right_in_all_places(config: Config, tmp_path: Path) -> None:
    found, compared = run_world(recorded, config, tmp_path)[0]
    assert found.agrees and not found.wrong, found.wrong
    assert compared > 50, compared
