"""An Order: what every pipeline rank computes, and when. Plain data, no torch.

A pipeline schedule is an order of compute actions: a list a pipeline rank, and the rank that holds
each stage. The same Order is run, evaluated (`forward_only`), simulated and drawn (`walk`,
`dependencies`), and written to a file (`to_csv`). `check` finds whether torch's pipeline runtime
can run it to its end with the right gradients.

Sends and receives are not part of it: they follow from the dependencies. torch inserts them in the
order of one global walk, a send and its receive at once, so that two ranks post their messages in
the same order, whatever the Order.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple


class Action(NamedTuple):
    """One compute action of one stage on one microbatch, written like "2F0".

    kind is F (forward), B (whole backward), I (gradient of the input alone) or W (gradient of the
    weights, any time after I). Splitting B into I and W is what zero-bubble schedules do
    (arXiv 2401.10241): only I is on the critical path of the stage before.
    """

    kind: str
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.mb}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of str(). Raises ValueError for anything else."""
        match = re.fullmatch(r"([0-9]+)([FBIW])([0-9]+)", text.strip())
        if not match:
            expected = "expected stage, kind (F, B, I or W) and microbatch, such as 2F0"
            raise ValueError(f"{text.strip()!r} is not an action: {expected}")
        return cls(match[2], int(match[1]), int(match[3]))


def dependencies(act: Action, last: int) -> tuple[Action, ...]:
    """The actions that must have ended before `act`, under their `completion_key`.

    `last` is the index of the last stage, whose backward starts from the loss.
    """
    kind, stage, mb = act
    if kind == "F":
        return (Action("F", stage - 1, mb),) if stage else ()
    if kind == "W":
        return (Action("I", stage, mb),)
    forward = Action("F", stage, mb)
    return (forward,) if stage == last else (forward, Action("I", stage + 1, mb))


def completion_key(act: Action) -> Action:
    """The name under which others wait for `act`: a B is also an I, and more."""
    return act._replace(kind="I") if act.kind == "B" else act


