"""`schedule=auto`: search the order for the costs of this model's stages, before a run starts.

1. The costs of the model's units are counted once; times and
   activations of the stages follow for any split and placement.
2. Each placement that `schedule.search` allows is searched (`order_search.py`). With search=split
   the stage boundaries are searched as well.
3. The result is written to run_dir/order.csv, which is then run, and its inputs to order.json: a
   run
   that resumes or restarts with the same settings uses the same order.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from titanlike.core.config import files, schema
from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups import pipeline
from titanlike.core.config.groups.pipeline import AutoSchedule, AutoSplit, PointSplit
from titanlike.core.config.overrides import with_choices
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import Config
from titanlike.core.graph.partition import SplitError, partition
from titanlike.core.pipeline.from_config import build_order, microbatch_problem
from titanlike.core.pipeline.order import Order
from titanlike.core.pipeline.order_check import check_order
from titanlike.core.pipeline.schedules import LOOPED, SCHEDULES, V_SCHEDULES, loop, one_f_one_b, vee
from titanlike.planning.costs.auto_split import StageCosts, best_split, moved_units
from titanlike.planning.costs.unit_costs import CostError
from titanlike.planning.estimate import CostTable, microbatches_of, rows_of
from titanlike.planning.known_hardware import likely_hardware
from titanlike.planning.order_search import (
    OrderProblem,
    SearchResult,
    adapted,
    best_known,
    best_order,
    fastest,
    lower_bound,
    trials_for,
)
from titanlike.planning.stage_times import LayoutTimes

ORDER, WHY = "order.csv", "order.json"
# config keys on which the order depends
_MATTERS = (
    *("pp", "dp", "replicate", "tp", "cp", "ep", "batch_size", "seq_len", "model", "schedule"),
    *("split", "loss", "precision", "activation_checkpoint", "fsdp", "hardware", "compile"),
)
Stages = Sequence[Sequence[str]]  # names of each stage's units


@dataclass(frozen=True)
class FoundSchedule:
    """The result of schedule=auto."""

    order: Order
    stages: Stages
    seconds: float  # simulated step time
    bound: float  # lower bound of the step time of any order of these stages
    # the fastest built-in schedule within the memory limit, with the stages of config.split
    known: SearchResult | None

    @property
    def text(self) -> str:
        """A line for the console."""
        ranks, last = len(self.order.ranks), self.order.stage_to_rank[-1]
        chunks, placed = self.order.stages // ranks, "a V" if last == 0 < ranks - 1 else "a loop"
        text = "schedule=auto" + (f": {chunks} stages a rank in {placed}" if chunks > 1 else "")
        text += f": a step of {self.seconds:.4g} s by simulation, {self.bound:.4g} s at the least"
        if self.known is None:
            return text + "; no other schedule keeps within this memory"
        faster = self.known.seconds / self.seconds - 1
        return text + f"; {faster:.1%} faster than {self.known.name}"


def with_found_order(config: Config, say: Any = lambda _: None) -> Config:
    """Set the order of schedule=auto in a config, read from run_dir or searched now; others are
    unchanged.

    say: called with a line about the result. Raises ConfigError.
    """
    schedule = config.schedule
    if not isinstance(schedule, AutoSchedule) or schedule.path is not None:
        return config
    path, why = Path(config.run_dir) / ORDER, Path(config.run_dir) / WHY
    inputs = json.loads(json.dumps({key: to_plain(getattr(config, key)) for key in _MATTERS}))
    try:
        stored = files.read_object(why)
        if stored["for"] == inputs and path.exists():
            return _with_order(config, path, stored["points"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, or of other settings
    result = find(config)
    points = None
    if schedule.search == "split" or isinstance(config.split, AutoSplit):
        points = [names[0] for names in result.stages[1:]]
    text = json.dumps({"for": inputs, "points": points, "found": result.text}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.atomic_write_text(path, result.order.to_csv())
    files.atomic_write_text(why, text + "\n")
    say(result.text)
    return _with_order(config, path, points)


def _with_order(config: Config, path: Path, points: list[str] | None) -> Config:
    config = with_choices(config, {"schedule.path": str(path)})
    return config if points is None else replace(config, split=PointSplit(points=points))


def find(config: Config) -> FoundSchedule:
    """Search the best order for a config with schedule=auto. Raises ConfigError."""
    try:
        search = _Search(config)
    except CostError as error:
        problem = Problem("schedule", "auto", str(error), "schedule=zbvzerobubble")
        raise ConfigError([problem]) from error
    except ValueError as error:
        raise ConfigError([Problem.parse("schedule", str(error))]) from error
    return search.run()


class _Search:
    """The units of a model with their costs, and the search over placements."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError, CostError and ValueError."""
        self.config, schedule = config, config.schedule
        assert isinstance(schedule, AutoSchedule)
        self.schedule = schedule
        self.hardware = likely_hardware(config)
        self.microbatches = microbatches_of(config)
        self.table = CostTable(config, self.hardware, rows_of(config, self.microbatches))
        self.recomputed = self.table.recomputed(config)
        self._units = [unit.name for unit in self.table.units]
        plan = self.table.plan
        self.times = self.table.times(config)
        self.limits: dict[str, float] = {}  # config key -> bytes that it allows
        costs, deferred = plan.memory().unit_costs, schedule.weight_gradients == "deferred"
        assert costs is not None
        # unit -> (bytes of a microbatch, bytes of these kept between I and W)
        self._held = {
            name: (unit.kept if name in self.recomputed else unit.saved, unit.queued)
            for name, unit in costs.memory(config, deferred).items()
        }
        self._orders: dict[tuple[int, ...], dict[str, Order]] = {}
        place = loop(config.pp)
        reference = self._by_config(place) or self._by_config(place, even=True)
        if reference is None:
            raise ValueError(f"schedule=auto: the model has fewer units than pp={config.pp}; pp=1")
        first = self.problem(reference)
        order = one_f_one_b(config.pp, self.microbatches)
        peak = max(first.peak(order, rank) for rank in range(config.pp))
        share, size = schedule.memory, schedule.memory_bytes
        if share is None and size is None and schedule.in_flight is None:
            share = 1.0
        self.limits |= {} if share is None else {"memory": share * peak}
        self.limits |= {} if size is None else {"memory_bytes": size}

    def run(self) -> FoundSchedule:
        """Search the best order over all allowed placements (and splits). Raises ConfigError."""
        cuts: list[Placement] = []
        by_config = [cut for place in self._places() if (cut := self._by_config(place))]
        splits = self.schedule.search == "split"
        for place in self._places():
            place_cuts = [cut for cut in by_config if cut.place == place]
            if splits:  # without empty stages
                place_cuts = [cut for cut in place_cuts if len({*cut.starts}) == len(place)]
                balanced = self._balanced(place), self._balanced(place, by_memory=True)
                place_cuts += filter(None, balanced)
            cuts += dict.fromkeys(place_cuts)
        if not cuts:
            reason = "no placement that schedule=auto may choose has so many stages"
            fix = "split=even, or schedule.search=placement"
            raise ConfigError([Problem("split", self.config.split.name, reason, fix)])
        problems, seed = [self.problem(cut) for cut in cuts], self.config.seed
        # trials for each searched placement
        trials = trials_for(problems[:3] if splits else problems)
        if splits:
            units = len(self.table.units)
            best = best_cut(self.problem, self._known, problems, units, trials, seed)
        else:
            orders = [best_order(p, self._known(p), trials, seed) for p in problems]
            best = fastest(orders)
        if best is None:
            raise ConfigError(self._too_little(problems))
        known = [best_known(p, self._known(p)) for p in map(self.problem, by_config)]
        names, bound = self.names(best.problem.starts), lower_bound(best.problem)
        return FoundSchedule(check_order(best.order), names, best.seconds, bound, fastest(known))

    def _places(self) -> list[tuple[int, ...]]:
        """The placements allowed by `schedule.search`."""
        schedule, pp = self.schedule, self.config.pp
        if schedule.search == "order":
            return [vee(pp) if schedule.placement == "v" else loop(pp, schedule.stages_per_rank)]
        loops = [loop(pp, count) for count in range(1, schedule.stages_per_rank + 1)]
        return [vee(pp), *loops] if schedule.stages_per_rank > 1 and pp > 1 else loops

    def _too_little(self, problems: Sequence[OrderProblem]) -> list[Problem]:
        """Problems of the keys that allow less memory than any order needs."""
        schedule, too_little = self.schedule, []
        least = min(problem.least_memory for problem in problems)
        reason = "a rank holds at least a microbatch of all its stages, which takes more"
        for name, limit in self.limits.items():
            value: float | None = schedule.memory_bytes
            fix = f"{math.ceil(least / 2**20)}MiB"
            if name == "memory":
                value = 1.0 if schedule.memory is None else schedule.memory
                fix = f"{math.ceil(100 * least / limit * value) / 100:g}"
            if limit < least:
                too_little.append(
                    Problem(f"schedule.{name}", value, reason, f"schedule.{name}={fix}")
                )
        return too_little

    def names(self, starts: Starts) -> list[list[str]]:
        """Names of the units of each stage."""
        return [self._units[a:b] for a, b in pairwise([*starts, len(self._units)])]

    def _by_config(self, place: tuple[int, ...], even: bool = False) -> Placement | None:
        """The placement with the stages of config.split; None if it has a different number of
        stages."""
        split = pipeline.EvenSplit() if even else self.config.split
        if isinstance(split, AutoSplit):
            return self._balanced(place)
        try:
            stages = partition(self.table.units, split, len(place))
        except SplitError:
            return None
        starts = [0, *accumulate(map(len, stages))][:-1]
        return Placement(place, tuple(starts))

    def _balanced(self, place: tuple[int, ...], by_memory: bool = False) -> Placement | None:
        """The placement whose ranks have about the same time, or the same memory."""
        costs = [
            self._held[name][0] if by_memory else round(self.times[name].computes.device * 1e9)
            for name in self._units
        ]
        starts = best_split(StageCosts(None, costs, [1] * len(place)), place).starts
        return Placement(place, tuple(starts)) if len(costs) >= len(place) else None

    def problem(self, cut: Placement) -> OrderProblem:
        """Make the search problem of these stages: their times, activations and memory limit."""
        stages = self.names(cut.starts)
        m, place = self.microbatches, cut.place
        waiting = range(len(stages)) if self.schedule.weight_gradients == "deferred" else ()
        layout = self.table.layout(stages, self.recomputed, waiting, place, 1, m)
        times = LayoutTimes(self.config, layout, self.hardware, self.times).stages
        held, queued = (
            [sum(self._held[name][index] for name in names) for names in stages] for index in (0, 1)
        )
        in_flight = self.schedule.in_flight
        return OrderProblem(
            *(cut.place, self.microbatches, times, held, queued),
            limit=min(self.limits.values(), default=math.inf),
            runs_ahead=self.hardware.runs_ahead,
            in_flight=math.inf if in_flight is None else in_flight,
            starts=cut.starts,
        )

    def _known(self, problem: OrderProblem) -> dict[str, Order]:
        """The built-in schedules with a problem's placement."""
        place = problem.place
        if place not in self._orders:
            orders = self._orders[place] = dict[str, Order]()
            pp, m, chunks = problem.ranks, problem.microbatches, len(place) // problem.ranks
            for name in SCHEDULES:
                kind = schema.VARIANTS["schedule"][name]
                schedule = kind(name, m, chunks) if name in LOOPED else kind(name, m)
                schedule_place = (
                    vee(pp) if name in V_SCHEDULES else loop(pp, chunks if name in LOOPED else 1)
                )
                if schedule_place == place and microbatch_problem(schedule, pp, m) is None:
                    orders[name] = build_order(schedule, pp, m)
        return self._orders[place]


