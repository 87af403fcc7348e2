"""`split=auto`: stages by the costs of the units, and the source of measured times.

Every rank of a run must find the same stages. Parameters, FLOPs and memory are computed by each
rank, with equal results. Times are measured by rank 0, broadcast, and stored in
run_dir/split.json, so that a resumed run has the same stages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.files import atomic_write_text, read_object
from titanlike.config.parse import parse
from titanlike.config.profile import TIMELINE
from titanlike.config.schema import AutoSplit, Config, EvenSplit, Muon
from titanlike.costs.best_split import CostedSplit, StageCosts, best_split, cost_of_split
from titanlike.costs.unit_costs import CostError, UnitCosts
from titanlike.device import accelerator
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.sharding import state_bytes
from titanlike.graph.model_graph import ModelGraph
from titanlike.graph.partition import partition
from titanlike.graph.unit import Unit
from titanlike.metrics.timeline_file import Timeline, read_timeline, stage_seconds
from titanlike.optim.loss import Loss
from titanlike.pipeline.order import Order

MeasureTimes = Callable[[UnitCosts], list[int]]  # nanoseconds of each unit
TIMES_FILE = "split.json"


@dataclass(frozen=True)
class AutoSplitResult:
    """The split that was chosen, and that of split=even."""

    cost: str  # that was balanced: params, flops, time or memory
    chosen: CostedSplit
    even: CostedSplit
    scale: int  # of the costs in both

    def stages(self, units: list[Unit]) -> list[list[str]]:
        """Names of the units of each stage."""
        names = [unit.name for unit in units]
        return [names[start:stop] for start, stop in pairwise([*self.chosen.starts, len(names)])]


def find_auto_split(
    config: Config,
    forward: tuple[ModelGraph, Tensor, Loss],
    order: Order,
    zero: int,
    measure_times: MeasureTimes | None,
) -> AutoSplitResult:
    """The best split by `split.cost`; without `measure_times` FLOPs replace times.

    forward: the recorded model, targets of a microbatch on meta, the loss.

    Raises ConfigError where a unit's cost cannot be found.
    """
    assert isinstance(config.split, AutoSplit)
    unit_costs, units, cost = UnitCosts(*forward), forward[0].units, config.split.cost
    if cost == "time" and measure_times is None:
        cost = "flops"
    ones = [1] * order.stages
    zeros = np.zeros((len(units) + 1, len(units) + 1), dtype=np.int64)
    try:
        match cost:
            case "params":
                sizes = unit_costs.parameter_table(lambda p: p.numel())
                costs = StageCosts(sizes, [0] * len(units), ones)
            case "memory":
                costs = memory_costs(unit_costs, config, order, zero)
            case "run":
                times = [round(1e9 * sum(each)) for each in of_run(config, unit_costs, units)]
                costs = StageCosts(zeros, times, ones)
            case "time":
                assert measure_times is not None
                costs = StageCosts(zeros, measure_times(unit_costs), ones)
            case _:
                costs = StageCosts(zeros, unit_costs.flops(), ones)
    except CostError as error:
        others = {"params": "split=even", "time": "split.cost=flops", "run": "split.cost=time"}
        fix = others.get(config.split.cost, "split.cost=params")
        problem = Problem("split.cost", config.split.cost, str(error), fix)
        raise ConfigError([problem]) from error
    sizes = map(len, partition(units, EvenSplit(), order.stages))
    even = cost_of_split(costs, order.place, [*accumulate(sizes, initial=0)][:-1])
    return AutoSplitResult(cost, best_split(costs, order.place), even, costs.scale)


def of_run(config: Config, unit_costs: UnitCosts, units: list[Unit]) -> Sequence[Sequence[float]]:
    """Seconds of each unit, as a run has measured them. Raises CostError."""
    assert isinstance(config.split, AutoSplit)
    run = config.split.run or ""
    names = [unit.name for unit in units]
    return seconds_of_run(run, names, unit_costs.flops(), config, unit_costs.microbatch_size)


def measured_times(config: Config, mesh: Mesh, unit_costs: UnitCosts) -> list[int]:
    """Nanoseconds of each unit, measured by rank 0 or read from run_dir. Collective.

    Raises CostError on every rank.
    """
    result: list[list[int] | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = [_read_or_measure(config, mesh.device, unit_costs)]
        except Exception as error:  # sent to the other ranks, which wait
            result = [f"{error}"]
    if mesh.world_size > 1:
        dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
    (found,) = result
    if not isinstance(found, list):
        raise CostError(str(found))
    return found


def _read_or_measure(config: Config, device: torch.device, unit_costs: UnitCosts) -> list[int]:
    key = {"device": accelerator.name(device), "calls": unit_costs.signature}
    path = Path(config.run_dir) / TIMES_FILE
    try:
        stored = read_object(path)
        if {name: stored[name] for name in key} == key:
            return [int(time) for time in stored["nanoseconds"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, or of other calls
    times = unit_costs.nanoseconds(device)
    accelerator.empty_cache()
    atomic_write_text(path, json.dumps({**key, "nanoseconds": times}) + "\n")
    return times


# --- memory of a stage, for any split -------------------------------------------------------------


def memory_costs(unit_costs: UnitCosts, config: Config, order: Order, zero: int) -> StageCosts:
    """Bytes on a rank: parameters, gradients, optimizer state, and activations.

    Activations count for the largest number of microbatches in flight on the stage.
    """
    names: set[str] = set()
    if isinstance(config.optimizer, Muon):
        from titanlike.optim.muon import hidden_matrices

        names = hidden_matrices(unit_costs.model, config.optimizer)
    hidden = {id(unit_costs.model.get_parameter(name)) for name in names}
    state = unit_costs.parameter_table(
        lambda p: math.ceil(p.numel() * state_bytes(config, zero, id(p) in hidden))
    )
    return StageCosts(state, unit_costs.saved_bytes(), in_flight(order))


def in_flight(order: Order) -> list[int]:
    """For each stage: the largest number of microbatches waiting for their backward."""
    now, most = [0] * order.stages, [0] * order.stages
    for acts in order.ranks:
        for act in acts:
            if act.kind == "F":
                now[act.stage] += 1
                most[act.stage] = max(most[act.stage], now[act.stage])
            elif act.kind in "BW":
                now[act.stage] -= 1
    return most


# --- what a run's timeline says of the units of a model, in any layout of it ----------------------


Seconds = tuple[float, float, float]  # forward, input gradient, weight gradient of a microbatch


def run_timeline(run: str) -> Timeline:
    """Raises CostError where there is none."""
    path = Path(run) / TIMELINE
    try:
        return read_timeline(path)
    except OSError as error:
        raise CostError(
            f"{path} cannot be read: {error.strerror}; timeline=true writes it"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CostError(f"{path} is no timeline: {type(error).__name__} {error}") from None


def seconds_of_run(
    run: str, names: Sequence[str], flops: Sequence[int], config: Config, microbatch: int
) -> list[Seconds]:
    """Of each unit in a run of `config`. flops: of each, forward and backward; microbatch: its samples.

    Raises CostError where the run is of another model.
    """
    timeline = run_timeline(run)
    weight = dict(zip(names, flops, strict=True))
    known = [name for stage in timeline.stages for name in stage]
    if known != [*names]:
        other = next((b for a, b in zip(names, known, strict=False) if a != b), "")
        raise CostError(f"{run} is a run of another model: it has {other or len(known)}")
    before = parse(timeline.config)[0]
    scale = microbatch * config.seq_len / (config.cp * config.tp)
    scale /= timeline.microbatch * before.seq_len / (before.cp * before.tp)
    found: dict[str, Seconds] = {}
    for stage, inside in enumerate(timeline.stages):
        seconds = stage_seconds(timeline, stage)
        forward, backward = seconds["F"], seconds["B"]
        if before.activation_checkpoint.name == "full":
            backward = max(0.0, backward - forward)
        inputs, weights = seconds["I"] + backward / 2, seconds["W"] + backward / 2
        total = sum(weight[name] for name in inside)
        for name in inside:
            share = scale * (weight[name] / total if total else 1 / len(inside))
            found[name] = forward * share, inputs * share, weights * share
    return [found[name] for name in names]
