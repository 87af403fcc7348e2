"""A few steps in detail: files that open in Perfetto, with names for what the run does."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.commands import TINY
from support.models import tiny
from support.records import numbers
from support.saved_runs import events
from support.world import RankError, run_world
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.watching import MemoryProfile, TraceProfile
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.training import loop
from titanlike.core.training.loop import train
from titanlike.watch import profile

TRACE = TraceProfile(steps=[2, 3])
OFF = Config().profile


def short(pp: int = 1, dp: int = 1, schedule: str = "1f1b", **changes: Any) -> Config:
    """Four steps of two microbatches, a validation and a save after the third."""
    every = {
        "steps": 4,
        "layers": 2 * pp,
        "profile": TRACE,
        "validation": Validation(every=3, batches=1),
        "checkpoint": Checkpoint(every=3, last=False),
    }
    return tiny(pp=pp, dp=dp, schedule=Schedule(schedule, 2), **every | changes)


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
    return [event["text"] for event in events(run_dir, "profile")]


# --- a trace --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two ranks, traced."""
    folder = tmp_path_factory.mktemp("traced")
    run_world(train, short(2), folder)
    return folder


def trace_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "profile" / f"trace_steps2-3_rank{rank}.json.gz"


def test_a_trace_names_steps_phases_and_actions(traced: Path) -> None:
    assert files(traced) == [trace_of(traced, rank).name for rank in (0, 1)]
    for rank in (0, 1):
        found = ranges_in(trace_of(traced, rank))
        for step in ("step 2", "step 3", "validation", "save"):
            assert found[step] == 1, step
        for phase in ("data", "forward and backward", "gradient norm", "clip", "optimizer"):
            assert found[phase] == 2, phase
        for microbatch in range(2):  # in each step; forwards also in the validation
            assert found[f"forward stage {rank} microbatch {microbatch}"] == 3
            assert found[f"backward stage {rank} microbatch {microbatch}"] == 2
        assert (
            found["receiving activations stage 1 microbatch 0"]
            + found["sending activations stage 0 microbatch 0"]
        )
    text = (traced / "rank0.out").read_text()
    assert "profile       trace of steps 2, 3, ranks 0, 1\n" in text
    (said,) = told(traced)
    assert said in text and str(traced / "profile") in said and "ui.perfetto.dev" in said


def test_each_range_is_inside_of_its_step(traced: Path) -> None:
    found = [e for e in events_of(trace_of(traced, 0)) if e.get("cat") == "user_annotation"]
    (step,) = (e for e in found if e["name"] == "step 2")
    (clip, _) = (e for e in found if e["name"] == "clip")
    (backward, _) = (e for e in found if e["name"] == "backward stage 0 microbatch 1")
    (whole, _) = (e for e in found if e["name"] == "forward and backward")
    for outer, inner in ((step, clip), (step, whole), (whole, backward)):
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    begin, end = backward["ts"], backward["ts"] + backward["dur"]
    inside = [e for e in events_of(trace_of(traced, 0)) if e.get("cat") == "cpu_op"]
    inside = [e["name"] for e in inside if begin <= e["ts"] <= end]
    assert any("Backward" in name for name in inside)  # what was computed is under its name


def train_without_ranges(config: Config, worker: Worker) -> None:
    """Training in which a range is an error, or that anything but the time of ranks listens."""
    take = loop.batches_from

    def watched(session: Any) -> Any:
        assert session.run.phases.observers == [session.watchdog, session.run.busy]
        return take(session)

    with (
        mock.patch.object(profile, "record_function", side_effect=AssertionError),
        mock.patch.object(profile, "profile", side_effect=AssertionError),
        mock.patch.object(loop, "batches_from", watched),
    ):
        train(config, worker)


def test_without_a_profile_nothing_is_called_and_the_numbers_are_the_same(
    traced: Path, tmp_path: Path
) -> None:
    run_world(train_without_ranges, short(2, profile=OFF), tmp_path)
    assert numbers(tmp_path) == numbers(traced) and len(numbers(traced)) == 4
    assert not (tmp_path / "profile").exists()


# --- the run around it ----------------------------------------------------------------------------


def train_and_look(config: Config, worker: Worker) -> None:
    """Training after whose profile the actions call the watchdog alone again."""
    seen = []
    take = loop.batches_from

    def watched(session: Any) -> Any:
        seen.append(session)
        return take(session)

    with mock.patch.object(loop, "batches_from", watched):
        train(config, worker)
    assert seen[0].run.phases.observers == [seen[0].watchdog]


def test_on_a_cpu_the_memory_is_in_the_trace(tmp_path: Path) -> None:
    run_world(train_and_look, short(profile=MemoryProfile(steps=[2, 2])), tmp_path)
    assert files(tmp_path) == ["memory_steps2-2_rank0.json.gz"]
    events = events_of(tmp_path / "profile" / "memory_steps2-2_rank0.json.gz")
    curve = [e["args"]["Total Allocated"] for e in events if e["name"] == "[memory]"]
    logits = 8 * 16 * 64 * 4  # of a microbatch, fp32
    assert len(curve) > 100 and max(curve) > 2 * logits
    assert any(e["name"] == "forward stage 0 microbatch 1" for e in events)


def failing(config: Config, worker: Worker) -> None:
    """Training whose data end with an error in step 4."""
    take = loop.batches_from

    def some(*args: Any) -> Any:
        for number, batch in enumerate(take(*args), start=1):
            if number == 4:
                raise OSError("the disk of the data is gone")
            yield batch

    with mock.patch.object(loop, "batches_from", some):
        train(config, worker)


def test_a_run_that_fails_keeps_its_last_step_and_the_profile_that_it_has(tmp_path: Path) -> None:
    config = short(2, profile=TraceProfile(steps=[3, 6]), validation=Validation(every=0), steps=9)
    with pytest.raises(RankError, match="the disk of the data is gone"):
        run_world(failing, replace(config, checkpoint=Checkpoint(every=0)), tmp_path)
    assert [step for step, *_ in numbers(tmp_path)] == [1, 2, 3]
    assert "trace_steps3-4_rank0.json.gz" in files(tmp_path)
    found = ranges_in(tmp_path / "profile" / "trace_steps3-4_rank0.json.gz")
    assert found["step 3"] == found["step 4"] == 1 and found["optimizer"] == 1
    assert told(tmp_path)[0].startswith("profile: trace of steps 3, 4, rank 0 is in ")


def test_a_folder_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file in its place")
    run_world(train, short(), tmp_path)
    assert len(numbers(tmp_path)) == 4
    assert told(tmp_path) == ["profile: could not be written by rank 0, see their logs"]
    assert "could not be written\nTraceback" in (tmp_path / "rank0.out").read_text()


@pytest.mark.gpu
def test_on_a_gpu_a_trace_has_kernels_and_the_memory_is_a_snapshot(tmp_path: Path) -> None:
    for kind in ("trace", "memory"):  # processes of their own: no fork of this one starts CUDA
        words = [f"profile={kind}", "profile.steps=[2,3]", "steps=4", "device=cuda"]
        command = [sys.executable, "-m", "titanlike", "train", *TINY, *words]
        subprocess.run([*command, f"run_dir={tmp_path / kind}"], check=True, timeout=120)
    assert any(e.get("cat") == "kernel" for e in events_of(trace_of(tmp_path / "trace", 0)))
    (path,) = (tmp_path / "memory" / "profile").iterdir()
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
