"""Goodput: where a run's wall time went, from its own files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from titanlike.core.config.files import dumps
from titanlike.core.metrics.goodput import goodput, goodput_text
from titanlike.core.metrics.run_files import STARTS
from titanlike.core.metrics.sinks import JsonlSink
from titanlike.planning.run_charts import planned_goodput


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{dumps(record)}\n" for record in records))


def record(step: int, time: float, seconds: float = 2.0, **more: float) -> dict[str, Any]:
    return {"step": step, "time": time, "step_seconds": seconds, **more}


def test_every_second_of_two_launches_is_accounted_once(tmp_path: Path) -> None:
    """The first launch begins at 100, takes ten seconds to start, is killed; the next at 140."""
    first = [record(1, 115, 5.0), record(2, 117), record(3, 120, save_stall_seconds=1.0)]
    lost = [record(4, 122), record(5, 124)]
    then = [record(4, 147), record(5, 149), record(6, 151)]
    dropped: list[Any] = []
    lines(tmp_path / "metrics.jsonl", [*first, *lost])
    JsonlSink(tmp_path / "metrics.jsonl", 3, lambda *found: dropped.append(found)).close("")
    assert dropped == [(2, 4.0)]
    lines(tmp_path / "metrics.jsonl", [*first, *then])
    starts = [{"step": 0, "time": 109, "began": 100}, {"step": 3, "time": 144, "began": 140}]
    lines(tmp_path / STARTS, starts)
    redone = {"time": 144, "event": "redone", "step": 3, "steps": 2, "seconds": 4.0}
    early = {"time": 121, "event": "saved", "step": 3, "seconds": 1.0, "stall_seconds": 1.0}
    last = {"time": 152, "event": "saved", "step": 6, "seconds": 0.75, "stall_seconds": 0.25}
    lines(tmp_path / "events.jsonl", [early, redone, last])
    found = goodput(tmp_path, 154.0)
    assert found is not None
    expected = {"steps": 12, "redone": 4, "start": 15, "first_step": 3, "save": 1.75, "down": 15}
    expected |= {"other": 3.25, "total": 54}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["share"] == pytest.approx(12 / 54)
    text = goodput_text(found)
    assert text.startswith("22.2% of 54 s in new steps; start 27.8%, down 27.8%, redone 7.4%")


def test_a_run_that_failed_once_is_shown_beside_its_plan(tmp_path: Path) -> None:
    """It lost half of what it can lose between two saves, as is expected of a failure."""
    before = [record(step, 110 + 2 * step) for step in range(1, 51)]
    after = [record(step, 150 + 2 * step) for step in range(51, 101)]
    lines(tmp_path / "metrics.jsonl", [*before, *after])
    every = {"checkpoint": {"every": 10}, "steps": 100}
    first = {"step": 0, "time": 110, "began": 100, "config": every}
    lines(tmp_path / STARTS, [first, {"step": 50, "time": 250, "began": 240, "config": every}])
    saved = {"event": "saved", "seconds": 0.0}
    saves = [saved | {"time": r["time"], "step": r["step"]} for r in before + after]
    redone = {"time": 250, "event": "redone", "step": 50, "steps": 5, "seconds": 10.0}
    lines(tmp_path / "events.jsonl", [*saves[9::10], redone])
    found = goodput(tmp_path)
    assert found is not None and found["share"] == pytest.approx(200 / 250)
    planned = re.fullmatch(
        r"planned ([\d.]+)% with 1 failure, one in 3:50", planned_goodput(tmp_path)
    )
    assert planned is not None and float(planned[1]) == pytest.approx(80, abs=3)
    lines(tmp_path / STARTS, [first])
    assert planned_goodput(tmp_path) == ""


@pytest.mark.parametrize("steps, down, total", [(2, 0.0, 11), (3, 1000.0, 1011)])
def test_idle_time_after_a_finished_run_is_not_lost_time(
    steps: int, down: float, total: float, tmp_path: Path
) -> None:
    lines(tmp_path / "metrics.jsonl", [record(1, 103), record(2, 105), record(3, 1110)])
    starts = [{"step": 0, "time": 101, "began": 100, "config": {"steps": steps}}]
    starts.append({"step": 2, "time": 1107, "began": 1105, "config": {"steps": 3}})
    lines(tmp_path / STARTS, starts)
    found = goodput(tmp_path, 1111.0)
    assert found is not None
    assert (found["down"], found["total"], found["steps"]) == (down, total, 6.0)


def test_a_run_that_trained_nothing_and_a_result_of_an_older_version_have_none(
    tmp_path: Path,
) -> None:
    assert goodput(tmp_path) is None
    assert goodput_text(None) == goodput_text({"share": 1}) == ""
