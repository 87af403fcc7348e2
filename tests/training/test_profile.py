"""A few steps in detail: files that open in Perfetto, with names for what the run does."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.cells import cells
from support.models import tiny
from support.records import numbers
from support.runs import train_each
from support.world import RankError, run_world
from titanlike.config.profile import MemoryProfile, TraceProfile
from titanlike.config.schema import Checkpoint, Config, Schedule, Validation
from titanlike.launch.worker import Worker
from titanlike.training import loop, profiler_ranges, recorders
from titanlike.training.train import train

TRACE = TraceProfile(steps=[2, 3])


def short(pp: int = 1, dp: int = 1, schedule: str = "1f1b", **changes: Any) -> Config:
    """Four steps of two microbatches, a validation and a save after the third."""
    every = {
        "steps": 4,
        "layers": 2 * pp,
        "profile": TRACE,
        "validation": Validation(every=3, batches=1),
        "checkpoint": Checkpoint(every=3, last=False),
    }
    return tiny(pp, dp, Schedule(schedule, 2), **every | changes)


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file."""
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def ranges_in(path: Path) -> Counter[str]:
    """The named ranges of a trace file, and how often each is in it."""
    return Counter(e["name"] for e in events_of(path) if e.get("cat") == "user_annotation")


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").iterdir())


def told(run_dir: Path) -> list[str]:
    """The events of the profile in events.jsonl."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [e["text"] for e in map(json.loads, lines) if e["event"] == "profile"]


@pytest.mark.parametrize(
    "case",
    cells(
        {
            "one process": (short(), {0: ("forward stage 0", "backward stage 0")}),
        },
        {
            "a pipeline": (
                short(2, 2),
                {0: ("forward stage 0", "backward stage 0"), 2: ("forward stage 1",)},
            ),
            "ZeRO 3": (short(1, 2), {0: ("forward stage 0", "backward stage 0")}),
            "a split backward": (
                short(2, 1, "zbvzerobubble"),
                {
                    0: ("forward stage 3", "input gradient stage 0", "weight gradient stage 3"),
                    1: ("forward stage 1", "weight gradient stage 2"),
                },
            ),
        },
    ),
)
def test_a_trace_names_steps_phases_and_actions(
    case: tuple[Config, dict[int, tuple[str, ...]]], tmp_path: Path
) -> None:
    config, computed = case
    run_world(train, config, tmp_path)
    assert files(tmp_path) == [f"trace_steps2-3_rank{rank}.json.gz" for rank in computed]
    for rank, actions in computed.items():
        found = ranges_in(tmp_path / "profile" / f"trace_steps2-3_rank{rank}.json.gz")
        for step in ("step 2", "step 3", "validation", "save"):
            assert found[step] == 1, step
        for phase in ("data", "forward and backward", "gradient norm", "clip", "optimizer"):
            assert found[phase] == 2, phase
        for action in actions:
            for microbatch in range(2):  # in each step; forwards also in the validation
                count = 3 if action.startswith("forward") else 2
                assert found[f"{action} microbatch {microbatch}"] == count, action
        if config.pp > 1:
            assert (
                found["receiving activations stage 1 microbatch 0"]
                + found["sending activations stage 0 microbatch 0"]
            )
    ranks = f"ranks {', '.join(map(str, computed))}" if len(computed) > 1 else "rank 0"
    text = (tmp_path / "rank0.out").read_text()
    assert f"profile       trace of steps 2, 3, {ranks}\n" in text
    (said,) = told(tmp_path)
    assert said in text and str(tmp_path / "profile") in said and "ui.perfetto.dev" in said


@pytest.mark.slow
def test_each_range_is_inside_of_its_step(tmp_path: Path) -> None:
    run_world(train, short(), tmp_path)
    (path,) = (tmp_path / "profile").iterdir()
    found = [e for e in events_of(path) if e.get("cat") == "user_annotation"]
    (step,) = (e for e in found if e["name"] == "step 2")
    (clip, _) = (e for e in found if e["name"] == "clip")
    (backward, _) = (e for e in found if e["name"] == "backward stage 0 microbatch 1")
    (whole, _) = (e for e in found if e["name"] == "forward and backward")
    for outer, inner in ((step, clip), (step, whole), (whole, backward)):
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    inside = [
        e
        for e in events_of(path)
        if e.get("cat") == "cpu_op"
        and backward["ts"] <= e["ts"] <= backward["ts"] + backward["dur"]
    ]
    assert any("Backward" in e["name"] for e in inside)  # what was computed is under its name


@pytest.mark.slow
def test_a_profile_changes_no_number(tmp_path: Path) -> None:
    config = short(checkpoint=Checkpoint(every=0, last=False))
    plain = replace(config, profile=Config().profile)
    for name, each in (("with", config), ("without", plain)):
        run_world(train, each, tmp_path / name)
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    assert not (tmp_path / "without" / "profile").exists()


def train_without_ranges(config: Config, worker: Worker) -> None:
    """Training in which a range, or a call for an action besides the watchdog's, is an error."""
    seen = []
    take = loop.batches_from

    def watched(session: Any) -> Any:
        seen.extend(session.run.pipeline._runtimes.values())
        callback = session.run.pipeline._on_action
        assert callback == session.watchdog.start_action
        return take(session)

    with (
        mock.patch.object(profiler_ranges, "record_function", side_effect=AssertionError),
        mock.patch.object(recorders, "profile", side_effect=AssertionError),
        mock.patch.object(loop, "batches_from", watched),
    ):
        train(config, worker)


