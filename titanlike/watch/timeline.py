"""Record a timeline: when this rank computed, waited and communicated in a few steps of a run.

1. From the first of the steps, marks are taken of phases, actions, P2P receives and FSDP
   collectives: host times on a CPU, events in the stream of a device.
2. When the last step is over, or the run ends earlier, each rank writes a file; rank 0 aligns them
   to its clock and merges them into timeline.json, a picture and a trace.

A timeline that cannot be written is reported and does not fail the run.
"""

from __future__ import annotations

import shlex
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlike.core.config.groups.watching import TIMELINE
from titanlike.core.config.parse import to_plain
from titanlike.core.config.program import tool_program
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator
from titanlike.core.distributed.async_reads import mark, seconds_between
from titanlike.core.launch.watchdog import Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import Sink
from titanlike.core.pipeline.order import Action
from titanlike.core.torch_private.fsdp import parameter_groups, watch_collectives
from titanlike.core.training.build import Run
from titanlike.watch import timeline_file
from titanlike.watch.chart import Span
from titanlike.watch.timeline_file import COMPUTED, RankFile, RankStep

MOST_RANKS = 64  # in larger runs only the ranks of the first pipeline write a file
_PHASES = {
    "data": "data",
    "forward and backward": "agree",  # an all-reduce of token counts, then actions follow
    "gradient norm": "update",
    "agree": "agree",
    "clip": "update",
    "optimizer": "update",
    "validation": "other",
    "save": "other",
}  # all other phases: host
_ACTIONS = {"UNSHARD": "gather", "REDUCE_GRAD": "reduce", "WAIT_REDUCE_GRAD": "reduce"}
_Entry = tuple[str, Any]
_SHORT = 5e-5  # seconds; a shorter collective had nothing to communicate


