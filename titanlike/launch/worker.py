"""One rank of a job, whichever launcher started it.

1. Its output goes to run_dir/logs/rankN.log.
2. It waits until all ranks of the job have started; missing ones are named.
3. It calls the job's function, in which all ranks may meet at further points (`barrier`).
4. An error is written to a file before any cleanup.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from titanlike.config.credentials import redact
from titanlike.config.errors import ConfigError, some_names
from titanlike.config.imports import import_object
from titanlike.config.parse import parse, to_plain
from titanlike.config.schema import Config
from titanlike.launch.failures import (
    Failure,
    clear_failures,
    describe,
    log_path,
    peer_failed,
    write_failure,
)
from titanlike.launch.process_end import collected_once_built
from titanlike.launch.signals import Interrupted, StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

_NAMED = 16  # missing ranks that an error names


@dataclass(frozen=True)
class Job:
    """What every rank gets as JSON: a function by its import path (`package.module:function`), and
    its arguments."""

    function: str
    config: Config
    run_dir: Path  # absolute
    overrides: list[str]  # of the command line
    started: float = field(default_factory=time.time)  # seconds since the epoch; for max_time

    def to_json(self) -> str:
        plain = {"config": to_plain(self.config), "run_dir": str(self.run_dir)}
        return json.dumps(vars(self) | plain)

    @classmethod
    def from_json(cls, text: str) -> Job:
        plain = json.loads(text)
        config, problems = parse(plain["config"])
        if problems:  # the sender runs another version of this program
            raise ConfigError(problems)
        return cls(**{**plain, "config": config, "run_dir": Path(plain["run_dir"])})


@dataclass(frozen=True)
class Worker:
    """This process as a rank of a job."""

    rank: int
    world_size: int
    local_rank: int  # on this machine
    local_world_size: int
    run_dir: Path  # absolute
    store: Store | None  # for this job alone; None for a job of one process
    overrides: list[str]
    stop_request: StopRequest = field(default_factory=StopRequest)
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # until its end
    one_machine: bool = False  # whether all ranks are known to be on this one
    # in the process that reports the job: reports a hang, which no exception can end
    report_failure: Callable[[Failure], None] | None = None
    callbacks: tuple[Any, ...] = ()  # of a program that trains here, see `titanlike.library`

    def notify(self, event: str, *values: Any) -> None:
        """Call what the callbacks have for an event: on_EVENT(*values)."""
        for callback in self.callbacks:
            if (function := getattr(callback, f"on_{event}", None)) is not None:
                function(*values)


def run_job(job: Job, worker: Worker) -> dict[str, Any]:
    """Call the job's function on this rank. Writes its error to the rank's log and error file."""
    environment = dict(os.environ)
    if worker.one_machine:  # gloo and NCCL need no other interface to listen on
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=f"={loopback}")
    with collected_once_built(), _logged(job.run_dir, worker.rank) as log:
        try:
            machine = socket.gethostname()
            with contextlib.suppress(OSError):  # containers number their processes separately
                machine += f"/{os.stat('/proc/self/ns/pid').st_ino}"
            pids = start_together(worker, machine, job.config.launch.timeout)
            worker.stop_request.started = job.started
            worker.stop_request.peer_failed = partial(_peer_ended, job.run_dir, worker.rank, pids)
            function = import_object(job.function.replace(":", "."))
            return function(job.config, worker) or {}
        except (Interrupted, KeyboardInterrupt):
            raise
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk must not hide the error
                write_failure(job.run_dir, describe(worker.rank, error))
                log.write(redact(traceback.format_exc()))
            raise
        finally:
            worker.resources.close()
            os.environ.clear()
            os.environ.update(environment)


def run_alone(
    job: Job,
    stop: StopRequest,
    report_failure: Callable[[Failure], None],
    callbacks: tuple[Any, ...] = (),
) -> dict[str, Any]:
    """Run a job of one rank in this process. Returns what its function does. Raises JobFailed, or
    Interrupted.

    report_failure, callbacks: see Worker.
    """
    clear_failures(job.run_dir)
    worker = Worker(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        run_dir=job.run_dir,
        store=None,
        overrides=job.overrides,
        stop_request=stop,
        one_machine=True,
        report_failure=report_failure,
        callbacks=callbacks,
    )
    try:
        return run_job(job, worker)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None
    except Exception as error:
        raise describe(0, error).to_job_failed(job.run_dir, 1) from error
    finally:
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_initialized():  # the job failed; a sweep's next one initializes its own
                dist.destroy_process_group()


class BarrierTimeout(RuntimeError):
    """Some ranks did not reach a barrier in time."""


def barrier(
    worker: Worker, name: str, timeout: float, message: str = "", listens: bool = False
) -> dict[int, str]:
    """Wait for all ranks at a named point of a job; returns the message of each rank that has one.

    name: new in this job. listens: whether this rank wants the messages; else it gets none.
    Raises BarrierTimeout after `timeout` seconds, with the ranks that are missing.

    The store is one process for all ranks. So a rank never asks for the others one by one: each
    appends to one value, and the last to arrive reads it and publishes what they said in the key
    that all wait for. A rank makes at most five requests, however many ranks there are, and reads
    next to nothing where the others have nothing to say.
    """
    store, rank = worker.store, worker.rank
    if store is None:
        return {rank: message} if message and listens else {}
    arrived, complete = f"{name}/arrived", f"{name}/complete"
    # torch's stub lacks `append`
    store.append(arrived, f"{json.dumps([rank, message])},")  # type: ignore[attr-defined]
    if store.add(f"{name}/count", 1) == worker.world_size:
        messages = {other: text for other, text in _arrived(store, arrived).items() if text}
        store.set(complete, json.dumps([*messages.items()]))
        return messages if listens else {}
    try:
        store.wait([complete], timedelta(seconds=timeout))
    except RuntimeError:
        missing = sorted({*range(worker.world_size)} - _arrived(store, arrived).keys())
        who = f"rank {in_words(missing)} did not reach"
        if not missing:
            who = "a rank ended while it reached"
        raise BarrierTimeout(
            f"{who} the job's {name} in {timeout:g} s (launch.timeout); see their logs, and check "
            "that their machines are up"
        ) from None
    return dict(json.loads(store.get(complete))) if listens else {}


def _arrived(store: Store, key: str) -> dict[int, str]:
    return dict(json.loads(f"[{store.get(key).decode().rstrip(',')}]"))


def in_words(ranks: list[int]) -> str:
    """ "1, 2, 3", or the first of many and the number of the others."""
    return some_names([*map(str, ranks)], _NAMED)


def start_together(worker: Worker, machine: str, timeout: float) -> list[int]:
    """Wait for all ranks to start; the process ids of those on this machine.

    What a rank reads does not grow with the number of machines.
    """
    if worker.store is None:
        return [os.getpid()]
    key = f"start/of/{machine}"
    worker.store.append(key, f"{os.getpid()}\n")  # type: ignore[attr-defined]  # as above
    barrier(worker, "start", timeout)
    return [int(pid) for pid in worker.store.get(key).decode().splitlines()]


def _peer_ended(run_dir: Path, rank: int, pids: list[int]) -> bool:
    """Whether another rank failed or was killed: otherwise none ends before the last barrier.

    pids: of the ranks on this machine.
    """
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it exists, but is another user's
            continue
    return peer_failed(run_dir, rank)


@contextlib.contextmanager
def _logged(run_dir: Path, rank: int) -> Iterator[TextIO]:
    """A context in which this process' output goes to the rank's log file, which is yielded.

    Python's output of rank 0 goes to the console, too, and the terminal stays a terminal. On the
    others the file replaces the process' stdout and stderr, so that it also gets the output of C
    libraries.
    """
    path = log_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with open(path, "a", encoding="utf-8", buffering=1) as file, contextlib.ExitStack() as stack:
        for descriptor in (1, 2) if rank > 0 else ():
            saved = os.dup(descriptor)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, descriptor)
            stack.callback((sys.stdout if descriptor == 1 else sys.stderr).flush)
            os.dup2(file.fileno(), descriptor)
        copy = file if rank == 0 else None
        stack.enter_context(contextlib.redirect_stdout(_Tee(sys.stdout, copy)))
        stack.enter_context(contextlib.redirect_stderr(_Tee(sys.stderr, copy)))
        faulthandler.enable(file)  # writes the stack of a segmentation fault
        try:
            yield file
        finally:
            faulthandler.disable()
            root.handlers[:], root.level = handlers, level


class _Tee:
    """A stream that also writes to `file` if there is one, and removes credentials."""

    def __init__(self, console: TextIO, file: TextIO | None) -> None:
        self._console, self._file = console, file

    def write(self, text: str) -> int:
        text = redact(text)
        # progress bars redraw a line with \r
        if self._file is not None and "\r" not in text and not self._file.closed:
            self._file.write(text)
        return self._console.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)
