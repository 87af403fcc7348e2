"""Profile a few steps on a few ranks: torch.profiler traces or memory snapshots in run_dir/profile.

1. torch.profiler warms up in the step before, records from the first step, and writes the file in
   on_trace_ready. `profile=memory` on a GPU is torch's allocator history instead.
2. While it records, schedule actions and phases of a step are named ranges.
3. When the last step is over, or the run ends earlier, each profiled rank writes its file while the
   others wait. A file that cannot be written is reported and does not fail the run.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from titanlike.core.config.groups.watching import MemoryProfile, TraceProfile
from titanlike.core.config.schema import Config
from titanlike.core.launch.hang import read_action
from titanlike.core.launch.watchdog import Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private import accelerator
from titanlike.core.training.build import Run


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
        self._recorded: set[int] = set()  # steps recorded so far
        self._ranges = ProfilerRanges()
        settings, mesh = config.profile, run.mesh
        assert isinstance(settings, MemoryProfile), "with a profile"
        self._over = False
        self._first, self._last = settings.steps
        first_ranks = [mesh.stage_ranks(pp)[0] for pp in range(mesh.pp)]
        self._ranks = sorted({*settings.ranks}) or first_ranks
        self._records, self._device = self._rank in self._ranks, mesh.device
        self._trace = isinstance(settings, TraceProfile)
        self._snapshots = not self._trace and accelerator.has_memory_history(self._device)
        self._profiler: profile | None = None  # on ranks that record a trace, once started

    def describe(self, start: int) -> str:
        """A line for the opening table of a run that continues from step `start`."""
        steps = _numbers("step", range(self._first, self._last + 1))
        if start >= self._last:
            return f"none: {steps} are over at step {start}, from which the run goes on"
        return f"{self._config.profile.name} of {steps}, {_numbers('rank', self._ranks)}"

    def begin_step(self, step: int) -> None:
        """Start, continue or finish recording as `step` begins. Called by all ranks."""
        if self._over:
            return
        if step > self._last and self._recorded:
            self._finish(together=True)
        elif self._recorded or self._first - 1 <= step <= self._last:
            self._record(step)

    def close(self, together: bool) -> None:
        """Write what is recorded as the run ends.

        together: True if all ranks are here, False if one has failed.
        """
        if self._over:
            return
        if self._recorded:
            self._finish(together)
        elif self._profiler is not None:
            self._profiler.stop()  # warm-up only: nothing is recorded

    def _record(self, step: int) -> None:
        """Record from the start of a step: the warm-up step, a profiled one, or, after a rollback,
        one that is trained again."""
        begins = step >= self._first and not self._recorded
        if step >= self._first:
            self._recorded.add(step)
        if not self._records:
            return
        self._ranges.close()
        if self._snapshots:
            if begins:
                accelerator.record_memory_history(self._device, begin=True)
        elif self._profiler is not None:
            self._profiler.step()
        else:
            settings = self._config.profile
            self._profiler = trace_profiler(
                self._device,
                lambda: self._path(".json.gz"),
                schedule=lambda _: (
                    ProfilerAction.RECORD if self._recorded else ProfilerAction.WARMUP
                ),
                profile_memory=not self._trace,
                with_stack=isinstance(settings, TraceProfile) and settings.stacks,
            )
            self._profiler.start()
        if begins:
            self._run.phases.observers.append(self._ranges)
        if self._recorded:
            self._ranges.start_step(step)

    def _finish(self, together: bool) -> None:
        self._over = True
        mesh, settings, step = self._run.mesh, self._config.profile, max(self._recorded)
        self._watchdog.enter_phase(step, "profile", self._config.launch.timeout)
        failed = torch.zeros(mesh.world_size)  # by rank
        if self._records:
            self._ranges.close()
            self._run.phases.remove(self._ranges)
            failed[self._rank] = not self._write()
        known = self._ranks
        if together and mesh.world_size > 1:
            failed = mesh.sum(failed.to(mesh.device)).cpu()
        elif not together:
            known = [rank for rank in known if rank == self._rank]
        written = [rank for rank in known if not failed[rank]]
        texts = []
        if written:
            described = f"{_numbers('step', self._recorded)}, {_numbers('rank', written)}"
            assert isinstance(settings, MemoryProfile)
            viewer = "docs.pytorch.org/memory_viz" if self._snapshots else "ui.perfetto.dev"
            texts.append(
                f"{settings.name} of {described} is in {self._folder}: open it in https://{viewer}"
            )
        if unwritten := [rank for rank in known if failed[rank]]:
            texts.append(f"could not be written by {_numbers('rank', unwritten)}, see their logs")
        if texts:
            self._report(step, f"profile: {'; '.join(texts)}")

    def _path(self, ending: str) -> Path:
        steps = f"{min(self._recorded)}-{max(self._recorded)}"
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{self._config.profile.name}_steps{steps}_rank{self._rank}{ending}"

    def _write(self) -> bool:
        """Write this rank's file; False if that fails, with the reason in the rank's log."""
        try:
            if self._profiler is not None:
                self._profiler.stop()  # calls on_trace_ready
            else:
                accelerator.write_memory_history(self._device, self._path(".pickle"))
        except Exception:  # whatever the profiler raises: the run is worth more
            print(f"the profile could not be written\n{traceback.format_exc()}", file=sys.stderr)
            return False
        finally:
            if self._snapshots:
                accelerator.record_memory_history(self._device, begin=False)
        return True


def _numbers(name: str, numbers: Iterable[int]) -> str:
    """Format numbers: "step 3", "steps 10 to 12", "ranks 0, 8", the first eight of many."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return f"{name} {ordered[0]}"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{name}s {ordered[0]} to {ordered[-1]}"
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return f"{name}s {', '.join(map(str, ordered[:8]))}{more}"


class ProfilerRanges:
    """A `StepObserver` that opens a named profiler range for each step, phase and action."""

    def __init__(self) -> None:
        # open ranges of step, phase and action, outermost first
        self._open: list[record_function] = []

    def start_step(self, step: int) -> None:
        """Open the ranges of a step and of its first phase, data."""
        self._enter(0, f"step {step}")
        self._enter(1, "data")

    def begin(self, phase: str) -> None:
        self._enter(1, phase)

    def start_action(self, action: Any) -> None:
        if action is None:
            self._leave(2)
        elif (parsed := read_action(str(action))) is None:
            self._enter(2, str(action))
        else:  # 1F3: forward stage 1 microbatch 3
            words, stage, mb = parsed
            self._enter(2, f"{words} stage {stage}" + (f" microbatch {mb}" if mb else ""))

    def action_queued(self, action: Any, received: bool) -> None:
        """Ignored: the profiler records kernels itself."""

    def close(self) -> None:
        self._leave(0)

    def _enter(self, depth: int, name: str) -> None:
        self._leave(depth)
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def _leave(self, depth: int) -> None:
        while len(self._open) > depth:
            self._open.pop().__exit__(None, None, None)


def trace_profiler(device: torch.device, file: Callable[[], Path], **settings: Any) -> profile:
    """Create a torch profiler of ranges, operators and kernels that writes `file()` when it stops."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences messages about start and stop
    return profile(
        activities={ProfilerActivity.CPU, getattr(ProfilerActivity, device.type.upper())},
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file())),
        record_shapes=True,
        acc_events=True,  # otherwise torch 2.11 warns of several cycles, though there is one
        **settings,
    )
