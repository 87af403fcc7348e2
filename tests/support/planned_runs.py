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


def ran(config: Config, worker: Worker) -> Ran:
    torch.set_num_threads(1)
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    stream = batches(open_data(config).train, config, dp_rank=mesh.dp_rank)
    found: dict[Key, list[float]] = defaultdict(list)
    events: list[Any] = []
    begun: list[Any] = [None, 0.0, 0.0]

    def on_action(action: Any) -> None:
        now, wall = time.process_time(), time.monotonic()
        before, cpu, began = begun
        if before is not None and (kind := before.computation_type.value) in ("F", "B", "I", "W"):
            found[kind, before.stage_index].append(now - cpu)
            events.append((kind, before.stage_index, before.microbatch_index, began, wall))
        begun[:] = action, now, wall

    run.pipeline.on_action(on_action)
    for step in range(STEPS):
        if step == 2:
            found.clear()
        events.clear()
        run.pipeline.train(to_device(next(stream), mesh, config))
        for state in run.stage_states:
            state.zero_grad()
    close_mesh()
    return Ran({key: statistics.median(times) for key, times in found.items()}, events)


def compared(config: Config, folder: Path) -> tuple[Plan, Simulation, Sequence[Ran]]:
    """(the plan, the step that the ranks' real actions make, what they did)."""
    plan = make_plan(config, planned_hardware(config))
    ranks = run_world(ran, config, folder, timeout=240)
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
    return plan, simulate(plan.order, stages, runs_ahead=False), ranks
