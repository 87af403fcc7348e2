"""`split=auto`: stages by the costs of the units, and the source of measured times.

Every rank of a run must find the same stages. Parameters, FLOPs and memory are computed by each
rank, with equal results. Times are measured by rank 0, broadcast, and stored in
run_dir/split.json, so that a resumed run has the same stages.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.files import atomic_write_text, read_object
from titanlike.config.parse import parse
from titanlike.config.schema import TIMELINE, AutoSplit, Config, EvenSplit, Muon
from titanlike.costs.simulate import in_flight
from titanlike.costs.unit_costs import CostError, UnitCosts
from titanlike.device import accelerator
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.sharding import StateBytes
from titanlike.graph.model_graph import ModelGraph
from titanlike.graph.partition import INFINITE, Unit, lightest_parts, partition
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
    fixed, variable, factors = None, [0] * len(units), [1] * order.stages
    try:
        match cost:
            case "params":
                fixed = unit_costs.parameter_table(lambda p: p.numel())
            case "memory":  # activations count for the most microbatches in flight on a stage
                fixed, variable = _state_table(unit_costs, config, zero), unit_costs.saved_bytes()
                factors = stages_in_flight(order)
            case "run":
                names = [unit.name for unit in units]
                seconds = seconds_of_run(config.split.run or "", names, unit_costs, config)
                variable = [round(1e9 * sum(times)) for times in seconds]
            case "time":
                assert measure_times is not None
                variable = measure_times(unit_costs)
            case _:
                variable = unit_costs.flops()
        costs = StageCosts(fixed, variable, factors)
    except CostError as error:
        others = {"params": "split=even", "time": "split.cost=flops", "run": "split.cost=time"}
        fix = others.get(config.split.cost, "split.cost=params")
        problem = Problem("split.cost", config.split.cost, str(error), fix)
        raise ConfigError([problem]) from error
    sizes = map(len, partition(units, EvenSplit(), order.stages))
    even = cost_of_split(costs, order.stage_to_rank, [*accumulate(sizes, initial=0)][:-1])
    return AutoSplitResult(cost, best_split(costs, order.stage_to_rank), even, costs.scale)


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
        pass  # missing, or of other calls
    times = [round(1e9 * sum(seconds)) for seconds in unit_costs.times(device, False)]
    accelerator.empty_cache()
    atomic_write_text(path, json.dumps({**key, "nanoseconds": times}) + "\n")
    return times


def _state_table(unit_costs: UnitCosts, config: Config, zero: int) -> np.ndarray:
    """[start, stop] -> bytes on a rank of the parameters, gradients and optimizer state of these
    units."""
    names: set[str] = set()
    if isinstance(config.optimizer, Muon):
        from titanlike.optim.muon import hidden_matrices

        names = hidden_matrices(unit_costs.model, config.optimizer)
    hidden = {id(unit_costs.model.get_parameter(name)) for name in names}
    return unit_costs.parameter_table(
        lambda p: math.ceil(p.numel() * StateBytes.of(config, zero, id(p) in hidden).whole)
    )


def stages_in_flight(order: Order) -> list[int]:
    """For each stage: the largest number of microbatches waiting for their backward."""
    return [
        in_flight([act for act in order.ranks[rank] if act.stage == stage])
        for stage, rank in enumerate(order.stage_to_rank)
    ]


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
    run: str, names: Sequence[str], costs: UnitCosts, config: Config
) -> list[Seconds]:
    """Seconds of each unit, named `names`, in a run of `config`, by the timeline of `run`. Raises
    CostError where that is of another model."""
    timeline = run_timeline(run)
    weight = dict(zip(names, costs.flops(), strict=True))
    recorded = [name for stage in timeline.stages for name in stage]
    if recorded != [*names]:
        other = next((b for a, b in zip(names, recorded, strict=False) if a != b), "")
        raise CostError(f"{run} is a run of another model: it has {other or len(recorded)}")
    before = parse(timeline.config)[0]
    scale = costs.microbatch_size * config.seq_len / (config.cp * config.tp)
    scale /= timeline.microbatch * before.seq_len / (before.cp * before.tp)
    of_unit: dict[str, Seconds] = {}
    for stage, inside in enumerate(timeline.stages):
        seconds = stage_seconds(timeline, stage)
        forward, backward = seconds["F"], seconds["B"]
        if before.activation_checkpoint.name == "full":
            backward = max(0.0, backward - forward)
        inputs, weights = seconds["I"] + backward / 2, seconds["W"] + backward / 2
        total = sum(weight[name] for name in inside)
        for name in inside:
            share = scale * (weight[name] / total if total else 1 / len(inside))
            of_unit[name] = forward * share, inputs * share, weights * share
    return [of_unit[name] for name in names]


# --- the split into consecutive units whose most expensive rank is cheapest
# -------------------------
#
# Minimized are, in this order: the cost of the most expensive rank (the sum over its stages), of
# the most expensive stage, and the sum of squares over ranks. The first two minima are exact:
#
# - one stage per rank: dynamic programming over the stages;
# - two stages per rank in a V: dynamic programming from both ends inwards;
# - any other placement (loops, an order from a file): branch and bound, starting at a good split.
# At
#   the search limit the best split so far is returned, with `CostedSplit.proven` false.
#
# Costs are whole numbers, so that every rank of a run finds the same split.


_MAX_NODES = 200_000  # of branch and bound: some seconds
_MAX_MOVES = 200  # of local search


@dataclass(frozen=True)
class CostedSplit:
    """A split and its costs."""

    starts: Starts
    stages: list[int]  # cost of each
    ranks: list[int]  # cost of each
    proven: bool = True

    @property
    def imbalance(self) -> float:
        """Cost of the most expensive rank / mean over ranks."""
        return max(self.ranks) * len(self.ranks) / max(1, sum(self.ranks))

    @property
    def key(self) -> tuple[int, int, int]:
        """The objective: smaller is better."""
        return max(self.ranks), max(self.stages), sum(cost * cost for cost in self.ranks)


def cost_of_split(costs: StageCosts, place: Sequence[int], starts: Starts) -> CostedSplit:
    """The costs of a split; place: the rank of each stage."""
    edges = [*starts, costs.units]
    stages = [costs.of(stage, *span) for stage, span in enumerate(pairwise(edges))]
    ranks = [0] * (max(place) + 1)
    for rank, cost in zip(place, stages, strict=True):
        ranks[rank] += cost
    return CostedSplit(list(starts), stages, ranks)


def best_split(costs: StageCosts, place: Sequence[int], max_nodes: int = _MAX_NODES) -> CostedSplit:
    """The best split of the units into stages, none empty unless there are fewer units than stages.

    max_nodes: the limit of branch and bound.
    """
    n, stages = costs.units, costs.stages
    if n <= stages:
        starts = list(range(max(1, n - 1)))
        last = n - 1 if n > 1 else n  # empty stages come before the last stage
        return cost_of_split(costs, place, [*starts, *[last] * (stages - len(starts))])
    bottleneck, starts = lightest_parts([costs.table(stage) for stage in range(stages)])
    if len(set(place)) == stages:
        return cost_of_split(costs, place, starts)
    best = _improve(costs, place, cost_of_split(costs, place, starts))
    if v := len(set(place)) * 2 == stages and list(place) == list(place)[::-1]:
        search = VPlacementSearch(costs)
    else:
        search = BranchAndBound(costs, place, max_nodes)
    low = load_lower_bound(costs.lower_bounds, len(set(place)))
    best = _minimize(costs, place, best, 0, low, lambda limit: search.find(limit, limit), v)
    if not best.proven:
        return best
    rank = max(best.ranks)
    return _minimize(costs, place, best, 1, bottleneck, lambda limit: search.find(rank, limit), v)


# --- several stages per rank ---------------------------------------------------------------------


def _minimize(
    costs: StageCosts,
    place: Sequence[int],
    best: CostedSplit,
    which: int,
    low: int,
    find: Callable[[int], Starts | None],
    bisect: bool,
) -> CostedSplit:
    """Minimize `best.key[which]`, which is at least `low`.

    find: a split within a limit, or None; bisect: halve the interval, as `find` takes equally long
    for any limit.
    """
    halve = False
    while low < best.key[which]:
        limit = (low + best.key[which]) // 2 if halve else best.key[which] - 1
        try:
            starts = find(limit)
        except SearchLimit:
            return replace(best, proven=False)
        if starts is None:
            low = limit + 1
        else:
            best = _improve(costs, place, cost_of_split(costs, place, starts))
        halve = bisect and not halve
    return best


def _improve(costs: StageCosts, place: Sequence[int], best: CostedSplit) -> CostedSplit:
    """Local search: move one unit from a stage to another, shifting all cuts between them."""
    stages = costs.stages
    for _ in range(_MAX_MOVES):
        edges, key = [*best.starts, costs.units], best.key
        sources = [s for s in range(stages) if edges[s + 1] - edges[s] >= 2]
        # heavy ones first
        sources.sort(key=lambda s: best.ranks[place[s]] < key[0] and best.stages[s] < key[1])
        moves = (_best_move(costs, place, best, edges, source) for source in sources)
        if (better := next(filter(None, moves), None)) is None:
            return best
        best = better
    return best


def _best_move(
    costs: StageCosts, place: Sequence[int], best: CostedSplit, edges: list[int], source: int
) -> CostedSplit | None:
    """The best split that moves a unit out of stage `source`, or None if none beats `best`."""
    key, starts = best.key, None
    for step in (1, -1):  # to later stages, to earlier ones
        changed = {}
        target = source + step
        while 0 <= target < costs.stages:
            between = target - step
            for stage in (between, target):
                begin, end = edges[stage], edges[stage + 1]
                if step == 1:  # every cut between them moves down by one
                    begin -= stage != source
                    end -= stage != target
                else:
                    end += stage != source
                    begin += stage != target
                changed[stage] = costs.of(stage, begin, end)
            stages = [changed.get(s, cost) for s, cost in enumerate(best.stages)]
            ranks = [0] * len(best.ranks)
            for rank, cost in zip(place, stages, strict=True):
                ranks[rank] += cost
            candidate = CostedSplit([], stages, ranks).key
            if candidate < key:
                low, high = sorted((source, target))
                moved = range(low + 1, high + 1)
                key = candidate
                starts = [cut - step * (s in moved) for s, cut in enumerate(best.starts)]
            target += step
    return None if starts is None else cost_of_split(costs, place, starts)


# --- the cost of every possible stage, in whole numbers -------------------------------------------


Starts = list[int]  # for each stage, the position of its first unit


class StageCosts:
    """The cost of a stage with the units start ... stop - 1:

    fixed[start, stop] + factors[stage] * (variable[start] + ... + variable[stop - 1])
    """

    def __init__(
        self, fixed: np.ndarray | None, variable: Sequence[int], factors: Sequence[int]
    ) -> None:
        """fixed: None = 0, or [units + 1, units + 1] whole numbers, at most the sum of the stage's
        units (what units share counts once) and growing with the range; variable: [units]; factors:
        [stages].
        """
        if fixed is None:
            fixed = np.zeros((len(variable) + 1, len(variable) + 1), dtype=np.int64)
        largest = int(fixed.max(initial=0)) + sum(map(int, variable)) * max(factors)
        shift = max(0, largest.bit_length() - 59)
        self.scale = 1 << shift  # of all costs, so that sums fit into 64 bits
        self._fixed = np.asarray(fixed, dtype=np.int64) >> shift
        variable = [int(cost) >> shift for cost in variable]
        self._prefix_sums = np.array([0, *accumulate(variable)], dtype=np.int64)
        self.factors = list(factors)
        self._tables: dict[int, np.ndarray] = {}

    @property
    def units(self) -> int:
        return len(self._prefix_sums) - 1

    @property
    def stages(self) -> int:
        return len(self.factors)

    def of(self, stage: int, start: int, stop: int) -> int:
        variable = self._prefix_sums[stop] - self._prefix_sums[start]
        return int(self._fixed[start, stop] + self.factors[stage] * variable) if stop > start else 0

    def table(self, stage: int) -> np.ndarray:
        """[start, stop] -> cost; INFINITE for an empty stage."""
        factor = self.factors[stage]
        if factor not in self._tables:
            sums = self._prefix_sums
            costs = self._fixed + factor * (sums[None, :] - sums[:, None])
            at = np.arange(self.units + 1)
            self._tables[factor] = np.where(at[:, None] < at[None, :], costs, INFINITE)
        return self._tables[factor]

    @cached_property
    def lower_bounds(self) -> list[int]:
        """[units]; every stage costs at least the sum over its units."""
        fixed = np.diff(self._fixed[0])
        return [int(x) for x in fixed + min(self.factors) * np.diff(self._prefix_sums)]


# --- search for a split whose ranks and stages cost at most given limits --------------------------


_MAX_SUMS = 20_000  # of units, to which capacities are rounded down


class SearchLimit(Exception):
    """The search reached its limit of nodes."""


def load_lower_bound(weights: Sequence[int], bins: int) -> int:
    """A lower bound on the load of the fullest of `bins` bins that contain all weights."""
    low = max(max(weights), -(-sum(weights) // bins))
    # a load at which they cannot fit is a bound, whatever larger loads do
    loads = range(low, sum(weights))
    return low + bisect_left(loads, True, key=lambda load: not cannot_fit(weights, bins, load))


def cannot_fit(weights: Sequence[int], bins: int, capacity: int) -> bool:
    """Whether the weights provably do not fit into the bins; False proves nothing.

    By dual feasible functions, which round weights such that what fits into a bin still does (at
    most k weights that are each more than 1 / (k + 1) of the capacity).
    """
    counts = Counter(weights)
    for k in range(1, 65):
        total = 0  # in units of 1 / (k * capacity)
        for weight, count in counts.items():
            whole, rest = divmod((k + 1) * weight, max(1, capacity))
            total += count * (whole * capacity if rest else k * weight)
        if total > bins * k * capacity:
            return True
    return False


class VPlacementSearch:
    """Stages s and S - 1 - s on one rank: dynamic programming from both ends inwards."""

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs

    def find(self, rank: int, stage: int) -> Starts | None:
        """A split whose ranks and stages cost at most these limits, or None. Exact.

        reached[i, j]: whether the pairs so far can hold the units before i and those from j on.
        Of all j reached with one i, the smallest makes a pair's later stage cheapest.
        """
        n, pairs = self._costs.units, self._costs.stages // 2
        reached = np.zeros((n + 1, n + 1), dtype=bool)
        reached[0, n] = True
        steps = []
        for pair in range(pairs - 1):
            early, late = self._tables(pair, stage)
            nearest = np.where(reached, np.arange(n + 1)[None, :], n + 1)
            nearest = np.minimum.accumulate(nearest[:, ::-1], axis=1)[:, ::-1]
            nearest = np.concatenate([nearest[:, 1:], np.full((n + 1, 1), n + 1)], axis=1)
            padded = np.concatenate([late, np.full((n + 1, 1), INFINITE)], axis=1)
            cost = padded[np.arange(n + 1)[None, :], nearest]  # [i, j'] of units j' ... j
            steps.append((early, cost, nearest))
            least = np.full((n + 1, n + 1), INFINITE)
            for i in np.flatnonzero(reached.any(axis=1)):
                ends = np.flatnonzero(early[i] <= rank)  # a range, as costs grow with the end
                if len(ends):
                    part = least[ends[0] : ends[-1] + 1]
                    sums = early[i, ends[0] : ends[-1] + 1, None] + cost[i][None, :]
                    np.minimum(part, sums, out=part)
            reached = least <= rank
            if not reached.any():
                return None
        early, late = self._tables(pairs - 1, stage)
        for middle in range(1, n):
            fits = reached & (early[:, middle, None] + late[None, middle, :] <= rank)
            if fits.any():
                i, j = (int(at) for at in np.argwhere(fits)[0])
                return self._trace(steps, rank, i, middle, j)
        return None

    def _tables(self, pair: int, stage: int) -> tuple[np.ndarray, np.ndarray]:
        tables = (self._costs.table(s) for s in (pair, self._costs.stages - 1 - pair))
        early, late = (np.where(table <= stage, table, INFINITE) for table in tables)
        return early, late

    @staticmethod
    def _trace(steps: list[Any], rank: int, i: int, middle: int, j: int) -> Starts:
        before, after = [i], [middle, j]
        for early, cost, nearest in reversed(steps):
            came = int(np.flatnonzero(early[:, i] + cost[:, j] <= rank)[0])
            i, j = came, int(nearest[came, j])
            before.insert(0, i)
            after.append(j)
        return [*before, *after[:-1]]


class BranchAndBound:
    """Any placement: depth-first over the stages, bounded by the capacity left on the ranks."""

    def __init__(self, costs: StageCosts, place: Sequence[int], max_nodes: int) -> None:
        self._costs, self._place, self._nodes_left = costs, list(place), max_nodes
        one_of_each = {factor: stage for stage, factor in enumerate(costs.factors)}
        lists = {factor: costs.table(stage).tolist() for factor, stage in one_of_each.items()}
        self._tables = [lists[factor] for factor in costs.factors]
        # lower bounds summed over units[i:]
        self._rest = [*accumulate(reversed(costs.lower_bounds), initial=0)][::-1]
        # how many later stages are on the same rank
        self._later = [self._place[at + 1 :].count(rank) for at, rank in enumerate(self._place)]
        self._sums = _sums(costs.lower_bounds) if len(set(costs.factors)) == 1 else None

    def find(self, rank: int, stage: int) -> Starts | None:
        """A split whose ranks and stages cost at most these limits, or None. Raises SearchLimit."""
        ranks = len(set(self._place))
        least = self._costs.lower_bounds
        if cannot_fit(least, ranks, rank) or cannot_fit(least, self._costs.stages, stage):
            return None
        loads = [0] * ranks
        capacity = [self._capacity(rank, stage, self._place.count(r)) for r in range(ranks)]
        failed: set[tuple[int, ...]] = set()
        starts: Starts = []

        def fill(s: int, start: int, total: int) -> bool:
            """Place the units from `start`; total: the capacity left on all ranks together."""
            n, stages = self._costs.units, self._costs.stages
            if s == stages:
                return start == n
            if self._rest[start] > min(total, (stages - s) * stage):
                return False
            state = (s, start, *loads)
            if state in failed:
                return False
            self._nodes_left -= 1
            if self._nodes_left < 0:
                raise SearchLimit
            where, row = self._place[s], self._tables[s][start]
            most = min(stage, rank - loads[where])
            stops = [n] if s == stages - 1 else range(start + 1, n - (stages - s - 1) + 1)
            fits = takewhile(lambda stop: row[stop] <= most, stops)
            ideal = self._rest[start] / (stages - s)
            before, starts_here = capacity[where], len(starts)
            starts.append(start)
            for stop in sorted(fits, key=lambda stop: abs(row[stop] - ideal)):
                loads[where] += row[stop]
                capacity[where] = self._capacity(rank - loads[where], stage, self._later[s])
                if fill(s + 1, stop, total - before + capacity[where]):
                    return True
                loads[where] -= row[stop]
            capacity[where] = before
            del starts[starts_here:]
            failed.add(state)
            return False

        return starts if fill(0, 0, sum(capacity)) else None

    def _capacity(self, limit: int, stage: int, stages: int) -> int:
        """The capacity of so many stages of one rank, rounded down to a sum of units."""
        limit = min(limit, stages * stage)
        if self._sums is None or stages == 0:
            return limit if stages else 0
        return int(self._sums[np.searchsorted(self._sums, limit, side="right") - 1])


def _sums(weights: Sequence[int]) -> np.ndarray | None:
    """All subset sums, ascending; None where they are too many."""
    sums = np.zeros(1, dtype=np.int64)
    for weight in weights:
        sums = np.union1d(sums, sums + weight)
        if len(sums) > _MAX_SUMS:
            return None
    return sums
