"""A profile: a few steps recorded on a few ranks, a file for each in run_dir/profile.

1. One step ahead torch's profiler warms up; it starts with the first of the steps.
2. While it records, the actions of the schedule and the phases of a step are named ranges.
3. When the next step begins, or the run ends before, each of the ranks writes its file, while the
   others wait. A file that cannot be written is reported, and no reason for the run to fail.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titanlike.config.files import replaced, temporary_beside
from titanlike.config.schema import Config, MemoryProfile, TraceProfile
from titanlike.launch.hang import read_action
from titanlike.launch.watchdog import Watchdog
from titanlike.launch.worker import Worker
from titanlike.torch_private.accelerator import (
    has_memory_history,
    start_memory_history,
    stop_memory_history,
    write_memory_history,
)
from titanlike.training.build import Run


class Profile:
    """The profile of one run, on this rank."""

    def __init__(
        self,
        config: Config,
        worker: Worker,
        run: Run,
        watchdog: Watchdog,
        report: Callable[[int, str], None],
    ) -> None:
        """report: called with the step and the text once files are written, on each rank."""
        self._config, self._run, self._watchdog, self._report = config, run, watchdog, report
        self._rank, self._folder = worker.rank, worker.run_dir / "profile"
        self._recorded: set[int] = set()  # steps
        self._recorder: TraceRecorder | SnapshotRecorder | None = None  # of a rank that records
        self._ranges = ProfilerRanges()
        settings = config.profile
        assert isinstance(settings, MemoryProfile), "with a profile"
        self._over = False
        self._first, self._last = settings.steps
        chosen = sorted({*settings.ranks}) or [
            run.mesh.stage_ranks(pp)[0] for pp in range(run.mesh.pp)
        ]
        # an elastic run may have fewer
        self._ranks = [rank for rank in chosen if rank < config.world_size]
        if self._rank in self._ranks:
            self._recorder = recorder_for(settings, run.mesh.device)

    def describe(self, start: int) -> str:
        """A line for the opening table of a run that goes on from step `start`."""
        steps = _numbers("step", range(self._first, self._last + 1))
        if start >= self._last:
            return f"none: {steps} are over at step {start}, from which the run goes on"
        return f"{self._config.profile.name} of {steps}, {_numbers('rank', self._ranks)}"

    def begin_step(self, step: int) -> None:
        """The next step begins. All ranks call it."""
        if self._over:
            return
        if step > self._last and self._recorded:
            self._finish(together=True)
        elif self._first <= step <= self._last:
            self._record(step)
        elif step == self._first - 1 and self._recorder is not None:
            self._recorder.prepare()

    def close(self, together: bool) -> None:
        """The run ends: write what is recorded.

        together: all ranks are here; False where one has failed.
        """
        if self._recorded and not self._over:
            self._finish(together)
        elif self._recorder is not None:
            self._recorder.stop()  # it may be prepared

    def _record(self, step: int) -> None:
        if self._recorder is not None:
            if not self._recorded:
                self._recorder.start()
                self._run.ranges.add(self._ranges)
            self._ranges.start_step(step)
        self._recorded.add(step)

    def _finish(self, together: bool) -> None:
        self._over = True
        mesh, settings, step = self._run.mesh, self._config.profile, max(self._recorded)
        self._watchdog.enter_phase(step, "profile", self._config.launch.timeout)
        failed = torch.zeros(mesh.world_size)  # by rank
        if self._recorder is not None:
            self._ranges.close()
            self._run.ranges.remove(self._ranges)
            failed[self._rank] = not self._write(self._recorder)
        known = self._ranks
        if together and mesh.world_size > 1:
            failed = mesh.sum(failed.to(mesh.device)).cpu()
        elif not together:
            known = [rank for rank in known if rank == self._rank]
        written = [rank for rank in known if not failed[rank]]
        texts = []
        if written:
            of = f"{_numbers('step', self._recorded)}, {_numbers('rank', written)}"
            assert isinstance(settings, MemoryProfile)
            viewer = viewer_of(settings, mesh.device)
            texts.append(f"{settings.name} of {of} is in {self._folder}: open it in {viewer}")
        if left := [rank for rank in known if failed[rank]]:
            texts.append(f"could not be written by {_numbers('rank', left)}, see their logs")
        if texts:
            self._report(step, f"profile: {'; '.join(texts)}")

    def _write(self, recorder: TraceRecorder | SnapshotRecorder) -> bool:
        """Whether this rank's file could be written; the reason is printed to the rank's log."""
        steps = f"{min(self._recorded)}-{max(self._recorded)}"
        name = f"{self._config.profile.name}_steps{steps}_rank{self._rank}{recorder.ending}"
        path = self._folder / name
        try:
            recorder.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            with replaced(path) as temporary:
                recorder.write(temporary)
        except Exception:  # whatever the profiler raises: the run is worth more
            print(f"{path} could not be written\n{traceback.format_exc()}", file=sys.stderr)
            return False
        return True


def _numbers(name: str, numbers: Iterable[int]) -> str:
    """step 3; steps 10 to 12; ranks 0, 8; the first few of many."""
    found = sorted(numbers)
    if len(found) == 1:
        return f"{name} {found[0]}"
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{name}s {found[0]} to {found[-1]}"
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"{name}s {', '.join(map(str, found[:8]))}{more}"


class ProfilerRanges:
    """A `Listener`."""

    def __init__(self) -> None:
        # of the step, its phase, the action; outermost first
        self._open: list[record_function] = []

    def start_step(self, step: int) -> None:
        """A step's first phase is its data."""
        self._enter(0, f"step {step}")
        self._enter(1, "data")

    def begin(self, phase: str) -> None:
        self._enter(1, phase)

    def start_action(self, action: Any) -> None:
        if action is None:
            self._leave(2)
        else:
            self._enter(2, action_name(action))

    def action_queued(self, action: Any, received: bool) -> None:
        """Kernels tell."""

    def close(self) -> None:
        self._leave(0)

    def _enter(self, depth: int, name: str) -> None:
        self._leave(depth)
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def _leave(self, depth: int) -> None:
        while len(self._open) > depth:
            self._open.pop().__exit__(None, None, None)


