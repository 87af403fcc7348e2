"""Heartbeats of the ranks: what each is doing. `hang.py` tells from them which one is stuck.

A rank rewrites run_dir/logs/rankN.heartbeat, a JSON object, regularly. It measures by its own
monotonic clock how long it has been in its present phase, and numbers its beats. A rank is alive if
its number changes between two reads: the clocks of two machines, or of a file server, may differ.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from titanlike.config import files
from titanlike.launch.failures import log_path

AFTER = "after"  # Beat.action once all actions of a schedule are done
DATA_THREAD = "data"  # name of the thread that makes the next batch
# functions in which a thread waits for another one
_THREADS = {"loader.one_ahead": DATA_THREAD, "writer.wait": "checkpoint_0"}
_FRAMES = 6  # of a stale rank's stack, innermost
_COMPUTING = ("/distributed/checkpoint/", "/distributed/tensor/")  # these do not wait for ranks
_JOIN_TIMEOUT = 2.0  # seconds to write the last beat
_READERS = 16  # threads that read the beats of many ranks


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


def read_beats(run_dir: Path, ranks: range) -> dict[int, Beat]:
    """The newest beat of each of these ranks that has written one."""

    def read(rank: int) -> Beat | None:
        try:
            return files.read_object(heartbeat_path(run_dir, rank), Beat)
        except (OSError, ValueError):  # missing, or of another version
            return None

    if len(ranks) <= _READERS:
        beats = [*map(read, ranks)]
    else:  # a file server answers many at a time
        with ThreadPoolExecutor(_READERS) as pool:
            beats = [*pool.map(read, ranks)]
    return {rank: beat for rank, beat in zip(ranks, beats, strict=True) if beat is not None}


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
    next batch or a save in the background, of the thread that makes it."""
    running = sys._current_frames()
    if (frame := running.get(thread)) is None:
        return "", "", False
    for inner, _ in islice(traceback.walk_stack(frame), _FRAMES):
        called = f"{Path(inner.f_code.co_filename).stem}.{inner.f_code.co_name}"
        others = (t.ident for t in threading.enumerate() if t.name == _THREADS.get(called))
        frame = next((running[ident] for ident in others if ident in running), frame)
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
        alone = frame.name == "wait_for_rank_0"
        return in_torch or alone or "store.wait(" in line or "store.get(" in line
    return False