# --- joint search of stage boundaries, placement and order ---------------------------------------


_CHANGED = 2  # number of placements whose boundaries are moved

Starts = tuple[int, ...]  # index of each stage's first unit


@dataclass(frozen=True)
class Placement:
    """The rank of each stage, and where stages begin."""

    place: tuple[int, ...]
    starts: Starts


def best_cut(
    problem_of: Callable[[Placement], OrderProblem],
    known_of: Callable[[OrderProblem], dict[str, Order]],
    problems: Sequence[OrderProblem],
    units: int,
    trials: int,
    seed: int = 0,
) -> SearchResult | None:
    """Search the fastest order of any split, starting from those of `problems`; None if none fits.

    units: number of units in the model.
    """
    share = trials // len(problems)
    orders = [best_order(problem, known_of(problem), share, seed) for problem in problems]
    first = sorted(filter(None, orders), key=lambda result: result.seconds)
    if not first:
        return None
    best = fastest(
        _with_moved_units(result, problem_of, units, trials, random.Random(seed))
        for result in first[:_CHANGED]
    )
    assert best is not None
    known = known_of(best.problem) | {"": best.order}
    return fastest((best, best_order(best.problem, known, trials, seed)))


def _with_moved_units(
    best: SearchResult,
    problem_of: Callable[[Placement], OrderProblem],
    units: int,
    trials: int,
    draw: random.Random,
) -> SearchResult:
    """Move units between stages as long as the step gets shorter."""
    remaining = trials
    while remaining > 0:
        moves = [*map(tuple, moved_units(best.problem.starts, units).tolist())]
        draw.shuffle(moves)
        for starts in moves:
            problem = problem_of(Placement(best.problem.place, starts))
            if remaining <= 0 or lower_bound(problem) >= best.seconds:
                continue
            remaining -= 1
            result = adapted(problem, best.order)
            if result is not None and result.seconds < best.seconds * (1 - 1e-6):
                best = result
                break
        else:
            break
    return best
