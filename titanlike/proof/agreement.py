"""Whether ranks can get out of step, from what each asks of the others, in its order.

The rules are the strictest that NCCL may follow: a call holds up its rank until all ranks of the
group have come to it, messages are not buffered, and those of one batch are begun together. What
ends under these ends under gloo, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from titanlike.core.torch_private.recorded_ranks import Call, Program


class Place(NamedTuple):
    """Where a rank is: its next call, None at the end of its program."""

    rank: int
    call: Call | None


@dataclass(frozen=True)
class Disagreement:
    """Ranks that would wait for each other for ever, or send what the others do not expect."""

    text: str
    places: list[Place]


class Classes:
    """The ranks that were run, each for all that are equal by construction.

    A rank's program depends on its stages, so on its place along `pp`; and on whether it is the first
    along the other axes, which share the same stages. So of each pipeline rank the first and the last
    rank are run, or all ranks of a small job.
    """

    def __init__(self, sizes: Mapping[str, int], most: int) -> None:
        """sizes: of the mesh, the last axis varying fastest; most: ranks of a job that are all run."""
        self.sizes, world_size = sizes, prod(sizes.values())
        self._of_stage = world_size // sizes["pp"]
        self.complete = world_size <= most
        ends = [0, self._of_stage - 1]
        self.ranks = [
            pp * self._of_stage + place
            for pp in range(sizes["pp"])
            for place in (range(self._of_stage) if self.complete else dict.fromkeys(ends))
        ]

    def of(self, rank: int) -> int:
        """The rank that was run for this one."""
        pp, place = divmod(rank, self._of_stage)
        return rank if self.complete else pp * self._of_stage + (place and self._of_stage - 1)

    def members(self, call: Call, rank: int) -> tuple[int, ...]:
        """The ranks that were run and must come to a call of `rank` together."""
        if self.complete:
            return call.ranks
        if call.axes == ("pp",):
            return tuple(dict.fromkeys(map(self.of, call.ranks)))
        if "pp" in call.axes:
            return tuple(self.ranks)
        mine = rank // self._of_stage
        return tuple(other for other in self.ranks if other // self._of_stage == mine)


def disagreement(programs: Sequence[Program], classes: Classes) -> Disagreement | None:
    """Return the first disagreement of these ranks; None if all come to their ends."""
    return _Replay(programs, classes).run()


class _Replay:
    def __init__(self, programs: Sequence[Program], classes: Classes) -> None:
        self._classes = classes
        self._steps: dict[tuple[int, str], list[list[Call]]] = defaultdict(list)
        for program in programs:
            self._steps[program.rank, ""]
            for call in program.calls:
                steps = self._steps[program.rank, call.queue]
                if steps and call.batch == steps[-1][-1].batch >= 0:
                    steps[-1].append(call)
                else:
                    steps.append([call])
        self._at = dict.fromkeys(self._steps, 0)
        self._open = dict.fromkeys(self._steps, 0)  # calls of the step that have not ended
        # (group, ends or members) -> rank -> its calls that wait there, in order
        self._waiting: dict[tuple[object, ...], dict[int, deque[tuple[Call, tuple[int, str]]]]]
        self._waiting = defaultdict(lambda: defaultdict(deque))

    def run(self) -> Disagreement | None:
        ready = deque(self._steps)
        while ready:
            thread = ready.popleft()
            if self._at[thread] == len(self._steps[thread]):
                continue
            calls = self._steps[thread][self._at[thread]]
            self._open[thread] = len(calls)
            for call in calls:
                key, members = self._meeting(call, thread[0])
                self._waiting[key][thread[0]].append((call, thread))
                here = self._waiting[key]
                while all(here[member] for member in members):
                    met = {member: here[member].popleft() for member in members}
                    places = [Place(member, one) for member, (one, _) in met.items()]
                    if (text := _difference(places, self._classes)) is not None:
                        return Disagreement(text, places)
                    for _, other in met.values():
                        self._open[other] -= 1
                        if not self._open[other]:
                            self._at[other] += 1
                            ready.append(other)
        stuck = [
            Place(thread[0], self._steps[thread][at][0])
            for thread, at in self._at.items()
            if at < len(self._steps[thread])
        ]
        if not stuck:
            return None
        waiting = {place.rank for place in stuck}
        ended = [Place(rank, None) for rank in self._classes.ranks if rank not in waiting]
        text = "ranks wait for each other, or for one that has ended"
        return Disagreement(text, stuck + ended)

    def _meeting(self, call: Call, rank: int) -> tuple[tuple[object, ...], tuple[int, ...]]:
        """(what calls that meet have in common, the ranks that meet). A send meets the receive of
        the same message; a collective, those of the other ranks of its group in its queue."""
        if call.operation in ("send", "recv"):
            peer = self._classes.of(call.peer)
            ends = (rank, peer) if call.operation == "send" else (peer, rank)
            return (call.group, "message", call.detail, *ends), ends
        members = self._classes.members(call, rank)
        return (call.group, call.queue, members), members


def _difference(places: Sequence[Place], classes: Classes) -> str | None:
    """How calls that meet differ, in words."""
    calls = [place.call for place in places if place.call is not None]
    first = calls[0]
    if first.operation in ("send", "recv"):
        if len({call.operation for call in calls}) < 2:
            return f"two ranks {first.operation} to each other, and none does the opposite"
        if len({call.sizes for call in calls}) > 1:
            return "a message is not received as it is sent"
        return None
    if len({call.operation for call in calls}) > 1:
        return "ranks of a group call different collectives"
    if len({call.detail for call in calls}) > 1:
        return f"ranks of a group give {first.operation} different arguments"
    if first.operation != "all_to_all":
        if len({call.sizes for call in calls}) > 1:
            return f"ranks of a group give {first.operation} different shapes or dtypes"
        return None
    forms = {(dtype, any(call.splits)) for call in calls for _, dtype in call.sizes}
    if len(forms) > 1:
        return "ranks of a group give all_to_all different dtypes, or only some of them split sizes"
    if classes.complete and all(call.splits and all(call.splits) for call in calls):
        for row, receiver in enumerate(calls):
            for column, sender in enumerate(calls):
                if receiver.splits[0][column] != sender.splits[1][row]:
                    return "ranks of a group give all_to_all split sizes that do not fit"
    return None
