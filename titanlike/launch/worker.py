"""One rank of a job, whichever launcher started it.

1. Its output goes to run_dir/logs/rankN.log.
2. It waits until all ranks of the job have started; missing ones are named.
3. It calls the job's function.
4. An error is written to a file before any cleanup.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titanlike.config.credentials import redact
from titanlike.launch.barrier import meet, meet_in_groups
from titanlike.launch.environment import interpreter, use_loopback
from titanlike.launch.failures import Failure, describe, peer_failed, write_failure
from titanlike.launch.job import Job
from titanlike.launch.process_end import collected_once_built, leave, no_garbage_collection
from titanlike.launch.rank_log import logged
from titanlike.launch.signals import Interrupted, die_with_parent, exit_now, interruptible
from titanlike.launch.stop_request import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store


_POLL = 0.01  # seconds between two looks for the job
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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


def run_job(job: Job, worker: Worker) -> dict[str, Any]:
    """Call the job's function on this rank. Writes its error to the rank's log and error file."""
    environment = dict(os.environ)
    if worker.one_machine:
        use_loopback()
    log_file = logged(job.run_dir, worker.rank, console=worker.rank == 0)
    with collected_once_built(), log_file as log:
        try:
            local = _start(worker, job.config.launch.timeout)
            worker.stop_request.started = job.started
            worker.stop_request.watch_peers(partial(_peer_ended, job.run_dir, worker.rank, local))
            return job.load()(job.config, worker) or {}
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


def _start(worker: Worker, timeout: float) -> list[int]:
    """Wait for all ranks to start; the process ids of those on this machine."""
    if worker.store is None:
        return [os.getpid()]
    machine = socket.gethostname()
    with contextlib.suppress(OSError):  # containers number their processes separately
        machine += f"/{os.stat('/proc/self/ns/pid').st_ino}"
    rank, size, pid = worker.rank, worker.world_size, str(os.getpid())
    here = meet_in_groups(worker.store, rank, size, "start", timeout, machine, pid)
    return [int(pid) for pid in here]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists, but is another user's
        pass
    return True


def _peer_ended(run_dir: Path, rank: int, local: list[int]) -> bool:
    """Whether another rank failed or was killed: otherwise none ends before the last barrier."""
    return not all(map(_is_alive, local)) or peer_failed(run_dir, rank)


def barrier(
    worker: Worker, name: str, timeout: float, message: str = "", listens: bool = False
) -> dict[int, str]:
    """Wait for all ranks at a named point of a job: see `meet`."""
    if worker.store is None:
        return {0: message} if message and listens else {}
    return meet(worker.store, worker.rank, worker.world_size, name, timeout, message, listens)


def first_answer(worker: Worker, name: str, answer: str) -> str:
    """The answer of the rank that calls this first; "no" if the store is gone."""
    if worker.store is None:
        return answer
    try:
        return worker.store.compare_set(name, "", answer).decode()
    except RuntimeError:
        return "no"


def serve(scratch: str, driver: int, function: str, count: int) -> NoReturn:
    """The fork server of a job's ranks: see `worker_processes`.

    It imports what the job's function needs while the driver (a process id) checks the config, forks a
    process for each of `count` ranks once there is scratch/job.json, and writes into scratch/ranks that
    one has begun (with its process id) or ended (its exit code).
    """
    die_with_parent(driver, signal.SIGKILL)  # and the ranks die with it
    folder = Path(scratch)
    # a cluster sends these to every process of a job: the ranks decide when to end
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _SIGNALS}
    with no_garbage_collection():
        _import_module_of(function)
        while not (folder / "job.json").exists():
            if os.getppid() != driver:  # where the kernel does not end orphans
                exit_now(1)
            time.sleep(_POLL)
        told = os.open(folder / "ranks", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        gc.freeze()  # what is imported is garbage in no rank, and its memory stays shared
        ranks: dict[int, int] = {}
        start = _fork_rank if _may_fork() else _spawn_rank
        for rank in range(count):
            pid = start(scratch, rank, handlers)
            ranks[pid] = rank
            os.write(told, b"began %d %d\n" % (rank, pid))
    while ranks:
        pid, status = os.wait()
        if (rank := ranks.pop(pid, None)) is not None:
            os.write(told, b"ended %d %d\n" % (rank, os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _may_fork() -> bool:
    """Not once an import, as that of a plugin of torch, has initialized an accelerator."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is None or not getattr(torch, accelerator.type).is_initialized()


def _fork_rank(scratch: str, rank: int, handlers: Mapping[signal.Signals, Any]) -> int:
    """The process id of a child that is a rank of the job; handlers: of its signals."""
    server = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, handlers)  # none is lost before the child has handlers
    with warnings.catch_warnings():
        # of threads that libraries started at import: they end at a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    for signum, handler in handlers.items() if pid == 0 else ():
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    if pid:
        return pid
    os.setsid()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    random.seed()  # global generators differ between processes, unless somebody seeds them
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    main(scratch, server)


def _spawn_rank(scratch: str, rank: int, handlers: Mapping[signal.Signals, Any]) -> int:
    """The same of a process that imports for itself."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from titanlike.launch.worker import main; main({scratch!r}, {os.getpid()})"
    )
    env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    defaults = [signum for signum, handler in handlers.items() if handler != signal.SIG_IGN]
    command = [*interpreter(), "-u", "-c", program]
    return os.posix_spawn(sys.executable, command, env, setsid=True, setsigdef=defaults)


def main(scratch: str, parent: int) -> NoReturn:
    """A rank's process; `scratch` has job.json and gets result.json.

    A signal that is not deferred ends it immediately: the driver reports.
    """
    die_with_parent(parent, signal.SIGKILL)  # safe: checkpoints are atomic
    folder = Path(scratch)
    stop = StopRequest(folder)
    try:
        with interruptible(stop=stop, grace=0):
            _run_and_report(folder, stop)
    except Interrupted as interrupted:  # also while an error was being reported
        exit_now(interrupted.exit_code)
    leave(0)


def _import_module_of(function: str) -> None:
    """Import this program's own modules; a user's code only once its config has been checked."""
    if function.startswith("titanlike."):
        with contextlib.suppress(ImportError):  # raised and reported where the job is loaded
            importlib.import_module(function.rpartition(".")[0])


def _run_and_report(folder: Path, stop: StopRequest) -> None:
    """The job on this rank, and what the driver reads of it: result.json or an error."""
    job = Job.from_json((folder / "job.json").read_text(encoding="utf-8"))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        from torch.distributed import FileStore

        worker = Worker(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            one_machine=True,
            run_dir=job.run_dir,
            store=FileStore(str(folder / "store"), world_size),
            overrides=job.overrides,
            stop_request=stop,
        )
        result = run_job(job, worker)
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    except Interrupted:
        raise
    except BaseException as error:
        failure = describe(rank, error)
        if not failure.transport:  # run_dir may be lost, or be a later start's
            with contextlib.suppress(OSError):  # removed: the driver has the cause from a peer
                write_failure(folder, failure)
        exit_now(1)  # destroying the process groups would look like the root cause to peers
    # none exits before all have finished: see `_peer_ended`
    with contextlib.suppress(RuntimeError):  # the driver finds the rank that failed
        barrier(worker, "end", job.config.launch.timeout)