def action_name(action: Any) -> str:
    """1F3 -> "forward stage 1 microbatch 3"."""
    found = read_action(str(action))
    if found is None:
        return str(action)
    words, stage, microbatch = found
    return f"{words} stage {stage}" + (f" microbatch {microbatch}" if microbatch else "")


_CURVE = "bytes allocated since the profile began"


def recorder_for(settings: MemoryProfile, device: torch.device) -> TraceRecorder | SnapshotRecorder:
    """What records such a profile on a rank with this device."""
    if isinstance(settings, TraceProfile):
        return TraceRecorder(device, memory=False, stacks=settings.stacks)
    if has_memory_history(device):
        return SnapshotRecorder(device)
    return TraceRecorder(device, memory=True, stacks=False)


def viewer_of(settings: MemoryProfile, device: torch.device) -> str:
    """Where the files that it writes can be looked at."""
    trace = isinstance(settings, TraceProfile) or not has_memory_history(device)
    return "https://ui.perfetto.dev" if trace else "https://docs.pytorch.org/memory_viz"


class TraceRecorder:
    """torch's profiler: ranges, operators and kernels; with `memory` also allocations, as a curve.
    Records from `start` to `stop`."""

    ending = ".json.gz"  # of the file's name

    def __init__(self, device: torch.device, *, memory: bool, stacks: bool) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints that it starts, and stops
        self._profiler = profile(
            activities={ProfilerActivity.CPU, getattr(ProfilerActivity, device.type.upper())},
            record_shapes=True,
            profile_memory=memory,
            with_stack=stacks,
        )
        self._memory = memory
        self._prepared = self._started = False

    def prepare(self) -> None:
        """Optional, a step before `start`: what takes time at first."""
        if self._prepared:  # the run has rolled back
            return
        with warnings.catch_warnings():  # 2.11 warns of profiles with several cycles: there is one
            warnings.simplefilter("ignore")
            self._profiler.prepare_trace()
        self._prepared = True

    def start(self) -> None:
        self.prepare()
        self._profiler.start_trace()
        self._started = True

    def stop(self) -> None:
        """Record no more. Does nothing where it neither was prepared nor has started."""
        if self._prepared:
            if not self._started:
                self._profiler.start_trace()  # what is prepared cannot be given up otherwise
            self._profiler.stop_trace()
        self._prepared = self._started = False

    def write(self, path: Path) -> None:
        """Once it has stopped. Raises OSError, or what torch's profiler raises."""
        plain = temporary_beside(path)  # not in /tmp, as torch compresses: a node's may be small
        try:
            self._profiler.export_chrome_trace(str(plain))
            if not plain.exists() or not plain.stat().st_size:
                raise OSError(f"torch's profiler has written nothing to {plain}")
            with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
                if self._memory:
                    trace = _with_curve(json.load(source))
                    target.write(json.dumps(trace).encode())
                else:
                    shutil.copyfileobj(source, target)
        finally:
            with contextlib.suppress(OSError):
                plain.unlink(missing_ok=True)


class SnapshotRecorder:
    """The history of a GPU's memory, recorded in the same way."""

    ending = ".pickle"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self) -> None:
        """Nothing takes time at first."""

    def start(self) -> None:
        start_memory_history(self._device)

    def stop(self) -> None:
        """Nothing: it records until it is written."""

    def write(self, path: Path) -> None:
        try:
            write_memory_history(self._device, path)
        finally:
            stop_memory_history(self._device)


def _with_curve(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace with a counter over its [memory] events, which Perfetto draws."""
    counters = [
        {
            "ph": "C",
            "name": _CURVE,
            "pid": event["pid"],
            "ts": event["ts"],
            "args": {"bytes": event["args"]["Total Allocated"]},
        }
        for event in trace["traceEvents"]
        if event["name"] == "[memory]"
    ]
    return trace | {"traceEvents": trace["traceEvents"] + counters}