@dataclass(frozen=True)
class Order:
    """The compute actions of every pipeline rank, in execution order."""

    ranks: tuple[tuple[Action, ...], ...]  # ranks[pipeline rank]
    stage_to_rank: tuple[int, ...]  # the pipeline rank that holds each stage
    microbatches: int

    @property
    def stages(self) -> int:
        """Stages on all ranks together."""
        return len(self.stage_to_rank)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is split into I and W, which restricts sharding and compile."""
        return any(act.kind in "IW" for acts in self.ranks for act in acts)

    def local(self, rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, in ascending order."""
        return self._local[rank]

    @cached_property
    def _local(self) -> list[tuple[int, ...]]:
        held: list[list[int]] = [[] for _ in self.ranks]
        for stage, rank in enumerate(self.stage_to_rank):
            held[rank].append(stage)
        return [*map(tuple, held)]

    def forward_only(self, microbatches: int | None = None) -> Order:
        """Evaluation on the same placement: all stages' forwards of so many microbatches."""
        count = self.microbatches if microbatches is None else microbatches
        ranks: list[list[Action]] = [[] for _ in self.ranks]
        # by the earliest time step at which an action can run: never a deadlock, on any placement
        acts = [Action("F", stage, mb) for mb in range(count) for stage in range(self.stages)]
        for act in sorted(acts, key=lambda act: act.mb + act.stage):
            ranks[self.stage_to_rank[act.stage]].append(act)
        return Order(tuple(map(tuple, ranks)), self.stage_to_rank, count)

    def check(self) -> Order:
        """Return self if torch's pipeline runtime will run it to the end with right gradients.

        Raises ValueError naming the pipeline rank, the action, and what to change: an action out of
        range, misplaced, doubled or missing; B together with I or W for one microbatch; an action
        before one that it needs; forwards of the last stage out of microbatch order; a deadlock.
        """
        self._check_shape()
        at = self._check_cells()
        self._check_complete(at)
        self._check_sequence(at)
        for _ in walk(self):
            pass
        return self

    def _check_shape(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"an order of {self.microbatches} microbatches: it needs at least 1")
        for stage, rank in enumerate(self.stage_to_rank):
            if not 0 <= rank < len(self.ranks):
                has = f"the order has ranks 0 to {len(self.ranks) - 1}"
                raise ValueError(f"stage {stage} is placed on pipeline rank {rank}: {has}")
        for rank in range(len(self.ranks)):
            if rank not in self.stage_to_rank:
                raise ValueError(f"pipeline rank {rank} has no stage: place one there, or use less")

    def _check_cells(self) -> dict[Action, int]:
        """Each action by itself; returns its position in the list of its rank."""
        at: dict[Action, int] = {}
        for rank, acts in enumerate(self.ranks):
            for position, act in enumerate(acts):
                problem = ""
                if act.kind not in ("F", "B", "I", "W"):
                    problem = f" has kind {act.kind!r}: use F, B, I or W"
                elif not 0 <= act.stage < self.stages:
                    problem = f": there are only stages 0 to {self.stages - 1}"
                elif not 0 <= act.mb < self.microbatches:
                    problem = f": there are only microbatches 0 to {self.microbatches - 1}"
                elif (holder := self.stage_to_rank[act.stage]) != rank:
                    problem = (
                        f": stage {act.stage} is on pipeline rank {holder}; move the action there"
                    )
                elif act in at:
                    problem = f" is listed twice, first as action {at[act] + 1}; remove one"
                if problem:
                    where = f"pipeline rank {rank}: {act} (action {position + 1} of {len(acts)})"
                    raise ValueError(where + problem)
                at[act] = position
        return at

    def _check_complete(self, at: dict[Action, int]) -> None:
        """F alone everywhere (evaluation), or F and a whole or a split backward."""
        forward_only = all(act.kind == "F" for act in at)
        for stage, rank in enumerate(self.stage_to_rank):
            for mb in range(self.microbatches):
                f, b, i, w = (Action(kind, stage, mb) for kind in "FBIW")
                half = i if i in at else w
                problem = ""
                if f not in at:
                    problem = f"{f} is missing; add it"
                elif b in at and half in at:
                    problem = f"{b} besides {half}; keep either {b}, or {i} and {w}"
                elif (i in at) != (w in at):
                    problem = f"{w if half == i else i} is missing besides {half}; add it"
                elif not (forward_only or b in at or half in at):
                    problem = f"{b} is missing; add it after {f}, or add {i} and {w}"
                if problem:
                    raise ValueError(f"pipeline rank {rank}: {problem}")

    def _check_sequence(self, at: dict[Action, int]) -> None:
        """What must come in a certain order within one rank."""
        last = self.stages - 1
        position = {completion_key(act): index for act, index in at.items()}
        for rank, acts in enumerate(self.ranks):
            for index, act in enumerate(acts):
                for need in dependencies(act, last):
                    if self.stage_to_rank[need.stage] == rank and position[need] > index:
                        wrong = f"{act} comes before {acts[position[need]]}, which it needs"
                        raise ValueError(f"pipeline rank {rank}: {wrong}; swap them")
        final = [act for act in self.ranks[self.stage_to_rank[last]] if act[:2] == ("F", last)]
        for before, after in pairwise(final):
            if before.mb > after.mb:
                raise ValueError(
                    f"pipeline rank {self.stage_to_rank[last]}: {before} comes before {after}; the last "
                    "stage's forwards must be in microbatch order, because torch numbers the "
                    "losses as they arrive"
                )

    def _repr_svg_(self) -> str:
        """For notebooks. Drawn where orders are simulated, above this room."""
        from titanlike.metrics.chart_picture import inline_svg

        charts = importlib.import_module("titanlike.costs.run_charts")
        return inline_svg(charts.order_chart(self, f"{self.stages} stages"))

    def to_csv(self) -> str:
        """A row a pipeline rank, a cell an action: what `from_csv` and torch's loader read."""
        out = io.StringIO()
        rows = ([str(act) for act in acts] for acts in self.ranks)
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[str]], place: Sequence[int]) -> Order:
        """Of each rank its actions as text, and the rank of each stage, as runs keep them. Raises
        ValueError for what is no action."""
        ranks = tuple(tuple(map(Action.parse, row)) for row in rows)
        return cls(ranks, tuple(place), len({act.mb for acts in ranks for act in acts}))

    @classmethod
    def from_csv(cls, text: str) -> Order:
        """Read `to_csv` back, or a table edited by hand: empty cells and empty lines are skipped.

        A stage is on the rank that has most of its actions. Raises ValueError naming line and
        column for a cell that is no action, and what `check` raises.
        """
        ranks: list[tuple[Action, ...]] = []
        reader = csv.reader(io.StringIO(text))
        for cells in reader:
            acts: list[Action] = []
            for column, cell in enumerate(cells, start=1):
                try:
                    acts += [Action.parse(cell)] if cell.strip() else []
                except ValueError as error:
                    raise ValueError(f"row {reader.line_num}, column {column}: {error}") from None
            if cells:
                ranks.append(tuple(acts))
        votes = Counter((act.stage, rank) for rank, acts in enumerate(ranks) for act in acts)
        if not votes:
            raise ValueError("no action in it: expected a row a pipeline rank, cells such as 0F0")
        place: dict[int, int] = {}
        for (stage, rank), _ in votes.most_common():
            place.setdefault(stage, rank)
        last = max(place)
        if missing := [stage for stage in range(last) if stage not in place]:
            reason = f"stage {missing[0]} has no action, but stage {last} has"
            raise ValueError(f"{reason}: number the stages from 0 without a gap")
        microbatches = 1 + max(act.mb for acts in ranks for act in acts)
        return cls(tuple(ranks), tuple(place[s] for s in range(last + 1)), microbatches).check()


