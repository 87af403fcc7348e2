"""A rank's signs of life: run_dir/logs/rankN.heartbeat, one JSON object, rewritten all the time.

Each rank counts on its own monotonic clock for how long it has been where it is, and numbers its
beats. Whether a rank lives is told from a number that changes while one looks: the clocks of two
machines, or of a file server, need not agree.
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

from titanlike.launch.rank_log import log_path

_FRAMES = 6  # of a stale rank's stack, innermost
_COMPUTING = ("/distributed/checkpoint/", "/distributed/tensor/")  # no waits of their own
_LEAVE = 2.0  # seconds that the thread gets to write its last beat


@dataclass(frozen=True)
class Beat:
    """What a rank does."""

    rank: int
    number: int  # one more each time
    time: float  # of writing, seconds since the epoch, by this machine's clock
    host: str
    pid: int
    step: int
    doing: str  # "build", "load", "data", "validation", "save": the phase of the job
    action: str  # of the schedule, "1F3"; "" before the first, "after" once all are done
    since: float  # when it began with that, seconds since the epoch
    seconds: float  # the same as an age, by the monotonic clock
    frames: str = ""  # of a stale rank: the innermost ones of its thread, as in a traceback
    at: str = ""  # the innermost alone: "model.py:12 in forward"
    waits: bool = False  # whether that is a wait for other ranks
    ended: str = ""  # why there are no more beats: "done", an exception's name, "no progress"


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return log_path(run_dir, rank).with_suffix(".heartbeat")


def read_beats(run_dir: Path, world_size: int) -> dict[int, Beat]:
    """The newest beat of every rank that has left one."""
    beats = {}
    for rank in range(world_size):
        try:
            text = heartbeat_path(run_dir, rank).read_text(encoding="utf-8")
            beats[rank] = Beat(**json.loads(text))
        except (OSError, ValueError, TypeError):  # none, or of another version
            continue
    return beats


class Heartbeat:
    """A thread that writes what `look` returns every `interval` seconds, until `end`.

    A folder that is full or gone is told once and tried again: a run does not end by it.
    """

    def __init__(self, run_dir: Path, rank: int, interval: float, look: Callable[[], Beat]) -> None:
        self._path, self._interval, self._look = heartbeat_path(run_dir, rank), interval, look
        self._number = 0
        self._told = False
        self._why = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._thread.start()

    def end(self, why: str) -> None:
        """Write a last beat that says why there are no more. A second call does nothing."""
        if not self._ended.is_set():
            self._why = why
            self._ended.set()
        self._thread.join(_LEAVE)

    def _run(self) -> None:
        while True:
            last = self._ended.is_set()
            self._write(replace(self._look(), number=self._number, ended=self._why if last else ""))
            if last:
                return
            self._number += 1
            self._ended.wait(self._interval)

    def _write(self, beat: Beat) -> None:
        unfinished = self._path.with_suffix(".heartbeat.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(asdict(beat)) + "\n", encoding="utf-8")
            unfinished.replace(self._path)
        except OSError as error:
            if not self._told:
                self._told = True
                print(f"heartbeat: {error}; training goes on", file=sys.stderr, flush=True)


def innermost(thread: int) -> tuple[str, str, bool]:
    """Where a thread of this process is: `Beat.frames`, `Beat.at` and `Beat.waits`."""
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return "", "", False
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES)
    inner = stack[0]
    at = f"{Path(inner.filename).name}:{inner.lineno} in {inner.name}"
    stack.reverse()
    return "".join(stack.format()), at, _waits(stack)


def in_debugger(thread: int) -> bool:
    """Whether a person looks at a thread of this process, with pdb or an editor's debugger."""
    frame = sys._current_frames().get(thread)
    files = (
        [Path(f.f_code.co_filename).name for f, _ in traceback.walk_stack(frame)] if frame else ()
    )
    return any(name == "bdb.py" or name.startswith("pydevd") for name in files)


def _waits(stack: traceback.StackSummary) -> bool:
    """Whether the innermost frame waits for other ranks: a message, a collective, the store."""
    for frame in reversed(stack):
        name = frame.filename.replace("\\", "/")
        if name.endswith("torch/_ops.py"):  # between a functional collective and its wait
            continue
        of_torch = "torch/distributed/" in name and not any(part in name for part in _COMPUTING)
        line = frame.line or ""
        return of_torch or "store.wait(" in line or "store.get(" in line
    return False
