"""Heartbeats of a rank: run_dir/logs/rankN.heartbeat, a JSON object that is rewritten regularly.

Each rank measures by its own monotonic clock how long it has been in its present phase, and numbers
its beats. A rank is alive if its number changes between two reads: the clocks of two machines, or
of a file server, may differ.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from titanlike.config import files
from titanlike.launch.rank_log import log_path

_FRAMES = 6  # of a stale rank's stack, innermost
_COMPUTING = ("/distributed/checkpoint/", "/distributed/tensor/")  # these do not wait for ranks
_JOIN_TIMEOUT = 2.0  # seconds to write the last beat
_WAITS_FOR_DATA = "titanlike/data/ahead.py"  # the innermost frame of a thread that waits for it
DATA_THREAD = "data"  # name of the thread that makes the next batch, see data/ahead.py


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
        self._number = 0
        self._reported = False
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
        while True:
            last = self._ended.is_set()
            ended = self._reason if last else ""
            self._write(replace(self._observe(), number=self._number, ended=ended))
            if last:
                return
            self._number += 1
            self._ended.wait(self._interval)

    def _write(self, beat: Beat) -> None:
        unfinished = self._path.with_suffix(".heartbeat.tmp")
        try:
            self._path.parent.mkdir(exist_ok=True)  # not run_dir, which has been deleted
            unfinished.write_text(json.dumps(asdict(beat)) + "\n", encoding="utf-8")
            unfinished.replace(self._path)
        except OSError as error:
            if not self._reported:
                self._reported = True
                print(f"heartbeat: {error}; training continues", file=sys.stderr, flush=True)


def innermost_frames(thread: int) -> tuple[str, str, bool]:
    """`Beat.frames`, `Beat.at` and `Beat.waits` of a thread of this process; where it waits for the
    next batch, of the thread that makes it."""
    running = sys._current_frames()
    frame: FrameType | None = running.get(thread)
    if frame is None:
        return "", "", False
    if frame.f_code.co_filename.endswith(_WAITS_FOR_DATA):
        data = (other.ident for other in threading.enumerate() if other.name == DATA_THREAD)
        frame = next((running[ident] for ident in data if ident in running), frame)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES)
    inner = stack[0]
    at = f"{Path(inner.filename).name}:{inner.lineno} in {inner.name}"
    stack.reverse()
    return "".join(stack.format()), at, _waits(stack)


def in_debugger(thread: int) -> bool:
    """Whether a thread of this process is in pdb or an editor's debugger."""
    frame = sys._current_frames().get(thread)
    stack = traceback.walk_stack(frame) if frame else ()
    names = (Path(frame.f_code.co_filename).name for frame, _ in stack)
    return any(name == "bdb.py" or name.startswith("pydevd") for name in names)


def _waits(stack: traceback.StackSummary) -> bool:
    """Whether the innermost frame waits for other ranks: for a message, a collective, the store."""
    for frame in reversed(stack):
        name = frame.filename.replace("\\", "/")
        if name.endswith("torch/_ops.py"):  # between a functional collective and its wait
            continue
        in_torch = "torch/distributed/" in name and not any(part in name for part in _COMPUTING)
        line = frame.line or ""
        return in_torch or "store.wait(" in line or "store.get(" in line
    return False
