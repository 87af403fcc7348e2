"""Heartbeats of the ranks, and what they say of a hang: which rank is stuck where, and who waits
for it.

A rank rewrites run_dir/logs/rankN.heartbeat, a JSON object, regularly. It measures by its own
monotonic clock how long it has been in its present phase, and numbers its beats. A rank is alive if
its number changes between two reads: the clocks of two machines, or of a file server, may differ.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titanlike.config import files
from titanlike.launch.failures import log_path

AFTER = "after"  # Beat.action once all actions of a schedule are done
DATA_THREAD = "data"  # name of the thread that makes the next batch
_DATA_WAIT = "one_ahead"  # the function in which a thread waits for it
_FRAMES = 6  # of a stale rank's stack, innermost
_COMPUTING = ("/distributed/checkpoint/", "/distributed/tensor/")  # these do not wait for ranks
_JOIN_TIMEOUT = 2.0  # seconds to write the last beat
_MAX_LISTED = 4  # ranks listed for a state; the others are counted
# states of a rank, the likeliest cause of a hang first: those that do not respond, those busy with
# work of their own, those at the end of a step. If all wait for messages, no rank is blamed.
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


def read_action(text: str) -> tuple[str, str, str] | None:
    """(words, stage, microbatch or "") of an action as torch writes it, 1F3; None if it is none."""
    match = re.fullmatch(r"([0-9]+)([A-Z_]+?)([0-9]*)", text)
    if match is None:
        return None
    stage, action, microbatch = match.groups()
    return _ACTIONS.get(action, action), stage, microbatch


@dataclass(frozen=True)
class Beat:
    """What a rank is doing, as in rankN.heartbeat."""

    rank: int
    number: int  # counts up from 0
    time: float  # of writing, seconds since the epoch, by this machine's clock
    host: str
    pid: int
    step: int
    doing: str  # "build", "load", "data", "validation", "save": the phase of the job
    action: str  # of the schedule, "1F3"; "" before the first, "after" once all are done
    since: float  # when that began, seconds since the epoch
    seconds: float  # how long ago that was, by the monotonic clock
    frames: str = ""  # of a stale rank: the innermost frames of its thread, as in a traceback
    at: str = ""  # the innermost frame: "model.py:12 in forward"
    waits: bool = False  # whether that frame waits for other ranks
    on_device: bool = False  # whether that is what its device does, behind Python at `at`
    limit: float = 0.0  # seconds that its phase allows without progress; 0 = unlimited
    limit_key: str = ""  # the key of the config that says so
    ended: str = ""  # why this is the last beat: "done", an exception's name, "no progress"


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return log_path(run_dir, rank).with_suffix(".heartbeat")


def read_beats(run_dir: Path, world_size: int) -> dict[int, Beat]:
    """The newest beat of every rank that has written one."""
    beats = {}
    for rank in range(world_size):
        try:
            beats[rank] = files.read_object(heartbeat_path(run_dir, rank), Beat)
        except (OSError, ValueError):  # missing, or of another version
            continue
    return beats


class Heartbeat:
    """A thread that writes what `observe` returns every `interval` seconds, until `end`.

    A write that fails is reported once and does not end the run.
    """

    def __init__(
        self, run_dir: Path, rank: int, interval: float, observe: Callable[[], Beat]
    ) -> None:
        self._path, self._interval, self._observe = heartbeat_path(run_dir, rank), interval, observe
        self._reason = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._thread.start()

    def end(self, reason: str) -> None:
        """Write a last beat with `reason` in `Beat.ended`. A second call does nothing."""
        if not self._ended.is_set():
            self._reason = reason
            self._ended.set()
        self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        number, reported, last = 0, False, False
        while not last:
            last = self._ended.is_set()
            beat = replace(self._observe(), number=number, ended=self._reason if last else "")
            try:
                self._path.parent.mkdir(exist_ok=True)  # not run_dir, which has been deleted
                files.atomic_write_text(self._path, json.dumps(asdict(beat)) + "\n", sync=False)
            except OSError as error:
                if not reported:
                    print(f"heartbeat: {error}; training continues", file=sys.stderr, flush=True)
                reported = True
            number += 1
            self._ended.wait(self._interval)


def innermost_frames(thread: int) -> tuple[str, str, bool]:
    """`Beat.frames`, `Beat.at` and `Beat.waits` of a thread of this process; where it waits for the
    next batch, of the thread that makes it."""
    running = sys._current_frames()
    if (frame := running.get(thread)) is None:
        return "", "", False
    if frame.f_code.co_name == _DATA_WAIT:
        data = (other.ident for other in threading.enumerate() if other.name == DATA_THREAD)
        frame = next((running[ident] for ident in data if ident in running), frame)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES)
    at = f"{Path(stack[0].filename).name}:{stack[0].lineno} in {stack[0].name}"
    waits = _waits(stack)
    stack.reverse()
    return "".join(stack.format()), at, waits


def _waits(stack: traceback.StackSummary) -> bool:
    """Whether the innermost frame, the first, waits for other ranks: for a message, a collective,
    the store."""
    for frame in stack:
        name = frame.filename.replace("\\", "/")
        if name.endswith("torch/_ops.py"):  # between a functional collective and its wait
            continue
        in_torch = "torch/distributed/" in name and not any(part in name for part in _COMPUTING)
        line = frame.line or ""
        return in_torch or "store.wait(" in line or "store.get(" in line
    return False


def explain(
    own: Beat, before: dict[int, Beat], now: dict[int, Beat], world_size: int, limit: str
) -> tuple[str, str]:
    """The error text, and the innermost frames of the rank that it names first.

    own: the rank that timed out. before, now: the beats of all ranks, read so far apart that every
    rank that is alive has written a new one in between. limit: "launch.step_timeout=300".
    """
    now = {**now, own.rank: own}
    by_state: dict[int, list[int]] = {}
    for rank in range(world_size):
        by_state.setdefault(_state(before.get(rank), now.get(rank), own), []).append(rank)
    for ranks in by_state.values():  # the furthest behind first: the others can only wait for it
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
    """Beats of the ranks other than `own` that have not written one between `before` and `now`."""
    return [b for rank, b in now.items() if rank != own and _is_unresponsive(before.get(rank), b)]


def _is_unresponsive(before: Beat | None, now: Beat) -> bool:
    same = before is not None and (before.pid, before.number) == (now.pid, now.number)
    return same and not now.ended


def _state(before: Beat | None, now: Beat | None, own: Beat) -> int:
    if now is None:
        return _NO_HEARTBEAT
    if now.ended and now.ended != "no progress":
        return _ENDED
    if now.rank == own.rank:
        pass
    elif _is_unresponsive(before, now):
        return _UNRESPONSIVE
    elif not now.frames:
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
    """The words after "rank 3"."""
    where, of = _where(beat), f" of {_phase(beat)}" if beat.step or beat.action else ""
    if state == _UNRESPONSIVE:
        age = max(0.0, time.time() - beat.time)
        process = f"({beat.host}, pid {beat.pid})"
        return f"{process} has not responded for {age:.0f} s, last {where}{of}"
    if (beat.step, beat.doing) != (own.step, own.doing):
        where += of
    if state == _ENDED:
        return f"has ended ({beat.ended}) {where}"
    if state == _RUNNING:
        return f"is making progress, {where}"
    if state == _WAITING:
        return f"waits {where}"
    where += " on its device" if beat.on_device else ""
    python = ", Python" if beat.on_device else ","
    at = f"{python} at {beat.at}" if beat.at else ""
    return f"has been {where} for {beat.seconds:.0f} s{at}"


def _where(beat: Beat) -> str:
    """Position within the phase: "in data", "in 1F3 (forward of stage 1, microbatch 3)"."""
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
    """ "step 12", "save at step 12" or "build"."""
    if beat.doing == "data":
        return f"step {beat.step}"
    return f"{beat.doing} at step {beat.step}" if beat.step else beat.doing