def test_without_a_profile_nothing_is_called(tmp_path: Path) -> None:
    run_world(train_without_ranges, short(profile=Config().profile), tmp_path)
    with pytest.raises(RankError, match="AssertionError"):  # and it can fail
        run_world(train_without_ranges, short(), tmp_path / "on")


def train_and_look(config: Config, worker: Worker) -> None:
    """Training after whose profile the actions call the watchdog alone again."""
    seen = []
    take = loop.batches_from

    def watched(session: Any) -> Any:
        seen.append(session)
        return take(session)

    with mock.patch.object(loop, "batches_from", watched):
        train(config, worker)
    assert seen[0].run.pipeline._on_action == seen[0].watchdog.start_action
    assert not seen[0].run.ranges._listeners


def test_on_a_cpu_the_memory_is_a_curve_over_the_trace(tmp_path: Path) -> None:
    run_world(train_and_look, short(profile=MemoryProfile(steps=[2, 2])), tmp_path)
    assert files(tmp_path) == ["memory_steps2-2_rank0.json.gz"]
    events = events_of(tmp_path / "profile" / "memory_steps2-2_rank0.json.gz")
    curve = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    logits = 8 * 16 * 64 * 4  # of a microbatch, fp32
    assert len(curve) > 100 and max(curve) > 2 * logits
    assert any(e["name"] == "forward stage 0 microbatch 1" for e in events)


def failing(config: Config, worker: Worker) -> None:
    """Training whose data end with an error in step 3."""
    take = loop.batches_from

    def some(*args: Any) -> Any:
        for number, batch in enumerate(take(*args), start=1):
            if number == 3:
                raise OSError("the disk of the data is gone")
            yield batch

    with mock.patch.object(loop, "batches_from", some):
        train(config, worker)


def test_a_run_that_ends_before_the_last_of_the_steps_writes_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the disk of the data is gone"):
        run_world(failing, short(profile=TraceProfile(steps=[2, 4])), tmp_path)
    assert files(tmp_path) == ["trace_steps2-3_rank0.json.gz"]
    found = ranges_in(tmp_path / "profile" / "trace_steps2-3_rank0.json.gz")
    assert found["step 2"] == found["step 3"] == 1 and found["optimizer"] == 1
    assert told(tmp_path)[0].startswith("profile: trace of steps 2, 3, rank 0 is in ")


def test_a_folder_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    config = short(1, 2, profile=TraceProfile(steps=[2, 3], ranks=[1]))
    (tmp_path / "profile").write_text("a file in its place")
    run_world(train, config, tmp_path)
    assert len(numbers(tmp_path)) == 4
    assert told(tmp_path) == ["profile: could not be written by rank 1, see their logs"]
    assert "could not be written\nTraceback" in (tmp_path / "rank1.out").read_text()


@pytest.mark.slow
def test_runs_in_one_process_have_a_profile_each(tmp_path: Path) -> None:
    configs = [replace(short(), run_dir=str(tmp_path / name)) for name in "ab"]
    for config in configs:
        Path(config.run_dir).mkdir()
    run_world(train_each, short(), tmp_path / "world", configs)
    for config in configs:
        found = ranges_in(Path(config.run_dir) / "profile" / "trace_steps2-3_rank0.json.gz")
        assert found["step 2"] == found["step 3"] == 1


@pytest.mark.slow
def test_a_run_that_goes_on_beyond_the_steps_says_so(tmp_path: Path) -> None:
    config = short(profile=Config().profile, checkpoint=Checkpoint(every=3, last=False))
    run_world(train, config, tmp_path)
    run_world(train, replace(config, steps=5, profile=TRACE), tmp_path)
    assert "none: steps 2, 3 are over at step 3, from which the run goes on" in (
        (tmp_path / "rank0.out").read_text()
    )
    assert not (tmp_path / "profile").exists()


@pytest.mark.gpu
def test_on_a_gpu_a_trace_has_kernels_and_the_memory_is_a_snapshot(tmp_path: Path) -> None:
    config = short(device="cuda")
    run_world(train, config, tmp_path / "trace")
    path = tmp_path / "trace" / "profile" / "trace_steps2-3_rank0.json.gz"
    assert any(e.get("cat") == "kernel" for e in events_of(path))
    run_world(train, replace(config, profile=MemoryProfile(steps=[2, 3])), tmp_path / "memory")
    (path,) = (tmp_path / "memory" / "profile").iterdir()
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
