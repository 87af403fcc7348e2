"""Heartbeats: files in which each rank writes what it is doing; `hang.py` finds the stuck rank.

A rank rewrites run_dir/logs/rankN.heartbeat, a JSON object, regularly. It measures by its own
monotonic clock how long it has been in its current phase, and numbers its beats. A rank is alive if
the number changes between two reads; clocks are not compared, as those of machines and file servers
differ.
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

from titanlike.core.config import files
from titanlike.core.launch.failures import log_path

AFTER = "after"  # Beat.action once all actions of a schedule are done
DATA_THREAD = "data"  # name of the thread that prepares the next batch
# function in which a thread waits -> name of the thread that it waits for
_THREADS = {"copy_ahead.one_ahead": DATA_THREAD, "writer.wait": "checkpoint_0"}
_FRAMES = 6  # innermost frames of a stale rank's stack
_COMPUTING = ("/distributed/checkpoint/", "/distributed/tensor/")  # do not wait for ranks
_JOIN_TIMEOUT = 2.0  # seconds to write the last beat
_READERS = 16  # threads to read the beats of many ranks


@dataclass(frozen=True)
class Beat:
    """The content of rankN.heartbeat: what a rank is doing."""

    rank: int
    number: int  # counts up from 0
    time: float  # when written, seconds since the epoch by this machine's clock
    host: str
    pid: int
    step: int
    doing: str  # "build", "load", "data", "validation", "save": the phase of the job
    action: str  # of the schedule, "1F3"; "" before the first, "after" after the last
    seconds: float  # time without progress, by the monotonic clock
    frames: str = ""  # if stale: the innermost frames of its thread, as in a traceback
    at: str = ""  # the innermost frame: "model.py:12 in forward"
    waits: bool = False  # whether that frame waits for other ranks
    on_device: bool = False  # whether `action` is the device's, while Python is at `at`
    limit: float = 0.0  # seconds without progress that its phase allows; 0 = unlimited
    limit_key: str = ""  # config key of `limit`
    ended: str = ""  # reason of a last beat: "done", an exception's name, "no progress"


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return log_path(run_dir, rank).with_suffix(".heartbeat")


def read_beats(run_dir: Path, ranks: range) -> dict[int, Beat]:
    """Read the newest beat of each of these ranks that has written one."""

    def read(rank: int) -> Beat | None:
        try:
            return files.read_object(heartbeat_path(run_dir, rank), Beat)
        except (OSError, ValueError):  # missing, or written by a different version
            return None

    if len(ranks) <= _READERS:
        beats = [*map(read, ranks)]
    else:  # reading in parallel hides a file server's latency
        with ThreadPoolExecutor(_READERS) as pool:
            beats = [*pool.map(read, ranks)]
    return {rank: beat for rank, beat in zip(ranks, beats, strict=True) if beat is not None}


class Heartbeat:
    """A thread that writes `observe()` every `interval` seconds until `end` is called.

    A failed write is reported once and does not end the run.
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
    """`Beat.frames`, `Beat.at` and `Beat.waits` of a thread; if it waits for the thread that
    prepares the next batch or a background save, that thread's."""
    running = sys._current_frames()
    if (frame := running.get(thread)) is None:
        return "", "", False
    for inner, _ in islice(traceback.walk_stack(frame), _FRAMES):
        called = f"{Path(inner.f_code.co_filename).stem}.{inner.f_code.co_name}"
        others = (t.ident for t in threading.enumerate() if t.name == _THREADS.get(called))
        frame = next((running[ident] for ident in others if ident in running), frame)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES)
    position = f"{Path(stack[0].filename).name}:{stack[0].lineno} in {stack[0].name}"
    waits = _waits(stack)
    stack.reverse()
    return "".join(stack.format()), position, waits


def _waits(stack: traceback.StackSummary) -> bool:
    """Whether the innermost frame (the first) waits for other ranks: in a P2P receive, a
    collective, or the store."""
    for frame in stack:
        name = frame.filename.replace("\\", "/")
        if name.endswith("torch/_ops.py"):  # frames between a functional collective and its wait
            continue
        in_torch = "torch/distributed/" in name and not any(part in name for part in _COMPUTING)
        line = frame.line or ""
        polls = frame.name == "_poll" and name.endswith("launch/rendezvous.py")
        return in_torch or polls or "store.wait(" in line or "store.get(" in line
    return False