def walk(order: Order) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action) in an order that respects all dependencies.

    Raises ValueError on a deadlock, naming the ranks that wait for each other.
    """
    last = order.stages - 1
    at = [0] * len(order.ranks)
    done: set[Action] = set()
    left = sum(map(len, order.ranks))
    while left:
        before = left
        for rank, acts in enumerate(order.ranks):
            while at[rank] < len(acts) and done.issuperset(dependencies(acts[at[rank]], last)):
                act = acts[at[rank]]
                done.add(completion_key(act))
                at[rank] += 1
                left -= 1
                yield rank, act
        if left == before:
            raise ValueError(_deadlock(order, at, done))


def _deadlock(order: Order, at: list[int], done: set[Action]) -> str:
    """The cycle of ranks that wait for each other; at: the next action of each rank."""
    position = {completion_key(act): (act, i) for acts in order.ranks for i, act in enumerate(acts)}
    rank = next(rank for rank, acts in enumerate(order.ranks) if at[rank] < len(acts))
    lines: dict[int, str] = {}
    while rank not in lines:
        act = order.ranks[rank][at[rank]]
        need = next(need for need in dependencies(act, order.stages - 1) if need not in done)
        other = order.stage_to_rank[need.stage]
        if need not in position:
            return f"pipeline rank {rank}: {act} needs {need}, which no rank computes; add it"
        goal, later = position[need]
        goal = f"{goal} of pipeline rank {other}, where it is action {later + 1}"
        lines[rank] = f"pipeline rank {rank} waits at {act} for {goal}"
        rank = other
    cycle = "; ".join(list(lines.values())[list(lines).index(rank) :])
    fix = "Move one of the awaited actions before the one at which its rank waits"
    return f"deadlock: {cycle}. {fix}"
