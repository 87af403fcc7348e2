"""An Order: the sequence of compute actions of every pipeline rank. Plain data, no torch.

A pipeline schedule is a list of compute actions per pipeline rank, and the rank of each stage. The
same Order is run, evaluated (`forward_only`), simulated and drawn (`order_check.walk`), and written
to a file (`to_csv`). `check_order` verifies that torch's pipeline runtime can run it without
deadlock and with right gradients.

Sends and receives are not part of it: they follow from the dependencies. torch inserts them in the
order of one global walk, each send together with its receive, so that two ranks post their P2P
calls in the same order, whatever the Order.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MOST_DRAWN = 8_000  # actions; a longer schedule is not drawn in a run's page


class Action(NamedTuple):
    """One compute action of one stage on one microbatch, written as "2F0" (stage, kind,
    microbatch).

    kind is F (forward), B (full backward), I (input gradient only) or W (weight gradients, any time
    after I). Zero-bubble schedules split B into I and W (arXiv 2401.10241): the previous stage
    waits only for I.
    """

    kind: str
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.mb}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the notation of str(), such as "2F0". Raises ValueError."""
        match = re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,9})", text.strip())
        if not match:
            expected = "expected stage, kind (F, B, I or W) and microbatch, such as 2F0"
            raise ValueError(f"{text.strip()[:40]!r} is not an action: {expected}")
        return cls(match[2], int(match[1]), int(match[3]))


@dataclass(frozen=True)
class Order:
    """The compute actions of every pipeline rank, in execution order."""

    ranks: tuple[tuple[Action, ...], ...]  # ranks[pipeline rank]
    stage_to_rank: tuple[int, ...]  # the pipeline rank that holds each stage
    microbatches: int

    @property
    def stages(self) -> int:
        """The number of stages on all ranks."""
        return len(self.stage_to_rank)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W, which restricts sharding and compile."""
        return any(act.kind in "IW" for acts in self.ranks for act in acts)

    @property
    def backward_follows(self) -> bool:
        """Whether the last stage runs the backward of each microbatch before the next forward."""
        last = self.stages - 1
        acts = self.ranks[self.stage_to_rank[last]]
        kinds = [act.kind for act in acts if act.stage == last and act.kind != "W"]
        return all((kind == "F") == (index % 2 == 0) for index, kind in enumerate(kinds))

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
        """The order for evaluation with the same placement; microbatches: None = as many."""
        count = self.microbatches if microbatches is None else microbatches
        ranks: list[list[Action]] = [[] for _ in self.ranks]
        # sorted by the earliest time step at which an action can run: free of deadlocks
        acts = [Action("F", stage, mb) for mb in range(count) for stage in range(self.stages)]
        for act in sorted(acts, key=lambda act: act.mb + act.stage):
            ranks[self.stage_to_rank[act.stage]].append(act)
        return Order(tuple(map(tuple, ranks)), self.stage_to_rank, count)

    def _repr_svg_(self) -> str:
        """Draw the order in a notebook. The drawing code is in a package above this one."""
        from titanlike.watch.chart_picture import inline_svg

        charts = importlib.import_module("titanlike.planning.run_charts")
        return inline_svg(charts.order_chart(self, f"{self.stages} stages"))

    def to_csv(self) -> str:
        """Write one row per pipeline rank, one cell per action, as torch's loader reads."""
        out = io.StringIO()
        rows = ([str(act) for act in acts] for acts in self.ranks)
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[str]], place: Sequence[int]) -> Order:
        """Make an Order from each rank's actions as text, and each stage's rank, as saved by a run.
        Raises ValueError for an invalid action or stage."""
        stages = {*range(len(place))}
        ranks = tuple(tuple(map(Action.parse, row)) for row in rows)
        if not {act.stage for acts in ranks for act in acts} == stages or not stages:
            raise ValueError("its actions are not of the stages that it places")
        if not {*place} <= {*range(len(ranks))}:
            raise ValueError("it places a stage on a rank that it has not")
        return cls(ranks, tuple(place), len({act.mb for acts in ranks for act in acts}))

    @classmethod
    def from_csv(cls, text: str) -> Order:
        """Read `to_csv`'s output, possibly edited by hand: empty cells and lines are skipped.

        A stage is on the rank with most of its actions. Raises ValueError naming line and column of
        an invalid action, and for a stage without actions.
        """
        ranks: list[tuple[Action, ...]] = []
        reader = csv.reader(io.StringIO(text))
        try:
            for cells in reader:
                acts: list[Action] = []
                for column, cell in enumerate(cells, start=1):
                    try:
                        acts += [Action.parse(cell)] if cell.strip() else []
                    except ValueError as error:
                        where = f"row {reader.line_num}, column {column}"
                        raise ValueError(f"{where}: {error}") from None
                if cells:
                    ranks.append(tuple(acts))
        except csv.Error as error:
            raise ValueError(str(error)) from None
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
        return cls(tuple(ranks), tuple(place[s] for s in range(last + 1)), microbatches)
