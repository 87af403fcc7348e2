"""What a plan says of a run on this machine's cores, beside what its ranks do.

Other programs on the machine lengthen steps, not the CPU time of a process: so each action's CPU time
is taken, and the step and the bubble are those that the real actions would have with a core to each rank.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from support.world import run_world
from titanlike.config.schema import Config
from titanlike.data.loader import batches, open_data
from titanlike.launch.worker import Worker
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.planning.known_hardware import planned_hardware
from titanlike.planning.plan import Plan, make_plan
from titanlike.planning.simulate import Duration, Simulation, StageTimes, simulate
from titanlike.training.build import build
from titanlike.training.feed import to_device

STEPS = 9

Key = tuple[str, int]  # kind of an action, stage


@dataclass(frozen=True)
class Ran:
    """Of one rank: CPU seconds of its actions, and when they began and ended in the last step."""

    seconds: dict[Key, float]  # medians of all microbatches and steps but the first
    events: list[tuple[str, int, int, float, float]]  # kind, stage, microbatch, seconds


def ran(config: Config, worker: Worker, configs: dict[str, Config]) -> dict[str, Ran]:
    """One step of each after the other: a machine's speed varies."""
    torch.set_num_threads(1)
    mesh = open_mesh(config, worker)
    runs = {name: build(config, mesh) for name, config in configs.items()}
    streams = {
        name: batches(open_data(config).train, config, dp_rank=mesh.dp_rank)
        for name, config in configs.items()
    }
    seen = {name: _Actions() for name in configs}
    for name, run in runs.items():
        run.pipeline.on_action(seen[name])
    for step in range(STEPS):
        for name, run in runs.items():
            seen[name].begin(forget=step == 2)
            run.pipeline.train(to_device(next(streams[name]), mesh, configs[name]))
            for state in run.stage_states:
                state.zero_grad()
    close_mesh()
    return {name: actions.ran() for name, actions in seen.items()}


class _Actions:
    """Called before each action of a pipeline, and after the last one."""

    def __init__(self) -> None:
        self._found: dict[Key, list[float]] = defaultdict(list)
        self._events: list[tuple[str, int, int, float, float]] = []
        self._begun: tuple[Any, float, float] = None, 0.0, 0.0

    def begin(self, forget: bool) -> None:
        """A step; forget: the times of those before."""
        self._events.clear()
        if forget:
            self._found.clear()

    def __call__(self, action: Any) -> None:
        now, wall = time.process_time(), time.monotonic()
        before, cpu, began = self._begun
        if before is not None and (kind := before.computation_type.value) in ("F", "B", "I", "W"):
            self._found[kind, before.stage_index].append(now - cpu)
            own = kind, before.stage_index, before.microbatch_index
            self._events.append((*own, began, wall))
        self._begun = action, now, wall

    def ran(self) -> Ran:
        medians = {key: statistics.median(times) for key, times in self._found.items()}
        return Ran(medians, self._events)


def compared(config: Config, folder: Path) -> tuple[Plan, Simulation, Sequence[Ran]]:
    """(the plan, the step that the ranks' real actions make, what they did)."""
    return compared_in_turns({"": config}, folder)[""]


def compared_in_turns(
    configs: dict[str, Config], folder: Path
) -> dict[str, tuple[Plan, Simulation, Sequence[Ran]]]:
    """As `compared`, of configs of one mesh."""
    plans = {name: make_plan(config, planned_hardware(config)) for name, config in configs.items()}
    each = run_world(ran, next(iter(configs.values())), folder, configs, timeout=500)
    return {
        name: (plan, *_of_real_actions(plan, [ranks[name] for ranks in each]))
        for name, plan in plans.items()
    }


def _of_real_actions(plan: Plan, ranks: Sequence[Ran]) -> tuple[Simulation, Sequence[Ran]]:
    own = {key: seconds for rank in ranks for key, seconds in rank.seconds.items()}
    stages = []
    for stage, times in enumerate(plan.times.stages):
        real = {kind: Duration(own.get((kind, stage), 0.0)) for kind in "FBIW"}
        measured = StageTimes(real["F"], real["B"], real["I"], real["W"])
        stages.append(
            replace(
                measured, sends_forward=times.sends_forward, sends_backward=times.sends_backward
            )
        )
    return simulate(plan.order, stages, runs_ahead=False), ranks
