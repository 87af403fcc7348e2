"""Explain a hang from heartbeats: which rank is stuck where, and which ranks wait for it."""

from __future__ import annotations

import re
import time

from titanlike.core.launch.heartbeat import AFTER, Beat

_MAX_LISTED = 4  # ranks listed per state; the others are counted
# states of a rank, the likeliest cause of a hang first. If all wait for each other, none is blamed.
_UNRESPONSIVE, _ENDED, _NO_HEARTBEAT, _BUSY, _AFTER, _WAITING, _RUNNING = range(7)
_MORE = {  # "3 more ..."
    _UNRESPONSIVE: "have not responded",
    _BUSY: "are busy, too",
    _AFTER: "are there, too",
    _WAITING: "wait",
    _RUNNING: "are making progress",
    _ENDED: "have ended",
}
_ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "UNSHARD": "all-gather of the parameters",
    "RESHARD": "resharding of the parameters",
    "REDUCE_GRAD": "gradient reduction",
    "WAIT_REDUCE_GRAD": "gradient reduction",
    "SEND_F": "sending activations",
    "RECV_F": "receiving activations",
    "SEND_B": "sending gradients",
    "RECV_B": "receiving gradients",
    "WAIT_SEND_F": "waiting for sent activations",
    "WAIT_SEND_B": "waiting for sent gradients",
}


def explain(
    own: Beat, before: dict[int, Beat], now: dict[int, Beat], world_size: int, limit: str
) -> tuple[str, str]:
    """Return (error text, innermost frames of the rank named first).

    own: the beat of the rank that timed out. before, now: beats of all ranks, read so far apart
    that every live rank has written a new one in between. limit: e.g. "launch.step_timeout=300".
    """
    now = {**now, own.rank: own}
    by_state: dict[int, list[int]] = {}
    for rank in range(world_size):
        by_state.setdefault(_state(before.get(rank), now.get(rank), own), []).append(rank)
    for ranks in by_state.values():  # the furthest behind first, as the others may wait for it
        ranks.sort(key=lambda rank: (now[rank].step, -now[rank].seconds) if rank in now else ())
    parts = [_describe_ranks(state, by_state[state], now, own) for state in sorted(by_state)]
    if min(by_state) >= _WAITING and world_size > 1:
        parts.insert(0, "no rank is known to be stuck, all wait for each other")
    first = by_state[min(by_state)][0]
    frames = now[first].frames if first in now else ""
    if frames and world_size > 1:
        frames = f"rank {first}:\n{frames}"
    text = f"no progress for {own.seconds:.0f} s in {_phase(own)} ({limit}): {'; '.join(parts)}"
    return text, frames


def unresponsive(before: dict[int, Beat], now: dict[int, Beat], own: int) -> list[Beat]:
    """The beats of ranks other than `own` that are not newer in `now` than in `before`."""
    return [b for rank, b in now.items() if rank != own and _is_unresponsive(before.get(rank), b)]


def _is_unresponsive(before: Beat | None, now: Beat) -> bool:
    same = before is not None and (before.pid, before.number) == (now.pid, now.number)
    return same and not now.ended


def _state(before: Beat | None, now: Beat | None, own: Beat) -> int:
    if now is None:
        return _NO_HEARTBEAT
    if now.ended and now.ended != "no progress":
        return _ENDED
    if now.rank != own.rank:
        if _is_unresponsive(before, now):
            return _UNRESPONSIVE
        if not now.frames:
            return _RUNNING
    if now.waits:
        return _WAITING
    return _AFTER if now.action == AFTER else _BUSY


def _describe_ranks(state: int, ranks: list[int], beats: dict[int, Beat], own: Beat) -> str:
    listed, more = ranks[:_MAX_LISTED], len(ranks) - _MAX_LISTED
    if state == _NO_HEARTBEAT:
        some = ", ".join(map(str, listed)) + (", ..." if more > 0 else "")
        return f"rank {some} has written no heartbeat (is run_dir the same on all machines?)"
    texts = [f"rank {rank} {_describe_rank(state, beats[rank], own)}" for rank in listed]
    return "; ".join(texts + ([f"{more} more {_MORE[state]}"] if more > 0 else []))


def _describe_rank(state: int, beat: Beat, own: Beat) -> str:
    """Describe a rank; the text follows "rank 3"."""
    where, phase = _where(beat), f" of {_phase(beat)}" if beat.step or beat.action else ""
    if where == f"in {beat.doing}" and beat.doing != "data":  # avoid repeating the phase
        phase = f" at step {beat.step}" if beat.step else ""
    if state == _UNRESPONSIVE:
        age = max(0.0, time.time() - beat.time)
        process = f"({beat.host}, pid {beat.pid})"
        return f"{process} has not responded for {age:.0f} s, last {where}{phase}"
    if (beat.step, beat.doing) != (own.step, own.doing):
        where += phase
    if state == _ENDED:
        return f"has ended ({beat.ended}) {where}"
    if state == _RUNNING:
        return f"is making progress, {where}"
    if state == _WAITING:
        return f"waits {where}"
    where += " on its device" if beat.on_device else ""
    python = ", Python" if beat.on_device else ","
    position = f"{python} at {beat.at}" if beat.at else ""
    return f"has been {where} for {beat.seconds:.0f} s{position}"


def _where(beat: Beat) -> str:
    """The position within the phase: "in data", "in 1F3 (forward of stage 1, microbatch 3)"."""
    if beat.action == AFTER:
        return "after the schedule (gradient norm, update)"
    if not beat.action:
        begins = beat.doing == "data" and beat.waits
        return "before the first action" if begins else f"in {beat.doing}"
    if (parts := read_action(beat.action)) is None:
        return f"in {beat.action}"
    action, stage, microbatch = parts
    suffix = f", microbatch {microbatch}" if microbatch else ""
    return f"in {beat.action} ({action} of stage {stage}{suffix})"


def _phase(beat: Beat) -> str:
    """The phase in words: "step 12", "save at step 12" or "build"."""
    if beat.doing == "data":
        return f"step {beat.step}"
    return f"{beat.doing} at step {beat.step}" if beat.step else beat.doing


def read_action(text: str) -> tuple[str, str, str] | None:
    """Parse torch's notation 1F3 to (words, stage, microbatch or ""); None if it is invalid."""
    match = re.fullmatch(r"([0-9]+)([A-Z_]+?)([0-9]*)", text)
    if match is None:
        return None
    stage, action, microbatch = match.groups()
    return _ACTIONS.get(action, action), stage, microbatch
