"""`split=auto`: stages of equal cost, from computed costs or measured times.

Every rank of a run must find the same stages. Parameters, FLOPs and memory are computed on each
rank, with equal results. Times are measured on rank 0, broadcast, and stored in run_dir/split.json,
so that a resumed run has the same stages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.files import atomic_write_text, read_object
from titanlike.core.config.groups.pipeline import AutoSplit, EvenSplit
from titanlike.core.config.groups.watching import TIMELINE
from titanlike.core.config.parse import in_folder
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.sharding import StateBytes
from titanlike.core.graph.partition import INFINITE, lightest_parts, partition
from titanlike.core.graph.units import Unit
from titanlike.core.optim.optimizer import moment_bytes
from titanlike.core.pipeline.order import Order
from titanlike.planning.costs.simulate import in_flight
from titanlike.planning.costs.unit_costs import CostError, UnitCosts
from titanlike.watch.timeline_file import Timeline, read_timeline

MeasureTimes = Callable[[UnitCosts], list[int]]  # nanoseconds per unit
TIMES_FILE = "split.json"


@dataclass(frozen=True)
class AutoSplitResult:
    """The chosen split, and that of split=even for comparison."""

    cost: str  # what is balanced: params, flops, time, run or memory
    chosen: CostedSplit
    even: CostedSplit

    def stages(self, units: list[Unit]) -> list[list[str]]:
        """Names of the units of each stage."""
        names = [unit.name for unit in units]
        return [names[start:stop] for start, stop in pairwise([*self.chosen.starts, len(names)])]


def find_auto_split(
    config: Config,
    unit_costs: UnitCosts,
    units: list[Unit],
    order: Order,
    zero: int,
    measure_times: MeasureTimes | None,
) -> AutoSplitResult:
    """Find the best split by `split.cost`; without `measure_times` FLOPs replace times.

    Raises ConfigError if a unit's cost cannot be determined.
    """
    assert isinstance(config.split, AutoSplit)
    cost = config.split.cost
    if cost == "time" and measure_times is None:
        cost = "flops"
    fixed, variable, factors = None, [0] * len(units), [1] * order.stages
    try:
        match cost:
            case "params":
                fixed = unit_costs.parameter_table(lambda p: p.numel())
            case "memory":  # activations times the microbatches in flight on a stage at most
                fixed, variable = _state_table(unit_costs, config, zero), unit_costs.saved_bytes()
                factors = stages_in_flight(order)
            case "time":
                assert measure_times is not None
                variable = measure_times(unit_costs)
            case _:
                variable = unit_costs.flops()
        costs = StageCosts(fixed, variable, factors)
    except CostError as error:
        others = {"params": "split=even", "time": "split.cost=flops"}
        fix = others.get(config.split.cost, "split.cost=params")
        problem = Problem("split.cost", config.split.cost, str(error), fix)
        raise ConfigError([problem]) from error
    sizes = map(len, partition(units, EvenSplit(), order.stages))
    even = cost_of_split(costs, order.stage_to_rank, [*accumulate(sizes, initial=0)][:-1])
    return AutoSplitResult(cost, best_split(costs, order.stage_to_rank), even)


def measured_times(config: Config, mesh: Mesh, unit_costs: UnitCosts) -> list[int]:
    """Nanoseconds of each unit, measured on rank 0 or read from run_dir. Collective.

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
    (times,) = result
    if not isinstance(times, list):
        raise CostError(str(times))
    return times


