"""A hang in words: which rank is stuck where, and who waits for it. Plain data, no threads.

The ranks that the others wait for come first: one that does not answer at all, then one that is
busy with something of its own, then one at the end of a step. Where all of them wait for messages,
nobody is blamed.
"""

from __future__ import annotations

import re
import time

from titanlike.launch.heartbeat import Beat

AFTER = "after"  # Beat.action once all actions of a schedule are done

_MOST = 4  # ranks that are named in a list; of the others their number
_SILENT, _ENDED, _ABSENT, _BUSY, _AFTER, _WAITING, _MOVING = range(7)
_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "UNSHARD": "gathering parameters",
    "RESHARD": "freeing parameters",
    "REDUCE_GRAD": "reducing gradients",
    "WAIT_REDUCE_GRAD": "reducing gradients",
    "SEND_F": "sending activations",
    "RECV_F": "asking for activations",
    "SEND_B": "sending gradients",
    "RECV_B": "asking for gradients",
    "WAIT_SEND_F": "having sent activations",
    "WAIT_SEND_B": "having sent gradients",
}

_MORE = {  # what so many more ranks do
    _SILENT: "have not answered",
    _BUSY: "are busy, too",
    _AFTER: "are there, too",
    _WAITING: "wait",
    _MOVING: "go on",
    _ENDED: "have ended",
}


def explain(
    own: Beat, before: dict[int, Beat], now: dict[int, Beat], world_size: int, limit: str
) -> tuple[str, str]:
    """A hang as a sentence, and the innermost frames of the rank it names first.

    own: the rank that noticed. before, now: all ranks' beats, read some time apart in which every
    living rank writes a new one. limit: "launch.step_timeout=300".
    """
    now = {**now, own.rank: own}
    kinds: dict[int, list[int]] = {}
    for rank in range(world_size):
        kinds.setdefault(_kind(before.get(rank), now.get(rank), own), []).append(rank)
    for ranks in kinds.values():  # the furthest behind first: the others can only wait for it
        ranks.sort(key=lambda rank: (now[rank].step, -now[rank].seconds) if rank in now else ())
    parts = [_list(kind, kinds[kind], now, own) for kind in sorted(kinds)]
    if min(kinds) >= _WAITING and world_size > 1:
        parts.insert(0, "no rank is known to be stuck, all wait for each other")
    first = kinds[min(kinds)][0]
    frames = now[first].frames if first in now else ""
    if frames and world_size > 1:
        frames = f"rank {first}:\n{frames}"
    text = f"no progress for {own.seconds:.0f} s in {_phase(own)} ({limit}): {'; '.join(parts)}"
    return text, frames


def silent(before: dict[int, Beat], now: dict[int, Beat], own: int) -> list[Beat]:
    """The ranks (but for `own`) that have not written a beat between `before` and `now`."""
    return [beat for rank, beat in now.items() if rank != own and _same(before.get(rank), beat)]


def _same(before: Beat | None, now: Beat) -> bool:
    same = before is not None and (before.pid, before.number) == (now.pid, now.number)
    return same and not now.ended


def _kind(before: Beat | None, now: Beat | None, own: Beat) -> int:
    if now is None:
        return _ABSENT
    if now.ended and now.ended != "no progress":
        return _ENDED
    if now.rank == own.rank:
        pass
    elif _same(before, now):
        return _SILENT
    elif not now.frames:
        return _MOVING
    if now.waits:
        return _WAITING
    return _AFTER if now.action == AFTER else _BUSY


def _list(kind: int, ranks: list[int], beats: dict[int, Beat], own: Beat) -> str:
    if kind == _ABSENT:
        some = ", ".join(map(str, ranks[:_MOST])) + (", ..." if len(ranks) > _MOST else "")
        return f"of rank {some} there is no heartbeat (is run_dir the same on all machines?)"
    texts = [f"rank {rank} {_state(kind, beats[rank], own)}" for rank in ranks[:_MOST]]
    if len(ranks) > _MOST:
        texts.append(f"{len(ranks) - _MOST} more {_MORE[kind]}")
    return "; ".join(texts)


def _state(kind: int, beat: Beat, own: Beat) -> str:
    """What follows "rank 3"."""
    if kind == _SILENT:
        age = max(0.0, time.time() - beat.time)
        name = f"({beat.host}, pid {beat.pid})"
        return f"{name} has not answered for {age:.0f} s, last {_where(beat)}{_of(beat)}"
    other = (beat.step, beat.doing) != (own.step, own.doing)
    where = _where(beat) + (_of(beat) if other else "")
    if kind == _ENDED:
        return f"has ended ({beat.ended}) {where}"
    if kind == _MOVING:
        return f"goes on, {where}"
    if kind == _WAITING:
        return f"waits {where}"
    return f"has been {where} for {beat.seconds:.0f} s" + (f", at {beat.at}" if beat.at else "")


def _where(beat: Beat) -> str:
    """Where it is in its phase: "in data", "in 1F3 (forward of stage 1, microbatch 3)"."""
    if beat.action == AFTER:
        return "after the schedule (gradient norm, update)"
    if not beat.action:
        return (
            "before the first action" if beat.doing == "data" and beat.waits else f"in {beat.doing}"
        )
    match = re.fullmatch(r"([0-9]+)([A-Z_]+?)([0-9]*)", beat.action)
    if not match:
        return f"in {beat.action}"
    stage, kind, mb = match.groups()
    mb = f", microbatch {mb}" if mb else ""
    return f"in {beat.action} ({_KINDS.get(kind, kind)} of stage {stage}{mb})"


def _of(beat: Beat) -> str:
    """ " of step 12"; nothing for what is no part of a step."""
    return f" of {_phase(beat)}" if beat.step or beat.action else ""


def _phase(beat: Beat) -> str:
    """ "step 12", or what is done beside the steps."""
    if beat.doing == "data":
        return f"step {beat.step}"
    return f"{beat.doing} at step {beat.step}" if beat.step else beat.doing
