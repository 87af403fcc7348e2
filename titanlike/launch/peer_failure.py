"""Lets the training thread out of a GPU's collective once another rank has failed.

A rank that fails under gloo closes its connections, and its peers' collectives raise. Under NCCL
they wait on: the thread sits in a call that waits for the GPU, and the GPU waits for the peer. So

1. PeerFailed is raised in the training thread, which takes effect when that call returns, before
   anything is done with what it returns, which may be garbage;
2. the collectives are aborted, and the call returns;
3. the thread leaves the job as after any error. If it does not, the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import traceback
from collections.abc import Callable

from titanlike.launch.failures import Failure, PeerFailed, write_failure
from titanlike.launch.signals import exit_now
from titanlike.launch.worker import Worker

_LEAVE_TIMEOUT = 15.0  # seconds for the training thread to leave the job


def let_out(
    thread: int, abort: Callable[[], object], ended: threading.Event, worker: Worker
) -> None:
    """Raise PeerFailed in `thread`, which waits for other ranks, and `abort` what it waits for.

    Ends the process if `ended` is not set soon afterwards: by then the thread is to be out.
    """

    def give_up() -> None:
        if not ended.is_set():
            with contextlib.suppress(OSError):
                text = f"{PeerFailed()}, and this one waited on for {_LEAVE_TIMEOUT:.0f} s"
                write_failure(worker.run_dir, Failure(worker.rank, text, "", True, time.time()))
            exit_now(1)

    deadline = threading.Timer(_LEAVE_TIMEOUT, give_up)
    deadline.daemon = True
    deadline.start()
    _raise_in(thread, PeerFailed)
    try:
        abort()
    except Exception:  # as of a group that the thread is closing itself
        traceback.print_exc()
    ended.wait(_LEAVE_TIMEOUT)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception in another thread, as soon as it executes Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
