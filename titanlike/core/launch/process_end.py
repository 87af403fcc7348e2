"""End a process quickly, and control when garbage is collected."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import io
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


def leave(code: int | str | None) -> NoReturn:
    """`sys.exit(code)` without the interpreter's teardown, which takes a second with torch.

    Threads are joined, exit functions called (W&B's, logging's, a data loader's), and streams
    flushed, including files that the user's code has left open. A caller outside this package (a
    debugger, pytest, coverage) gets its SystemExit. Signals no longer change the exit code.
    """
    if not _is_whole_process(sys._getframe(1)):
        sys.exit(code)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    status = (code or 0) & 0xFF
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(status))
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at exit
    atexit._run_exitfuncs()
    _flush_files()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the reader has closed the pipe: the interpreter reports it
        sys.exit(code)
    os._exit(status)


def _flush_files() -> None:
    """Flush the buffers of open files, as Python's teardown would."""
    if not _has_files_to_write():
        return  # scanning all objects takes 70 ms
    gc.unfreeze()
    kinds = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
    files = [each for each in gc.get_objects() if type(each) in kinds]
    for file in sorted(files, key=lambda file: kinds.index(type(file))):  # text layers first
        with contextlib.suppress(OSError, ValueError):  # closed
            file.flush()


def _has_files_to_write() -> bool:
    """Whether a file other than the standard streams is open for writing."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return True
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            regular = descriptor > 2 and stat.S_ISREG(os.fstat(descriptor).st_mode)
            if regular and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


def _is_whole_process(frame: FrameType | None) -> bool:
    """Whether the stack has only frames of this package and of Python itself."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module not in ("__main__", "runpy") and module.partition(".")[0] != "titanlike":
            return False
        if module == "__main__" and frame.f_back is not None:
            outer = str(frame.f_back.f_globals.get("__name__"))
            if outer != "runpy" and frame.f_code.co_name == "<module>":
                return False
        frame = frame.f_back
    return True


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context without garbage collection: imports and a build make many objects and hardly any
    garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def collected_once_built() -> Iterator[None]:
    """A context for a job: garbage collection is off until the job calls `built`."""
    if gc.isenabled():  # not this process' first job: collect what the last one has left
        gc.collect()
    gc.disable()
    gc.freeze()  # later collections skip modules, which are never garbage
    try:
        yield
    finally:
        gc.enable()


def built() -> None:
    """Collect the garbage of building a job, and enable collection."""
    if not gc.isenabled():
        gc.collect()
        gc.enable()
