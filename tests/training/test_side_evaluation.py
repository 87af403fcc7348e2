"""evaluate.every: checkpoints are evaluated by a process beside the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.models import tiny
from titanlike.config.schema import Checkpoint, Evaluate
from titanlike.config.validate import problems
from titanlike.metrics.run_files import Events
from titanlike.training.side_evaluation import SideEvaluation

EVERY = Evaluate(every=4, tasks=["arc_easy"], timeout=60)


@pytest.mark.parametrize(
    "evaluate, saved, key",
    [
        (replace(EVERY, tasks=[]), 2, "evaluate.tasks"),
        (EVERY, 3, "evaluate.every"),
        (EVERY, 0, "evaluate.every"),
    ],
)
def test_tasks_without_a_checkpoint_or_a_name_are_refused(
    evaluate: Evaluate, saved: int, key: str
) -> None:
    config = tiny(evaluate=evaluate, checkpoint=Checkpoint(every=saved))
    assert key in {problem.key for problem in problems(config)}


@pytest.mark.slow
@pytest.mark.parametrize("timeout, why", [(60.0, "failed (2)"), (0.01, "took more than 0.01 s")])
def test_an_evaluation_that_fails_or_lasts_too_long_is_an_event_and_ends(
    timeout: float, why: str, tmp_path: Path
) -> None:
    """Once the checkpoint is committed, not before; here there is none to be read."""
    said: list[str] = []
    config = tiny(run_dir=str(tmp_path), evaluate=replace(EVERY, timeout=timeout))
    side = SideEvaluation(config, tmp_path, Events(tmp_path, said.append))
    side.want(4)
    side.finish(newest=2)
    assert not said and not (tmp_path / "logs").exists()
    side.finish(newest=4)
    assert why in said[0] and "evaluation_failed" in (tmp_path / "events.jsonl").read_text()
