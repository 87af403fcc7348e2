"""Jobs of several ranks on this machine, or that may be restarted: worker processes that the driver
starts and watches.

The root cause of an error is read from the workers' own files (`failures`): the first process that
ends is often a peer. The driver forwards a first signal to the workers, which stop by themselves; a
second one ends them.

torch's elastic agent starts processes only once there is a job for them, and imports for a second
itself. Nothing listens here: the ranks meet in a file of the driver's scratch folder, which no
other user can open.

1. A fork server starts once the number of ranks is known, and imports torch and the job's modules
   while the driver still checks the config (`PrestartedWorkers`): one import for all ranks.
2. Once the job is in the folder that it shares with the driver, it forks a process for each rank
   (`serve`). It has started no device, no thread pool and no process group: these are the ranks'.
   Where an import has called the driver of the GPUs, a rank's process imports for itself.
3. The server writes into the same folder how its children end. When one fails, the driver sends
   SIGTERM to the others, later SIGKILL.

A launch that is given up (an error in the config, a signal) kills the server, which has forked
nothing. If the driver dies, the kernel kills the server, and with it the ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from titanlike.config import files
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.launch.environment import import_path, interpreter, workers_environment
from titanlike.launch.failures import (
    Failure,
    JobFailed,
    clear_failures,
    describe,
    describe_exit,
    root_cause,
    write_failure,
)
from titanlike.launch.process_end import leave, no_garbage_collection
from titanlike.launch.rendezvous import BarrierTimeout, barrier
from titanlike.launch.signals import (
    Interrupted,
    StopRequest,
    die_with_parent,
    exit_now,
    interruptible,
)
from titanlike.launch.worker import Job, Worker, run_job

_SHUTDOWN_TIMEOUT = 15.0  # seconds between SIGTERM and SIGKILL to the workers
_KILLED = 10.0  # seconds for the kernel to end what was killed
_POLL, _JOB_POLL = 0.02, 0.01  # seconds between two looks at the processes, and for the job
# what a cluster may send to every process of a job
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PREFIX, _LOCK = "titanlike-", "driver.lock"  # of scratch folders


def run_local(
    job: Job,
    stop: StopRequest,
    restarted_config: Callable[[JobFailed, int], Config] | None = None,
    prestarted: PrestartedWorkers | None = None,
) -> dict[str, Any]:
    """Run a job in workers on this machine.

    Workers that fail are restarted up to `launch.max_restarts` times with the config that
    `restarted_config` (of the failure and the restart's number) returns; not without it, after a
    permanent failure, or after a stop request. Returns the result of rank 0's function. Raises
    JobFailed with the root cause of the (last) failure, or Interrupted. prestarted: may have the
    workers already.
    """
    clear_failures(job.run_dir)
    restarts = job.config.launch.max_restarts if restarted_config is not None else 0
    with prestarted or PrestartedWorkers() as workers:
        restart = 0
        while True:
            try:
                return run_workers(job, stop, workers.adopt(job.config.world_size, job.function))
            except JobFailed as failed:
                no_more = restart == restarts or failed.permanent or stop.received
                if no_more or restarted_config is None:
                    raise
                restart += 1
                job = replace(job, config=restarted_config(failed, restart))
            clear_failures(job.run_dir)


def run_workers(job: Job, stop: StopRequest, workers: WorkerProcesses) -> dict[str, Any]:
    """Run a job once, in workers that wait for it."""
    with stop.forwarding(workers.folder):
        deaths = workers.run(job.to_json())
    if deaths:
        cause = root_cause(job.run_dir, deaths, scratch=workers.folder)
        assert cause is not None, "a rank failed without a cause"
        raise cause.to_job_failed(job.run_dir, workers.count)
    return json.loads((workers.folder / "result.json").read_text(encoding="utf-8"))


class PrestartedWorkers(contextlib.ExitStack):
    """Workers that are started before their job is known to be right; ended with this context."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: WorkerProcesses | None = None

    def start(self, count: int, function: str) -> None:
        """Start the workers of a job that is still to be checked."""
        if self._waiting is None:
            with contextlib.suppress(OSError, ConfigError):  # raised where they are needed
                self._waiting = self._new(count, function)

    def adopt(self, count: int, function: str) -> WorkerProcesses:
        """So many workers that wait for their job: those that were started, or new ones."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.count == count:
            return waiting
        self.close()
        return self._new(count, function)

    def _new(self, count: int, function: str) -> WorkerProcesses:
        workers = WorkerProcesses(count, self.enter_context(scratch_folder()), function)
        self.callback(workers.end, 0)
        return workers


class WorkerProcesses:
    """One process a rank, forked once folder/job.json is there."""

    def __init__(self, count: int, folder: Path, function: str) -> None:
        """folder: new, private. function: of the job, whose modules are imported meanwhile."""
        self.count, self.folder = count, folder
        self._pids: dict[int, int] = {}  # of each rank that has been forked
        self._codes: dict[int, int] = {}  # of each rank that has ended; -N = by signal N
        self._deaths: dict[int, Failure] = {}  # of those that failed, or ended before the job did
        self._done: set[int] = set()  # ranks that have come to the end of the job, or reported
        call = f"serve({str(folder)!r}, {os.getpid()}, {function!r}, {count})"
        command, env = _python(import_path(), "serve", call), workers_environment(count)
        # a terminal's Ctrl-C is for the driver, which passes it on
        self._server = subprocess.Popen(command, env=env, start_new_session=True)

    def run(self, job: str) -> list[Failure]:
        """Run a job (JSON) to its end; how ranks failed, of which the others are ended."""
        files.atomic_write_text(self.folder / "job.json", job, sync=False)
        try:
            while self._running() and not self._deaths:
                time.sleep(_POLL)
            return [*self._deaths.values()]
        finally:
            self.end(_SHUTDOWN_TIMEOUT)

    def end(self, grace: float) -> None:
        """End those that run: with SIGTERM, after `grace` seconds with SIGKILL; 0 = immediately."""
        if not self._pids:
            self._server.kill()
        try:
            self._end_ranks(signal.SIGTERM, grace)
        finally:  # also where a signal ends the waiting
            self._end_ranks(signal.SIGKILL, _KILLED)
            self._server.kill()
            self._server.wait()

    def _end_ranks(self, signum: signal.Signals, patience: float) -> None:
        """Send a signal to the session of each rank that runs, and wait for their end."""
        deadline = time.monotonic() + patience
        for rank in self._running() if patience else ():
            with contextlib.suppress(OSError, KeyError):  # it has ended, or has not begun
                os.killpg(self._pids[rank], signum)  # also its children: data loaders
                os.killpg(self._pids[rank], signal.SIGCONT)  # one that is stopped handles none
        while time.monotonic() < deadline and self._running():
            time.sleep(_POLL)

    def _running(self) -> list[int]:
        """The ranks that have not ended; before they are forked, all of them."""
        gone = self._server.poll()
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "ranks").read_text().split("\n")[:-1]:
                what, name, text, *when = line.split()
                rank, number = int(name), int(text)
                if what == "began":
                    self._pids[rank] = number
                elif what == "left":
                    self._done.add(rank)
                elif rank not in self._codes:
                    self._codes[rank], left = number, rank in self._done
                    if number or not left:  # where it left, its error could not be written
                        end = describe_exit(number)
                        self._deaths[rank] = Failure(rank, end, "", left, float(*when))
        running = [rank for rank in range(self.count) if rank not in self._codes]
        if gone is not None and running:  # whoever killed it: its children were killed with it
            end = f"the process that forks the ranks was lost: {describe_exit(gone)}"
            for rank in running:
                self._codes[rank] = gone
                lost = Failure(rank, end, "", False, time.time(), names_rank=True)
                self._deaths[rank] = lost
            return []
        return running


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that no other user can read, write or replace (the workers run what it says),
    removed at the end. Raises ConfigError where none is private.

    A driver that is killed with SIGKILL cannot remove its folder; the next driver does. Each driver
    holds a lock in its folder, so a folder whose lock is free has no driver.
    """
    wanted = tempfile.gettempdir()
    for parent in map(Path, (wanted, "/tmp", "/var/tmp", "/dev/shm")):
        if os.access(parent, os.W_OK) and not _replaceable(parent.resolve()):
            break
    else:
        reason = "every user of this machine may rename the folders there"
        raise ConfigError([Problem("TMPDIR", wanted, reason, "TMPDIR=$HOME")])
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):  # of drivers that were killed
        with contextlib.suppress(OSError), path.open("r+") as lock:  # locked, or another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.parent.lstat().st_uid == os.getuid():
                shutil.rmtree(path.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as name:
        unlocked = Path(name) / "unlocked"
        with unlocked.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(Path(name) / _LOCK)  # exists only once it is locked
            yield Path(name)


def _replaceable(folder: Path) -> bool:
    """Whether other users may rename it, or a folder that it is in."""
    modes = [path.stat().st_mode for path in (folder, *folder.parents)]
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in modes)


