"""evaluate.every: checkpoints are evaluated by a process beside the run."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from support.models import tiny
from support.waiting import until
from support.world import run_world
from titanlike.checkpoint.discovery import step_name
from titanlike.config.schema import Checkpoint, Config, Evaluate
from titanlike.config.validate import problems
from titanlike.launch.worker import Worker
from titanlike.metrics.run_files import Events
from titanlike.metrics.summary import jsonl_records
from titanlike.training.loop import train
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
    found = {problem.key: problem.fix for problem in problems(config)}
    assert key in found
    assert key == "evaluate.tasks" or found[key] == f"evaluate.every={saved}"


@pytest.mark.slow
@pytest.mark.parametrize("timeout, why", [(60.0, "failed (2)"), (0.01, "took more than 0.01 s")])
def test_a_failed_or_slow_side_evaluation_is_an_event(
    timeout: float, why: str, tmp_path: Path
) -> None:
    """Once the checkpoint is committed, not before; here there is none to be read."""
    said: list[str] = []
    config = tiny(run_dir=str(tmp_path), evaluate=replace(EVERY, timeout=timeout))
    side = SideEvaluation(config, tmp_path, Events(tmp_path, said.append))
    side.want(4)
    side.finish({2}, str)
    assert not said and not (tmp_path / "logs").exists()
    side.finish({2, 4}, str)
    assert why in said[0] and "evaluation_failed" in (tmp_path / "events.jsonl").read_text()


def _with_slow_evaluations(config: Config, worker: Worker) -> None:
    """Train; an evaluation lasts until two more checkpoints are there, that of step 8 leaves no
    results."""
    folder = Path(config.run_dir) / "checkpoints"
    poll = SideEvaluation.poll

    def start(side: SideEvaluation, step: int) -> subprocess.Popen[bytes]:
        own, last = (folder / step_name(at) for at in (step, min(step + 4, 8)))
        results = shlex.quote(json.dumps([{"results": {"task": {"acc": step / 8}}}]))
        line = f"while [ ! -e {last}/COMMITTED ]; do sleep 0.02; done; ls {own}/COMMITTED"
        line += f" && echo {results} > {own}.evaluations.json" if step < 8 else ""
        return subprocess.Popen(["sh", "-c", line])

    def patient_poll(side: SideEvaluation, committed: Collection[int]) -> dict[str, float]:
        """In the next step the save in the background is done."""
        until(lambda: {0, *committed} >= {*side.steps()})
        return poll(side, committed)

    SideEvaluation._start, SideEvaluation.poll = start, patient_poll  # of this process
    train(config, worker)


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_checkpoint_is_evaluated_once_it_is_committed_and_kept_until_then(
    mode: Literal["sync", "async"], tmp_path: Path
) -> None:
    """Also a save in the background, before the next one begins; and an evaluation without results
    does not end the run."""
    saved = Checkpoint(every=2, keep=1, mode=mode)
    evaluate = replace(EVERY, every=2)
    config = tiny(steps=8, run_dir=str(tmp_path), evaluate=evaluate, checkpoint=saved)
    run_world(_with_slow_evaluations, config, tmp_path)
    events = [*jsonl_records(tmp_path / "events.jsonl")]
    ended = {event["step"]: event["event"] for event in events if "evaluation" in event["event"]}
    assert ended[2] == "evaluation" and ended[8] == "evaluation_failed"
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*[0-9]")] == [step_name(8)]
