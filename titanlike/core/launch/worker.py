"""One rank of a job, whichever launcher started it.

1. Its output goes to run_dir/logs/rankN.log.
2. It waits until all ranks of the job have started; missing ones are named.
3. It calls the job's function, in which all ranks may meet at further barriers.
4. An error is written to a file before any cleanup.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from titanlike.core.config.credentials import redact
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.imports import import_object
from titanlike.core.config.parse import parse, to_plain
from titanlike.core.config.schema import Config
from titanlike.core.launch import failures
from titanlike.core.launch.heartbeat import heartbeat_path
from titanlike.core.launch.process_end import collected_once_built
from titanlike.core.launch.signals import STACKS, Interrupted, StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Job:
    """What every rank receives as JSON: the import path of a function (`package.module:function`),
    and its arguments."""

    function: str
    config: Config
    run_dir: Path  # absolute
    overrides: list[str]  # from the command line
    started: float = field(default_factory=time.time)  # seconds since the epoch; for max_time

    def to_json(self) -> str:
        plain = {"config": to_plain(self.config), "run_dir": str(self.run_dir)}
        return json.dumps(vars(self) | plain)

    @classmethod
    def from_json(cls, text: str) -> Job:
        plain = json.loads(text)
        config, problems = parse(plain["config"])
        if problems:  # the sender runs a different version of titanlike
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
    store: Store | None  # with a prefix of this job; None for a job of one process
    overrides: list[str]
    stop_request: StopRequest = field(default_factory=StopRequest)
    # closed at its end
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    one_machine: bool = False  # whether all ranks are known to be on this machine
    # in the process that reports the job: called for a hang, which no exception can end
    report_failure: Callable[[failures.Failure], None] | None = None
    callbacks: tuple[Any, ...] = ()  # of a program that calls `titanlike.library`

    def notify(self, event: str, *values: Any) -> None:
        """Call on_EVENT(*values) of each callback that has it."""
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
            # an earlier launch's beat would look like that of a hanging rank
            heartbeat_path(job.run_dir, worker.rank).unlink(missing_ok=True)
            if worker.store is not None:
                from titanlike.core.launch.rendezvous import peer_ended, start_together

                pids = start_together(worker, job.config.launch.timeout)
                ended = partial(peer_ended, job.run_dir, worker.rank, pids)
                worker.stop_request.peer_failed = ended
            worker.stop_request.started = job.started
            function = import_object(job.function.replace(":", "."))
            return function(job.config, worker) or {}
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk must not hide the error
                failures.write_failure(job.run_dir, failures.describe(worker.rank, error))
                log.write(redact(traceback.format_exc()))
            raise
        finally:
            worker.resources.close()
            os.environ.clear()
            os.environ.update(environment)


def run_alone(
    job: Job,
    stop: StopRequest,
    report_failure: Callable[[failures.Failure], None],
    callbacks: tuple[Any, ...] = (),
) -> dict[str, Any]:
    """Run a job of one rank in this process. Returns the function's result. Raises JobFailed or
    Interrupted.

    report_failure, callbacks: see Worker.
    """
    failures.clear_failures(job.run_dir)
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
    except Interrupted:
        raise
    except KeyboardInterrupt:  # of the user's code
        raise Interrupted(signal.SIGINT) from None
    except Exception as error:
        raise failures.describe(0, error).to_job_failed(job.run_dir, 1) from error
    finally:
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_initialized():  # the job failed; a sweep's next one has its own group
                dist.destroy_process_group()


@contextlib.contextmanager
def _logged(run_dir: Path, rank: int) -> Iterator[TextIO]:
    """A context in which this process' output goes to the rank's log file, which is yielded.

    On rank 0 Python's output goes to the console as well, and the terminal stays a terminal. On
    other ranks the file replaces the process' stdout and stderr, so it includes the output of C
    libraries.
    """
    path = failures.log_path(run_dir, rank)
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
        faulthandler.register(STACKS, file)
        try:
            yield file
        finally:
            faulthandler.unregister(STACKS)
            faulthandler.disable()
            root.handlers[:], root.level = handlers, level


class _Tee:
    """A stream that also writes to `file` if there is one, and redacts credentials."""

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
