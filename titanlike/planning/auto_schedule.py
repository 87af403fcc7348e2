"""`schedule=auto`: the order for the costs of this model's stages, found before a run starts.

1. The model's units are counted (or, with hardware=measure, timed) once; times and activations of the
   stages of any split and placement follow.
2. Each placement that `schedule.search` allows is searched (`order_search.py`). With search=split the
   stages of the best are then moved a unit at a time as long as a step gets shorter.
3. What is found is written to run_dir/order.csv, and run from there; beside it what it was found for, in
   order.json: a run that resumes, or starts again, with the same settings has the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.config import files, schema
from titanlike.config.errors import ConfigError
from titanlike.config.errors import Problem as ConfigProblem
from titanlike.config.hardware import Hardware, MeasuredHardware
from titanlike.config.parse import to_plain
from titanlike.config.schema import AutoSchedule, AutoSplit, Config, PointSplit
from titanlike.pipeline.from_config import (
    build_order,
    declared_microbatches,
    derive_microbatches,
    microbatch_problem,
)
from titanlike.pipeline.order import Order
from titanlike.pipeline.schedules import LOOPED, SCHEDULES, V_SCHEDULES, loop, one_f_one_b, vee
from titanlike.planning.closed_form import UnitTable, rows_of
from titanlike.planning.known_hardware import likely_hardware, planned_hardware
from titanlike.planning.list_scheduling import Problem
from titanlike.planning.order_search import (
    Found,
    Known,
    best_known,
    best_order,
    lower_bound,
    trials_for,
)
from titanlike.planning.stage_times import Layout, as_measured, stage_times
from titanlike.split.best_split import best_split
from titanlike.split.partition import SplitError, partition
from titanlike.split.stage_costs import StageCosts
from titanlike.split.unit_costs import CostError

ORDER, WHY = "order.csv", "order.json"
# keys of a config that an order is made for
_MATTERS = (
    *("pp", "dp", "replicate", "tp", "cp", "ep", "batch_size", "seq_len", "model", "schedule"),
    *("split", "loss", "precision", "activation_checkpoint", "fsdp", "hardware", "compile"),
)
_MOST_MOVES = 60  # of a unit from a stage to the next

Stages = list[list[str]]  # names of the units of each stage


@dataclass(frozen=True)
class FoundSchedule:
    """What schedule=auto found."""

    order: Order
    stages: Stages
    seconds: float  # of a step, simulated
    bound: float  # below which no order of these stages can be
    known: Found | None  # the fastest schedule that keeps within the memory, as config.split cuts

    @property
    def text(self) -> str:
        """A line for the console."""
        chunks = self.order.stages // len(self.order.ranks)
        placed = "a V" if self.order.place[-1] == 0 < len(self.order.ranks) - 1 else "a loop"
        text = (
            f"schedule=auto: {chunks} stages a rank in {placed}" if chunks > 1 else "schedule=auto"
        )
        text += f": a step of {self.seconds:.4g} s by simulation, {self.bound:.4g} s at the least"
        if self.known is None:
            return text + "; no other schedule keeps within schedule.memory"
        faster = self.known.seconds / self.seconds - 1
        return text + f"; {faster:.1%} faster than {self.known.name}"


def with_found_order(config: Config, say: Any = lambda _: None) -> Config:
    """The config with the order of schedule=auto, of run_dir or searched now; others as they are.

    say: called with a line about what was found. Raises ConfigError.
    """
    schedule = config.schedule
    if not isinstance(schedule, AutoSchedule) or schedule.path is not None:
        return config
    path, why = Path(config.run_dir) / ORDER, Path(config.run_dir) / WHY
    wanted = json.loads(json.dumps({key: to_plain(getattr(config, key)) for key in _MATTERS}))
    try:
        kept = files.read_object(why)
        if kept["for"] == wanted and path.exists():
            return _with_order(config, path, kept["points"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, or another's
    found = find(config)
    points = None
    if schedule.search == "split" or isinstance(config.split, AutoSplit):
        points = [names[0] for names in found.stages[1:]]
    text = json.dumps({"for": wanted, "points": points, "found": found.text}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.atomic_write_text(path, found.order.to_csv())
    files.atomic_write_text(why, text + "\n")
    say(f"{found.text}; kept in {path}")
    return _with_order(config, path, points)


def _with_order(config: Config, path: Path, points: list[str] | None) -> Config:
    config = replace(config, schedule=replace(config.schedule, path=str(path)))
    return config if points is None else replace(config, split=PointSplit(points=points))


def find(config: Config) -> FoundSchedule:
    """The best order for a config with schedule=auto. Raises ConfigError."""
    schedule = config.schedule
    assert isinstance(schedule, AutoSchedule)
    try:
        search = _Search(config)
    except CostError as error:
        fix = "schedule=zbvzerobubble"
        raise ConfigError([ConfigProblem("schedule", "auto", str(error), fix)]) from error
    except ValueError as error:
        raise ConfigError([ConfigProblem.parse("schedule", str(error))]) from error
    return search.run()


class _Search:
    """The units of a model, and what is tried with them."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError, CostError and ValueError."""
        self.config, schedule = config, config.schedule
        self.hardware = _hardware(config)
        rows = config.batch_size // config.dp
        self.microbatches = (
            declared_microbatches(schedule) or (derive_microbatches(schedule, config.pp, rows)[0])
        )
        rows = rows_of(config, self.microbatches)
        self.table = UnitTable(config, self.hardware, rows).recomputing(config)
        if isinstance(config.hardware, MeasuredHardware):
            from titanlike.planning.measured import measured_times

            seconds = measured_times(config, self.table.draft)
            self.table.times = as_measured(self.table.times, seconds)
        self.deferred = schedule.weight_gradients == "deferred"
        self.limit = float("inf")
        first = self.problem(self.stages(loop(config.pp), even=True), loop(config.pp))
        order = one_f_one_b(config.pp, self.microbatches)
        most = max(first.peak(order, rank) for rank in range(config.pp))
        self.limit = schedule.memory * most

    def run(self) -> FoundSchedule:
        config, best, known = self.config, None, None
        problems = [*self._problems()]
        if not problems:
            reason = "no placement of so many stages suits the split"
            fix = "split=even, or schedule.search=split"
            raise ConfigError([ConfigProblem("split", config.split.name, reason, fix)])
        trials = trials_for([problem for problem, _, _ in problems])
        for problem, stages, given in problems:
            own = [*self._known(problem)]
            if (
                given
                and (one := best_known(problem, own))
                and (not known or one.seconds < known.seconds)
            ):
                known = one
            found = best_order(problem, own, trials, config.seed)
            if found and (best is None or found.seconds < best[0].seconds):
                best = found, stages
        if best is None:
            reason = "no order keeps within it: a rank holds at least one microbatch of its stages"
            raise ConfigError(
                [
                    ConfigProblem(
                        "schedule.memory", config.schedule.memory, reason, "schedule.memory=1.0"
                    )
                ]
            )
        if config.schedule.search == "split":
            best = self._moved(*best)
        found, stages = best
        bound = lower_bound(found.problem)
        return FoundSchedule(found.order.check(), stages, found.seconds, bound, known)

    def _problems(self) -> Iterator[tuple[Problem, Stages, bool]]:
        """(what an order is made for, its stages, whether they are as config.split says)"""
        schedule, tried = self.config.schedule, []
        for place in _placements(schedule, self.config.pp):
            for given in (True, False) if schedule.search == "split" else (True,):
                try:
                    stages = self.stages(place) if given else self._balanced(place)
                except SplitError:
                    continue
                if (place, stages) not in tried and all(stages):
                    tried.append((place, stages))
                    yield self.problem(stages, place), stages, given

    def stages(self, place: Sequence[int], even: bool = False) -> Stages:
        """As config.split cuts. Raises SplitError."""
        split, units = self.config.split, self.table.units
        if isinstance(split, AutoSplit) and not even:
            return self._balanced(place)
        if even or isinstance(split, AutoSplit):
            split = schema.EvenSplit()
        return partition(units, split, len(place))

    def _balanced(self, place: Sequence[int]) -> Stages:
        """With ranks that take the same time, as far as can be."""
        units = self.table.units
        each = [self.table.times[unit.name] for unit in units]
        seconds = [t.forward + t.input_gradient + t.weight_gradient for t in each]
        none = np.zeros((len(units) + 1, len(units) + 1), dtype=np.int64)
        costs = StageCosts(none, [round(s.device * 1e9) for s in seconds], [1] * len(place))
        starts = best_split(costs, place).starts
        names = [unit.name for unit in units]
        return [names[a:b] for a, b in pairwise([*starts, len(names)])]

    def problem(self, stages: Stages, place: tuple[int, ...]) -> Problem:
        config, table = self.config, self.table
        recomputed = [[name for name in own if self._again(name)] for own in stages]
        count, message, numel = len(stages), table.message, table.memory.unit_parameters()
        deferred = range(count) if self.deferred else ()
        layout = Layout(
            stages,
            [frozenset(own) for own in recomputed],
            deferred,
            place,
            1,
            self.microbatches,
            [sum(numel[name] for name in own) for own in stages],
            [0, *([message] * (count - 1))],
            [*([message] * (count - 1)), 0],
        )
        times = stage_times(config, layout, self.hardware, table.times).stages
        order = Order(((),) * config.pp, place, self.microbatches)
        memory = table.memory.arranged(config, order, 1, stages, deferred, message)
        each = [memory.activations(stage, recomputed[stage]) for stage in range(count)]
        held, queued = ([float(row[at]) for row in each] for at in (0, 1))
        ahead = self.hardware.runs_ahead
        return Problem(place, self.microbatches, times, held, queued, self.limit, ahead)

    def _again(self, name: str) -> bool:
        """Whether a unit is recomputed; of `fit`, which asks for the order, none is here."""
        how, blocks = self.config.activation_checkpoint, self.table.blocks
        if name not in blocks:
            return False
        if isinstance(how, schema.EveryActivationCheckpoint):
            ordered = [unit.name for unit in self.table.units if unit.block]
            return ordered.index(name) % how.every == 0
        return how.name in ("full", "selective")

    def _known(self, problem: Problem) -> Iterator[Known]:
        """Schedules of a problem's placement."""
        pp, m, chunks = problem.ranks, problem.microbatches, len(problem.place) // problem.ranks
        for name in SCHEDULES:
            looped = name in LOOPED
            if looped:
                schedule: Any = schema.LoopedSchedule(name, m, chunks)
            else:
                schedule = schema.Schedule(name, m)
            of = vee(pp) if name in V_SCHEDULES else loop(pp, chunks if looped else 1)
            if of == problem.place and microbatch_problem(schedule, pp, m) is None:
                yield Known(name, build_order(schedule, pp, m))

    def _moved(self, found: Found, stages: Stages) -> tuple[Found, Stages]:
        """With a unit moved from a stage to the next as long as that makes a step shorter."""
        trials = max(12, trials_for([found.problem]) // 8)
        place, moves, better = found.problem.place, 0, True
        while better and moves < _MOST_MOVES:
            better = False
            for edge in range(1, len(stages)):
                for by in (-1, 1):
                    other = _shifted(stages, edge, by)
                    if other is None or moves >= _MOST_MOVES:
                        continue
                    moves += 1
                    problem = self.problem(other, place)
                    if lower_bound(problem) >= found.seconds:
                        continue
                    known = [*self._known(problem), Known("", found.order)]
                    one = best_order(problem, known, trials, self.config.seed)
                    if one is not None and one.seconds < found.seconds * (1 - 1e-6):
                        found, stages, better = one, other, True
        return found, stages


def _shifted(stages: Stages, edge: int, by: int) -> Stages | None:
    """With the begin of stage `edge` a unit later or earlier; None where a stage would be empty."""
    starts = [0, *accumulate(map(len, stages))]
    starts[edge] += by
    if any(a >= b for a, b in pairwise(starts)):
        return None
    names = [name for own in stages for name in own]
    return [names[a:b] for a, b in pairwise(starts)]


def _placements(schedule: AutoSchedule, pp: int) -> list[tuple[int, ...]]:
    if schedule.search == "order":
        return [vee(pp) if schedule.placement == "v" else loop(pp, schedule.stages_per_rank)]
    counts = range(1, schedule.stages_per_rank + 1)
    return [*([vee(pp)] if 2 in counts and pp > 1 else []), *(loop(pp, count) for count in counts)]


def _hardware(config: Config) -> Hardware:
    """The planned hardware, or what is likely here."""
    if config.hardware.name == "none":
        return likely_hardware(config)
    return planned_hardware(config)
