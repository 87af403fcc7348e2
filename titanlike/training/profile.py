"""A profile: a few steps recorded on a few ranks, a file for each in run_dir/profile.

1. One step ahead torch's profiler warms up; it starts with the first of the steps.
2. While it records, the actions of the schedule and the phases of a step are named ranges.
3. When the next step begins, or the run ends before, each of the ranks writes its file, while the
   others wait. A file that cannot be written is reported, and no reason for the run to fail.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable

import torch

from titanlike.config.files import temporary_beside
from titanlike.config.profile import MemoryProfile, profile_folder
from titanlike.config.schema import Config
from titanlike.launch.watchdog import Watchdog
from titanlike.launch.worker import Worker
from titanlike.training.build import Run
from titanlike.training.profiler_ranges import ProfilerRanges
from titanlike.training.recorders import Recorder, recorder_for, viewer_of


class Profile:
    """Of one run with a profile, on this rank."""

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
        self._rank, self._folder = worker.rank, profile_folder(worker.run_dir)
        self._recorded: set[int] = set()  # steps
        self._recorder: Recorder | None = None  # of a rank that records
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
        """For the opening table of a run that goes on from step `start`."""
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

    def _write(self, recorder: Recorder) -> bool:
        """Whether this rank's file could be written; the reason is printed to the rank's log."""
        steps = f"{min(self._recorded)}-{max(self._recorded)}"
        name = f"{self._config.profile.name}_steps{steps}_rank{self._rank}{recorder.ending}"
        path = self._folder / name
        temporary = temporary_beside(path)
        try:
            recorder.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            recorder.write(temporary)
            os.replace(temporary, path)
        except Exception:  # whatever the profiler raises: the run is worth more
            print(f"{path} could not be written\n{traceback.format_exc()}", file=sys.stderr)
            return False
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
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
