"""Ranks that are slower than others for many steps: a slow machine, or stages that are too heavy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from titanlike.config.schema import Config
from titanlike.launch.heartbeat import read_beats
from titanlike.launch.worker import Worker
from titanlike.metrics.events import Events
from titanlike.training.build import Run

_STEPS = 50  # in a row
_FEW = 16  # ranks of whose median a single one may be half


class Stragglers:
    """Knows how long each rank worked in each step; rank 0 names one that has been slow for long, once.

    Ranks are compared with those that have the same stages, for equal work; where there are none, with
    all others.
    """

    def __init__(self, config: Config, run: Run, worker: Worker, events: Events) -> None:
        self._share, self._events, self._worker = config.launch.straggler, events, worker
        self._slow: dict[int, int] = {}  # rank -> for how many steps in a row
        self._named: set[int] = set()
        mesh = run.mesh
        self._on = worker.rank == 0 and mesh.world_size > 1 and self._share > 0
        self._device = str(mesh.device.type)
        self._groups = [mesh.stage_ranks(pp) for pp in range(mesh.pp)] if self._on else []
        self._same = len(self._groups[0]) > 1 if self._on else False
        if not self._same:
            self._groups = [sum(self._groups, [])]

    def step(self, step: int, seconds: float, waited: list[float]) -> None:
        """waited: seconds of each rank, of a step that took so many."""
        if not self._on or not waited:
            return
        found = slow_ranks(
            {r: seconds - w for r, w in enumerate(waited)}, self._groups, self._share
        )
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in found}
        self._named &= found.keys()
        for rank, share in found.items():
            if self._slow[rank] >= _STEPS and rank not in self._named:
                self._named.add(rank)
                self._tell(step, rank, share)

    def _tell(self, step: int, rank: int, share: float) -> None:
        beat = read_beats(self._worker.run_dir, self._worker.world_size).get(rank)
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
    """rank -> by which share it works longer than the median of the others in its group, if by more
    than `share`."""
    found = {}
    for group in groups:
        of_all = statistics.median(busy[rank] for rank in group)
        for rank in group:
            others = of_all
            if len(group) <= _FEW:
                others = statistics.median(busy[other] for other in group if other != rank)
            if others > 0 and busy[rank] > (1 + share) * others:
                found[rank] = busy[rank] / others - 1
    return found