def serve(scratch: str, driver: int, function: str, count: int) -> NoReturn:
    """The fork server of a job's ranks.

    It imports what the job's function needs while the driver (a process id) checks the config,
    forks a process for each of `count` ranks once there is scratch/job.json, and writes into
    scratch/ranks that one has begun (with its process id) or ended (its exit code).
    """
    die_with_parent(driver, signal.SIGKILL)  # and the ranks die with it
    folder = Path(scratch)
    # a cluster sends these to every process of a job: the ranks decide when to end
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _SIGNALS}
    with no_garbage_collection():
        importlib.import_module("titanlike.torch_private")  # first: it keeps torch's compiler out
        importlib.import_module("torch.distributed.pipelining")  # and FSDP, as several ranks do

        if function.startswith("titanlike."):  # a user's code only once its config has been checked
            with contextlib.suppress(ImportError):  # raised and reported where the job is loaded
                importlib.import_module(function.rpartition(".")[0])
        while not (folder / "job.json").exists():
            if os.getppid() != driver:  # where the kernel does not end orphans
                exit_now(1)
            time.sleep(_JOB_POLL)
        events = os.open(folder / "ranks", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        gc.freeze()  # what is imported is garbage in no rank, and its memory stays shared
        ranks: dict[int, int] = {}
        for rank in range(count):
            pid = _fork_rank(scratch, rank, handlers)
            ranks[pid] = rank
            os.write(events, b"began %d %d\n" % (rank, pid))
    while ranks:
        pid, status = os.wait()
        if (ended := ranks.pop(pid, None)) is not None:
            code = os.waitstatus_to_exitcode(status)
            os.write(events, b"ended %d %d %f\n" % (ended, code, time.time()))
    os._exit(0)


def _fork_rank(scratch: str, rank: int, handlers: Mapping[signal.Signals, Any]) -> int:
    """The process id of a child that is a rank of the job; handlers: of its signals."""
    from titanlike.torch_private.accelerator import in_bad_fork  # late, as torch

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
    if in_bad_fork():  # then this process imports for itself
        os.execv(
            sys.executable, _python(sys.path, "rank_main", f"rank_main({scratch!r}, {server})")
        )
    random.seed()  # global generators differ between processes, unless somebody seeds them
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    rank_main(scratch, server)


def _python(path: list[str], function: str, call: str) -> list[str]:
    """The command of a process that calls a function of this file."""
    program = f"import sys; sys.path[:] = {path!r}; from {__name__} import {function}; {call}"
    return [*interpreter(), "-u", "-c", program]


def rank_main(scratch: str, parent: int) -> NoReturn:
    """A rank's process; `scratch` has job.json and gets result.json, or an error of this rank.

    A signal that is not deferred ends it immediately: the driver reports.
    """
    die_with_parent(parent, signal.SIGKILL)  # safe: checkpoints are atomic
    stop = StopRequest(Path(scratch))
    try:
        with interruptible(stop=stop, grace=0):
            _run_and_report(Path(scratch), stop)
    except Interrupted as interrupted:  # also while an error was being reported
        exit_now(interrupted.exit_code)
    leave(0)


def _run_and_report(folder: Path, stop: StopRequest) -> None:
    job = Job.from_json((folder / "job.json").read_text(encoding="utf-8"))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        from torch.distributed import FileStore

        store = FileStore(str(folder / "store"), size)
        worker = Worker(
            rank, size, rank, size, job.run_dir, store, job.overrides, stop, one_machine=True
        )
        result = run_job(job, worker)
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    except Interrupted:
        raise
    except BaseException as error:
        _leave_failed(folder, describe(rank, error))
    # none exits before all have finished: a peer that has gone counts as one that has failed
    try:
        barrier(worker, "end", job.config.launch.timeout)
    except BarrierTimeout as error:
        _leave_failed(folder, describe(rank, error))
    _note_end(folder, rank)


def _leave_failed(folder: Path, failure: Failure) -> None:
    if not failure.transport:  # run_dir may be lost, or be a later start's
        with contextlib.suppress(OSError):  # removed: the driver has the cause from a peer
            write_failure(folder, failure)
    _note_end(folder, failure.rank)
    exit_now(1)  # destroying the process groups would look like the root cause to peers


def _note_end(folder: Path, rank: int) -> None:
    """Tell the driver that this rank ends by itself: os._exit in a user's code does not."""
    with contextlib.suppress(OSError):
        events = os.open(folder / "ranks", os.O_WRONLY | os.O_APPEND)
        os.write(events, b"left %d 0\n" % rank)
        os.close(events)
