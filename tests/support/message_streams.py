"""When the messages of a lowered order begin and end on devices with queues, as under NCCL.

A device computes in one stream, in the order of its rank's actions. A message is a rendezvous: it
begins when both ends have reached it, each in the stream that its communicator has on that rank,
and behind what that rank computed before it was posted; it occupies both streams until its end.
Which messages of a rank share a stream is the question (`ONE_STREAM`, `A_PAIR`).

The nodes of a graph are computations and messages, its edges what must have ended before. A cycle
is a deadlock; the longest path is the makespan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlike.core.config.groups.pipeline import LoopedSchedule, Schedule
from titanlike.core.pipeline.from_config import build_order, microbatch_problem
from titanlike.core.pipeline.order import Order
from titanlike.core.pipeline.schedules import LOOPED

Stream = Callable[[int], Any]  # the rank of the peer -> name of a stream of this rank


def one_stream(peer: int) -> Any:
    """One communicator for all messages of a rank: an NCCL group that was given its device."""
    return "all messages"


def a_pair(peer: int) -> Any:
    """A communicator for each pair of ranks."""
    return peer


def compute(peer: int) -> Any:
    """Messages that hold up the computation, as the first does that opens a pair's communicator."""
    return COMPUTE


COMPUTE = "compute"
_SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # of a whole rank's layers, in any unit


def order_of(name: str, pp: int, microbatches: int, stages_per_rank: int = 2) -> Order | None:
    """None where the schedule refuses such sizes."""
    looped = name in LOOPED
    schedule = LoopedSchedule(name, stages_per_rank=stages_per_rank) if looped else Schedule(name)
    refused = microbatch_problem(schedule, pp, microbatches)
    return None if refused else build_order(schedule, pp, microbatches)


class Deadlock(Exception):
    """Computations and messages that wait for each other."""


@dataclass(frozen=True)
class Message:
    """From a stage to the next ("F") or the one before ("B"); the stage is that which sends."""

    way: str
    stage: int
    microbatch: int


def makespan(
    ranks: Mapping[int, Sequence[Any]],
    place: Sequence[int],
    stream: Stream,
    message_seconds: float,
    waits_for_sends: bool = True,
    posts: Mapping[int, Mapping[int, Sequence[Any]]] | None = None,
) -> float:
    """Seconds from the first action to the end of the last one, of torch's actions of each rank.

    place: the rank of each stage. waits_for_sends: whether the computation of a rank waits where
    the order says so (2.15). posts: messages of skip connections, of each rank by the index of the
    action before which it starts them. Raises Deadlock.
    """
    needed: dict[Any, set[Any]] = defaultdict(set)  # (forward, stage, microbatch) -> its skips
    for started in (posts or {}).values():
        for skip in (skip for skips in started.values() for skip in skips):
            needed[skip.forward, skip.to, skip.mb].add(skip)
    after: dict[Any, set[Any]] = {}  # node -> nodes that must have ended before it
    seconds: dict[Any, float] = {}
    stages_per_rank = len(place) / len(ranks)
    for rank, actions in ranks.items():
        started = (posts or {}).get(rank, {})
        last: dict[Any, Any] = {}  # stream -> its last node
        awaited: set[Any] = set()  # what the next computation waits for besides

        def enter(node: Any, streams: set[Any], last: dict[Any, Any] = last) -> None:
            needs = after.setdefault(node, set())
            needs.update(last[name] for name in streams if name in last)

        def start(skips: Sequence[Any], last: dict[Any, Any] = last, enter: Any = enter) -> None:
            for skip in skips:
                peers = {place[skip.source], place[skip.to]} - {rank}  # noqa: B023
                seconds[skip] = message_seconds
                enter(skip, {*map(stream, peers), COMPUTE})
                last[stream(peers.pop())] = skip

        for index, action in enumerate(actions):
            start(started.get(index, ()))
            kind, stage, mb = (
                action.computation_type.name,
                action.stage_index,
                action.microbatch_index,
            )
            first, _, rest = kind.partition("_")
            if first in ("SEND", "RECV"):
                step = 1 if rest == "F" else -1
                peer = place[stage + step] if first == "SEND" else place[stage - step]
                node: Any = Message(rest, stage if first == "SEND" else stage - step, mb)
                seconds[node] = message_seconds
                enter(node, {stream(peer), COMPUTE})
                after[node] |= awaited
                last[stream(peer)] = node
            elif first == "WAIT" and rest.startswith("SEND"):
                if waits_for_sends:
                    awaited.add(Message(rest[-1], stage, mb))
            elif (letter := action.computation_type.value) in _SECONDS:
                node = (letter, stage, mb)
                seconds[node] = _SECONDS[letter] / stages_per_rank
                enter(node, {COMPUTE})
                after[node] |= awaited | _received(letter, stage, mb, place)
                after[node] |= needed[letter == "F", stage, mb] if letter != "W" else set()
                last[COMPUTE] = node
                awaited.clear()
        start(started.get(len(actions), ()))
    return _longest_path(after, seconds)


def _received(letter: str, stage: int, mb: int, place: Sequence[int]) -> set[Any]:
    """The message that a computation needs, where it comes from another rank."""
    if letter == "W":
        return set()
    way, source = ("F", stage - 1) if letter == "F" else ("B", stage + 1)
    other = 0 <= source < len(place) and place[source] != place[stage]
    return {Message(way, source, mb)} if other else set()


def _longest_path(after: Mapping[Any, set[Any]], seconds: Mapping[Any, float]) -> float:
    before: dict[Any, list[Any]] = defaultdict(list)
    left = {node: len(needs) for node, needs in after.items()}
    for node, needs in after.items():
        for need in needs:
            before[need].append(node)
    ready = [node for node, count in left.items() if not count]
    start, end = dict.fromkeys(after, 0.0), 0.0
    while ready:
        node = ready.pop()
        del left[node]
        done = start[node] + seconds[node]
        end = max(end, done)
        for other in before[node]:
            start[other] = max(start[other], done)
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    if left:
        raise Deadlock(", ".join(map(str, list(left)[:6])))
    return end