def _read_or_measure(config: Config, device: torch.device, unit_costs: UnitCosts) -> list[int]:
    key = {"device": accelerator.name(device), "calls": unit_costs.signature}
    path = Path(config.run_dir) / TIMES_FILE
    try:
        stored = read_object(path)
        if {name: stored[name] for name in key} == key:
            return [int(time) for time in stored["nanoseconds"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, or of a different device or model
    times = [round(1e9 * sum(seconds)) for seconds in unit_costs.times(device, False)]
    accelerator.empty_cache()
    atomic_write_text(path, json.dumps({**key, "nanoseconds": times}) + "\n")
    return times


def _state_table(unit_costs: UnitCosts, config: Config, zero: int) -> np.ndarray:
    """[start, stop] -> bytes of parameters, gradients and optimizer state of units start ... stop -
    1 on a rank."""
    sizes = moment_bytes(config.optimizer, unit_costs.model).items()
    moments = {id(unit_costs.model.get_parameter(name)): size for name, size in sizes}
    return unit_costs.parameter_table(
        lambda p: math.ceil(p.numel() * StateBytes.of(config, zero, moments[id(p)]).whole)
    )


def stages_in_flight(order: Order) -> list[int]:
    """For each stage, the maximal number of microbatches waiting for their backward."""
    return [
        in_flight([act for act in order.ranks[rank] if act.stage == stage])
        for stage, rank in enumerate(order.stage_to_rank)
    ]


def run_timeline(run: str) -> Timeline:
    """Read the timeline of a run. Raises CostError if there is none."""
    path = Path(run) / TIMELINE
    try:
        timeline = read_timeline(path)
        return replace(timeline, config=in_folder(timeline.config, Path(run).absolute())[0])
    except OSError as error:
        raise CostError(
            f"{path} cannot be read: {error.strerror}; timeline=true writes it"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CostError(f"{path} is no timeline: {type(error).__name__} {error}") from None


# --- the split into consecutive units that minimizes the heaviest rank and stage -----------------
#
# With one stage per rank it is exact. With several it is a local search from the split with the
# lightest stages: minimizing only the heaviest rank gives unequal stages and longer steps, since
# ranks wait for the heaviest stage while the pipeline fills and drains.


Starts = list[int]  # for each stage, the index of its first unit


@dataclass(frozen=True)
class CostedSplit:
    """A split and its costs."""

    starts: Starts
    stages: list[int]  # cost per stage
    ranks: list[int]  # cost per rank

    @property
    def imbalance(self) -> float:
        """Cost of the most expensive rank divided by the mean over ranks."""
        return max(self.ranks) * len(self.ranks) / max(1, sum(self.ranks))


class StageCosts:
    """The cost of a stage with the units start ... stop - 1:
    fixed[start, stop] + factors[stage] * (variable[start] + ... + variable[stop - 1])"""

    def __init__(
        self, fixed: np.ndarray | None, variable: Sequence[int], factors: Sequence[int]
    ) -> None:
        """fixed: [units + 1, units + 1], growing with the range, None = 0; variable: [units];
        factors: [stages]."""
        self.units, self.stages = len(variable), len(factors)
        self.factors = np.array(factors, dtype=float)
        self._fixed = np.zeros((self.units + 1,) * 2) if fixed is None else fixed
        self._sums = np.array([0, *accumulate(variable)], dtype=float)

    def table(self, factor: float) -> np.ndarray:
        """[start, stop] -> cost of a stage with this factor; INFINITE for an empty stage."""
        costs = self._fixed + factor * (self._sums[None, :] - self._sums[:, None])
        return np.where(np.tri(self.units + 1, dtype=bool), INFINITE, costs)

    def of(self, starts: np.ndarray) -> np.ndarray:
        """Costs of many splits; starts: [splits, stages]; returns [splits, stages]."""
        stops = np.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=self.units)
        costs = self.factors * (self._sums[stops] - self._sums[starts])
        return np.where(stops > starts, self._fixed[starts, stops] + costs, 0.0)


def cost_of_split(costs: StageCosts, place: Sequence[int], starts: Starts) -> CostedSplit:
    """The costs of a split; place: the rank of each stage."""
    (stages,) = costs.of(np.array([starts]))
    ranks = np.bincount(place, stages)
    return CostedSplit(list(starts), *([*map(int, each)] for each in (stages, ranks)))


def best_split(costs: StageCosts, place: Sequence[int]) -> CostedSplit:
    """Find the best split of the units into stages; place: the rank of each stage. No stage is
    empty unless there are fewer units than stages."""
    n, stages = costs.units, costs.stages
    if n <= stages:
        starts = list(range(max(1, n - 1)))
        last = n - 1 if n > 1 else n  # empty stages come before the last stage
        return cost_of_split(costs, place, [*starts, *[last] * (stages - len(starts))])
    tables = {factor: costs.table(factor) for factor in set(costs.factors)}
    now = np.array(lightest_parts([tables[factor] for factor in costs.factors]))
    while len(set(place)) < stages:
        moved = np.vstack([now, moved_units(now, n)])
        stage_costs = costs.of(moved)
        rank_costs = np.zeros((len(moved), max(place) + 1))
        for stage, rank in enumerate(place):  # a fixed order of summation
            rank_costs[:, rank] += stage_costs[:, stage]
        weight = 2 * rank_costs.max(axis=1) + stage_costs.max(axis=1)
        best = np.lexsort(((rank_costs**2).sum(axis=1), weight))[0]
        if best == 0:  # no move is better
            break
        now = moved[best]
    return cost_of_split(costs, place, now.tolist())


def moved_units(starts: Sequence[int] | np.ndarray, units: int) -> np.ndarray:
    """All splits, [moves, stages], in which one stage loses a unit and another one gains one; all
    cuts between them move."""
    stage = np.arange(len(starts))
    first, last = (1 + index[:, None] for index in np.triu_indices(len(starts) - 1))
    between = ((first <= stage) & (stage <= last)).astype(int)
    moved = np.array(starts) + np.stack([-between, between], axis=1).reshape(-1, len(starts))
    return moved[(np.diff(moved, axis=1, append=units) > 0).all(axis=1)]