class Timeline:
    """The timeline of one run with `timeline`, on this rank; a `StepObserver`."""

    def __init__(
        self,
        config: Config,
        worker: Worker,
        run: Run,
        watchdog: Watchdog,
        sinks: list[Sink],
        report: Callable[[int, str], None],
    ) -> None:
        """report: called with the step and the text once files are written, on each rank."""
        self._config, self._worker, self._run = config, worker, run
        self._watchdog, self._sinks, self._report = watchdog, sinks, report
        self._first, self._last = config.timeline_steps
        self._over = False
        mesh = run.mesh
        self._ranks = [*range(mesh.world_size)]
        if mesh.world_size > MOST_RANKS:
            self._ranks = [mesh.stage_ranks(pp)[0] for pp in range(mesh.pp)]
        self._records = worker.rank in self._ranks
        self._marks: dict[int, list[tuple[Any, _Entry]]] = {}  # by step
        self._now: list[tuple[Any, _Entry]] = []
        self._clock: Clock | None = None
        self._undo: Callable[[], None] = lambda: None

    def begin_step(self, step: int) -> None:
        """Start, continue or finish recording as `step` begins. Called by all ranks."""
        if self._over:
            return
        if self._marks:
            self._mark("end", None)
        if step > self._last and self._marks:
            self._finish(together=True)
        elif self._first <= step <= self._last:
            if self._clock is None:
                self._start()
            self._now = self._marks[step] = []
            self._mark("phase", "data")

    def close(self, together: bool) -> None:
        """Write what is recorded as the run ends. together: whether all ranks are here."""
        if self._marks and not self._over:
            self._finish(together)

    def begin(self, phase: str) -> None:
        self._mark("phase", phase)

    def start_action(self, action: Any) -> None:
        self._mark("action", action)

    def action_queued(self, action: Any, received: bool) -> None:
        self._mark("received" if received else "done", action)

    def _mark(self, kind: str, subject: Any) -> None:
        if self._clock is not None:
            self._now.append((self._clock.mark(), (kind, subject)))

    def _start(self) -> None:
        if not self._records:
            self._marks[0] = []  # not empty, so that this rank takes part in `_finish`
            return
        self._clock = Clock(self._run.mesh.device)
        self._run.phases.observers.append(self)
        groups = [group for stage in self._run.stages for group in parameter_groups(stage)]
        self._undo = watch_collectives(groups, lambda kind: self._mark("exchange", kind))

    def _finish(self, together: bool) -> None:
        self._over = True
        mesh, step = self._run.mesh, max(self._marks)
        self._watchdog.enter_phase(step, "timeline", self._config.launch.timeout)
        self._undo()
        self._run.phases.remove(self)
        if not together:
            return
        offset, error = clock_offset(self._worker.rank, mesh.world_size)
        text = ""
        failed = torch.zeros(1)
        if self._records:
            failed[0] = not self._tried(lambda: self._write(offset, error))
        if mesh.world_size > 1:
            mesh.sum(failed)
        if self._worker.rank == 0:
            if count := int(failed.item()):
                text = f"timeline: {count} ranks could not write theirs, see their logs"
            elif self._tried(self._merge):
                command = shlex.join([*tool_program("timeline"), str(self._worker.run_dir)])
                steps = f"step {step}" if self._first == step else f"steps {self._first} to {step}"
                text = f"timeline: {command} shows {steps}"
            else:
                text = "timeline: could not be written, see the log of rank 0"
        self._marks.clear()
        self._report(step, text)

    def _tried(self, write: Callable[[], object]) -> bool:
        """Call `write`; False if it raises, with the reason in the rank's log."""
        try:
            write()
        except Exception:  # the run goes on whatever it is
            print(f"the timeline could not be written\n{traceback.format_exc()}", file=sys.stderr)
            return False
        return True

    def _path(self, rank: int) -> Path:
        return Path(self._worker.run_dir, "timeline", f"rank{rank}.json")

    def _write(self, offset: float, error: float) -> None:
        assert self._clock is not None
        mesh = self._run.mesh
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize(mesh.device)
        steps = []
        for step, marks in self._marks.items():
            times = [t - offset for t in self._clock.seconds([mark for mark, _ in marks])]
            events = events_of([*zip(times, (entry for _, entry in marks), strict=True)])
            if events:
                begin, end = times[0], events[-1].end
                steps.append(RankStep(self._worker.rank, mesh.pp_rank, step, begin, end, events))
        rank_file = RankFile(steps, socket.gethostname(), accelerator.name(mesh.device), error)
        path = self._path(self._worker.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        timeline_file.write(path, rank_file)

    def _merge(self) -> None:
        order, run_dir = self._run.plan.order, Path(self._worker.run_dir)
        merged = timeline_file.merge(
            [timeline_file.read_rank(self._path(rank)) for rank in self._ranks],
            to_plain(self._config),
            [[*map(str, acts)] for acts in order.ranks],
            order.stage_to_rank,
            self._run.plan.stages,
            self._run.plan.model_graph.microbatch_size,
        )
        timeline_file.write(run_dir / TIMELINE, merged)
        from titanlike.watch.chart import write_trace
        from titanlike.watch.chart_picture import draw

        chart = timeline_file.chart_of(merged)
        write_trace(chart, run_dir / "timeline_trace.json")
        kinds = dict.fromkeys(kind for each in merged.typical for kind in each.spent())
        rows = []
        for each in merged.typical:
            spent = {Span(kind, -1, -1, 0, 0).words: each.spent().get(kind, 0.0) for kind in kinds}
            rows.append({"rank": each.rank, "step seconds": each.end - each.begin} | spent)
        for sink in self._sinks:
            sink.table("timeline", max(self._marks), rows)
        draw(chart, run_dir / "timeline.svg")


def events_of(marks: Sequence[tuple[float, _Entry]]) -> list[Span]:
    """Build consecutive events from marks (seconds, (kind of mark, its subject)) in order.

    A collective within an action has the action's stage and microbatch.
    """
    waited = {str(subject) for _, (kind_of_mark, subject) in marks if kind_of_mark == "received"}
    events: list[Span] = []
    now: tuple[str, int, int] = ("host", -1, -1)
    interrupted: list[tuple[str, int, int]] = []  # by collectives
    since = marks[0][0]
    for seconds, (kind_of_mark, subject) in marks:
        before = now
        match kind_of_mark:
            case "phase":
                now = _PHASES.get(subject, "host"), -1, -1
            case "action" | "received":
                now = _begun(subject, waited if kind_of_mark == "action" else ())
            case "done" | "end":
                now = "host", -1, -1
            case "exchange" if subject:
                interrupted.append(before)
                now = subject, *before[1:]
            case "exchange" if interrupted:
                now = interrupted.pop()
                if seconds - since < _SHORT and events and events[-1][:3] == now:
                    since = events.pop().start  # there was nothing to communicate
                    continue
        if kind_of_mark != "exchange":
            interrupted = []
        if now != before:
            if seconds > since:
                events.append(Span(*before, since, seconds))
            since = seconds
    if marks[-1][0] > since:
        events.append(Span(*now, since, marks[-1][0]))
    return events


def _begun(action: Any, waited: Collection[str]) -> tuple[str, int, int]:
    """The (kind, stage, microbatch) with which an action of torch or of an Order begins."""
    if action is None:
        return "host", -1, -1
    if isinstance(action, Action):
        return action
    kind = action.computation_type.value
    stage, mb = action.stage_index, action.microbatch_index
    mb = -1 if mb is None else mb
    if kind in COMPUTED:
        return ("wait" if str(action) in waited else kind), stage, mb
    name = action.computation_type.name
    return (_ACTIONS[name], stage, -1) if name in _ACTIONS else ("host", -1, -1)


# --- one clock for all ranks ----------------------------------------------------------------------

_ROUNDS = 16


class Clock:
    """Marks points in a rank's work; on a device, a mark is an event after the work launched so
    far."""

    def __init__(self, device: torch.device) -> None:
        """Synchronizes once with the device."""
        self.mark = partial(mark, device)
        self._zero = self.mark()
        self._host_zero = self._zero
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
            self._host_zero = time.perf_counter()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Times of marks on this host's clock (`time.perf_counter`), once the device has reached
        them."""
        if isinstance(self._zero, float):
            return [*marks]
        return [self._host_zero + seconds_between(self._zero, mark) for mark in marks]


def clock_offset(rank: int, world_size: int) -> tuple[float, float]:
    """(seconds by which this host's clock is ahead of rank 0's, the largest error). Collective.

    Every rank enters an all-reduce before any leaves it, so rank 0 entered before this rank left
    and vice versa: each round gives a lower and an upper bound.
    """
    low, high = float("-inf"), float("inf")
    if world_size == 1:
        return 0.0, 0.0
    flag = torch.zeros(1)
    for _ in range(_ROUNDS):
        entered = time.perf_counter()
        dist.all_reduce(flag)
        left = time.perf_counter()
        # rank 0's times of this round; CPU tensors, so sent by gloo on any device
        zeros = torch.tensor([entered, left], dtype=torch.float64)
        dist.broadcast(zeros, 0)
        entered_0, left_0 = zeros.tolist()
        low, high = max(low, entered - left_0), min(high, left - entered_0)
    return (0.0, 0.0) if rank == 0 else ((low + high) / 2, (high - low) / 2)
