"""Measure how long each rank waits for others in a step, and name ranks that stay slow."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from titanlike.core.config.schema import Config
from titanlike.core.device.choose import ranks_of
from titanlike.core.distributed.async_reads import mark, seconds_between
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.launch.heartbeat import read_beats
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.run_files import Events
from titanlike.core.torch_private.fsdp import watch_collectives

_AGREE = ("forward and backward", "agree")  # phases that begin with a sum over all ranks
_COLLECTIVE = ("UNSHARD", "REDUCE_GRAD")  # actions that are a collective and nothing else
_COMPUTED = ("F", "B", "I")
_SAMPLED = 20  # on a GPU, waits for FSDP are measured in one of so many steps


class BusyTime:
    """Measures how long this rank waits for others; a `StepObserver` of `core/training/build.py`."""

    def __init__(self, device: torch.device, groups: Iterable[Any], every: int = 1) -> None:
        """groups: FSDP's, see `parameter_groups`; every: steps that are reported together."""
        self._every, self._untold = every, list[float]()
        self._on_cpu = device.type == "cpu"
        self._now = partial(mark, device)
        self._waits: list[tuple[Any, Any]] = []  # (begin, end) of this step's waits
        self._before: list[tuple[Any, Any]] = []  # those of the previous step
        self._begun: tuple[Any, list[Any]] | None = None  # begin of a possible wait, and its list
        self._receiving: set[Any] = set()  # actions that wait for a P2P receive
        self._inside = 0  # depth of nested collectives
        # waits for FSDP: on a GPU they take two events each, so they are sampled
        self._exchanges: list[tuple[Any, Any]] = []
        self._exchanges_before: list[tuple[Any, Any]] = []
        self._exchanged, self._steps = 0.0, 0
        watch_collectives(groups, self._exchange, waits_alone=not self._on_cpu)

    def told(self) -> float | None:
        """The mean of `waited` over the last `every` steps; None in those between."""
        self._untold.append(self.waited())
        if len(self._untold) < self._every:
            return None
        waits, self._untold = self._untold, []
        return sum(waits) / len(waits)

    def waited(self) -> float:
        """Seconds waited in this step; on a GPU in the previous one, whose events are complete.
        Called once per step."""
        self._close()
        waits, self._waits = self._waits, []
        exchanges, self._exchanges = self._exchanges, []
        if not self._on_cpu:
            waits, self._before = self._before, waits
            exchanges, self._exchanges_before = self._exchanges_before, exchanges
        if exchanges or self._on_cpu:
            self._exchanged = sum(seconds_between(*wait) for wait in exchanges)
        return sum(seconds_between(*wait) for wait in waits) + self._exchanged

    def begin(self, phase: str) -> None:
        self._close()
        if phase == _AGREE[0]:
            # a step begins: those of a validation before it are none of its
            self._waits, self._exchanges, self._steps = [], [], self._steps + 1
        if phase in _AGREE:
            self._begun = self._now(), self._waits

    def start_action(self, action: Any) -> None:
        self._close()
        if action is None:
            return
        kind = action.computation_type
        if kind.name in _COLLECTIVE or (kind.value in _COMPUTED and action in self._receiving):
            self._begun = self._now(), self._waits

    def action_queued(self, action: Any, received: bool) -> None:
        if received:
            self._receiving.add(action)
            self._close()
        elif action.computation_type.name in _COLLECTIVE:
            self._close()
        else:
            self._begun = None

    def _exchange(self, kind: str) -> None:
        if not self._on_cpu and self._steps % _SAMPLED:
            return
        if kind:
            if not self._inside and self._begun is None:
                self._begun = self._now(), self._exchanges
            self._inside += 1
        else:
            self._inside -= 1
            if not self._inside:
                self._close()

    def _close(self) -> None:
        if self._begun is not None:
            begin, waits = self._begun
            waits.append((begin, self._now()))
            self._begun = None


_STEPS = 50  # in a row
_MANY = 1024  # ranks; with more, a value of each in every step would take milliseconds per host
_FEW = 16  # ranks; with so few a single one weighs much in the median


def told_every(ranks: int) -> int:
    """The number of steps between two reports of each rank's waits."""
    return 1 if ranks <= _MANY else _STEPS


class Stragglers:
    """Tracks how long each rank worked in each step; rank 0 warns once of one that stays slow.

    Ranks are compared with those that have the same stages, and so equal work; where there are
    none, with all others.
    """

    def __init__(self, config: Config, mesh: Mesh, worker: Worker, events: Events) -> None:
        self._share, self._events, self._worker = config.launch.straggler, events, worker
        self._slow: dict[int, int] = {}  # rank -> for how many steps in a row
        self._named: set[int] = set()
        self._seconds: list[float] = []  # of the steps that are told together
        # of ranks that share a GPU each waits for its turn
        alone = ranks_of(mesh.device, config.launch, worker.local_world_size) == 1
        self._on = worker.rank == 0 and self._share > 0 and alone
        self._device = str(mesh.device.type)
        self._groups = [mesh.stage_ranks(pp) for pp in range(mesh.pp)] if self._on else []
        self._same = len(self._groups[0]) > 1 if self._on else False
        if not self._same:
            self._groups = [sum(self._groups, [])]

    def step(self, step: int, seconds: float, waited: list[float]) -> None:
        """Add a step that took `seconds`; waited: seconds of each rank, [] = not reported."""
        if not self._on:
            return
        self._seconds.append(seconds)
        if not waited:
            return
        window, self._seconds = self._seconds, []
        mean = sum(window) / len(window)
        slow = slow_ranks({r: mean - w for r, w in enumerate(waited)}, self._groups, self._share)
        self._slow = {rank: self._slow.get(rank, 0) + len(window) for rank in slow}
        self._named &= slow.keys()
        for rank, share in slow.items():
            if self._slow[rank] >= _STEPS and rank not in self._named:
                self._named.add(rank)
                self._tell(step, rank, share)

    def _tell(self, step: int, rank: int, share: float) -> None:
        beat = read_beats(self._worker.run_dir, range(rank, rank + 1)).get(rank)
        host = beat.host if beat is not None else "unknown"
        others = "the ranks with the same stages" if self._same else "the other ranks"
        why = "" if self._same else "; its stages may be heavier: timeline=true tells"
        text = (
            f"rank {rank} (host {host}, {self._device}) works {share:.0%} longer than {others}, "
            f"for {_STEPS} steps{why}"
        )
        self._events.log("straggler", step, text, rank=rank, host=host, share=share)


def slow_ranks(
    busy: Mapping[int, float], groups: list[list[int]], share: float
) -> dict[int, float]:
    """Map each slow rank to the share by which it works longer than the median of its group's
    others, if that is more than `share`."""
    slow = {}
    for group in groups:
        of_all = statistics.median(busy[rank] for rank in group)
        for rank in group:
            others = of_all
            if len(group) <= _FEW:
                others = statistics.median(busy[other] for other in group if other != rank)
            if others > 0 and busy[rank] > (1 + share) * others:
                slow[rank] = busy[rank] / others - 1
    return slow
