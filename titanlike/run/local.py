"""Run jobs of several ranks on this machine, or jobs that may be restarted, in worker processes
that the driver launches and watches.

The root cause of an error is read from the workers' own files (`failures`), as the first process to
end is often a peer. The driver forwards a first signal to the workers, which stop by themselves; a
second signal ends them. torch's elastic agent is not used: it launches processes only once there is
a job, and its own import takes a second. No port is opened: the rendezvous is a file in the
driver's scratch folder, which no other user can open.

1. A fork server starts once the number of ranks is known, and imports torch and the job's modules
   while the driver still checks the config (`PrestartedWorkers`): one import for all ranks.
2. Once the job is in the scratch folder, the server forks a process for each rank (`serve`). It has
   initialized no device, no thread pool and no process group, which the ranks do. If an import has
   called the GPUs' driver, a rank's process imports everything again.
3. The server writes into the same folder how its children end. When one fails, the driver sends
   SIGTERM to the others, later SIGKILL.

A launch that is aborted (an error in the config, a signal) kills the server, which has forked
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

from titanlike.core.config import files
from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.schema import Config
from titanlike.core.launch import failures
from titanlike.core.launch.environment import import_path, interpreter, workers_environment
from titanlike.core.launch.process_end import leave, no_garbage_collection
from titanlike.core.launch.rendezvous import barrier
from titanlike.core.launch.signals import (
    Interrupted,
    StopRequest,
    die_with_parent,
    exit_now,
    interruptible,
)
from titanlike.core.launch.worker import Job, Worker, run_job

_SHUTDOWN_TIMEOUT = 15.0  # seconds between SIGTERM and SIGKILL to the workers
_KILLED = 10.0  # seconds for the kernel to end killed processes
_POLL, _JOB_POLL = 0.02, 0.01  # seconds between polls of the processes, and of the job file
# signals that a cluster may send to every process of a job
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PREFIX, _LOCK = "titanlike-", "driver.lock"  # of scratch folders


def run_local(
    job: Job,
    stop: StopRequest,
    restarted_config: Callable[[failures.JobFailed, int], Config] | None = None,
    prestarted: PrestartedWorkers | None = None,
) -> dict[str, Any]:
    """Run a job in workers on this machine. Returns the result of rank 0's function.

    Failed workers are restarted up to `launch.max_restarts` times, with the config returned by
    `restarted_config(failure, number of the restart)`; never without it, after a permanent failure,
    or after a stop request. Raises JobFailed with the root cause of the last failure, or
    Interrupted. prestarted: workers that may be running already.
    """
    failures.clear_failures(job.run_dir)
    restarts = job.config.launch.max_restarts if restarted_config is not None else 0
    with prestarted or PrestartedWorkers() as workers:
        restart = 0
        while True:
            try:
                return run_workers(job, stop, workers.adopt(job.config.world_size, job.function))
            except failures.JobFailed as failed:
                no_more = restart == restarts or failed.permanent or stop.received
                if no_more or restarted_config is None:
                    raise
                restart += 1
                job = replace(job, config=restarted_config(failed, restart))
            failures.clear_failures(job.run_dir)


def run_workers(job: Job, stop: StopRequest, workers: WorkerProcesses) -> dict[str, Any]:
    """Run a job once, in workers that wait for it."""
    with stop.forwarding(workers.folder):
        deaths = workers.run(job.to_json())
    if deaths:
        cause = failures.root_cause(job.run_dir, deaths, scratch=workers.folder)
        assert cause is not None, "a rank failed without a cause"
        raise cause.to_job_failed(job.run_dir, workers.count)
    return json.loads((workers.folder / "result.json").read_text(encoding="utf-8"))


class PrestartedWorkers(contextlib.ExitStack):
    """Workers started before their job is validated; they end with this context."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: WorkerProcesses | None = None

    def start(self, count: int, function: str) -> None:
        """Start the workers of a job that is yet to be validated."""
        if self._waiting is None:
            with contextlib.suppress(OSError, ConfigError):  # `adopt` will raise it again
                self._waiting = self._new(count, function)

    def adopt(self, count: int, function: str) -> WorkerProcesses:
        """Return `count` workers that wait for their job: the prestarted ones, or new ones."""
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
    """One process per rank, forked once folder/job.json exists."""

    def __init__(self, count: int, folder: Path, function: str) -> None:
        """folder: new and private. function: the job's, whose modules are imported early."""
        self.count, self.folder = count, folder
        self._pids: dict[int, int] = {}  # of forked ranks
        self._codes: dict[int, int] = {}  # exit codes of ended ranks; -N = by signal N
        # of ranks that failed, or ended before the job
        self._deaths: dict[int, failures.Failure] = {}
        self._done: set[int] = set()  # ranks that reached the end of the job, or reported an error
        call = f"serve({str(folder)!r}, {os.getpid()}, {function!r}, {count})"
        command, env = _python(import_path(), "serve", call), workers_environment(count)
        # a new session: the driver receives a terminal's Ctrl-C, and forwards it
        self._server = subprocess.Popen(command, env=env, start_new_session=True)

    def run(self, job: str) -> list[failures.Failure]:
        """Run a job (JSON) to its end; returns the failures. After one, all other ranks are ended."""
        files.atomic_write_text(self.folder / "job.json", job, sync=False)
        try:
            while self._running() and not self._deaths:
                time.sleep(_POLL)
            return [*self._deaths.values()]
        finally:
            self.end(_SHUTDOWN_TIMEOUT)

    def end(self, grace: float) -> None:
        """End the workers: with SIGTERM, after `grace` seconds SIGKILL; 0 = SIGKILL at once."""
        if not self._pids:
            self._server.kill()
        try:
            self._end_ranks(signal.SIGTERM, grace)
        finally:  # even if a signal interrupts the wait
            self._end_ranks(signal.SIGKILL, _KILLED)
            self._server.kill()
            self._server.wait()

    def _end_ranks(self, signum: signal.Signals, patience: float) -> None:
        """Send a signal to the session of each running rank, and wait until they have ended."""
        deadline = time.monotonic() + patience
        for rank in self._running() if patience else ():
            with contextlib.suppress(OSError, KeyError):  # it has ended, or was not forked yet
                os.killpg(self._pids[rank], signum)  # includes its data loader processes
                os.killpg(self._pids[rank], signal.SIGCONT)  # a stopped process handles no signal
        while time.monotonic() < deadline and self._running():
            time.sleep(_POLL)

    def _running(self) -> list[int]:
        """The ranks that have not ended; all ranks if they are not forked yet."""
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
                    if number or not left:  # if `left`, it failed to write its error
                        end = failures.describe_exit(number)
                        self._deaths[rank] = failures.Failure(rank, end, "", left, float(*when))
        running = [rank for rank in range(self.count) if rank not in self._codes]
        if gone is not None and running:  # the server was killed, and its children with it
            end = f"the process that forks the ranks was lost: {failures.describe_exit(gone)}"
            for rank in running:
                self._codes[rank] = gone
                lost = failures.Failure(rank, end, "", False, time.time(), names_rank=True)
                self._deaths[rank] = lost
            return []
        return running


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A context with a new folder that no other user can read, write or replace, removed on exit.
    Raises ConfigError if there is no private place for it.

    A driver killed with SIGKILL leaves its folder; the next driver removes it. Each driver holds a
    lock in its folder, so a folder whose lock is free has no driver.
    """
    default = tempfile.gettempdir()
    for parent in map(Path, (default, "/tmp", "/var/tmp", "/dev/shm")):
        if os.access(parent, os.W_OK) and not _replaceable(parent.resolve()):
            break
    else:
        reason = "every user of this machine may rename the folders there"
        raise ConfigError([Problem("TMPDIR", default, reason, "TMPDIR=$HOME")])
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):  # folders that killed drivers left
        with contextlib.suppress(OSError), path.open("r+") as lock:  # skip locked or other users'
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
    """Whether other users may rename the folder or one of its parents."""
    modes = [path.stat().st_mode for path in (folder, *folder.parents)]
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in modes)


def serve(scratch: str, driver: int, function: str, count: int) -> NoReturn:
    """The fork server of a job's ranks.

    It imports the job's function while the driver (a process id) checks the config, forks `count`
    ranks once scratch/job.json exists, and appends to scratch/ranks when one has begun (with its
    process id) or ended (with its exit code).
    """
    die_with_parent(driver, signal.SIGKILL)  # and the ranks die with it
    folder = Path(scratch)
    # a cluster sends these to every process of a job, but the ranks decide when to end
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _SIGNALS}
    with no_garbage_collection():
        importlib.import_module("titanlike.core.torch_private")  # first: keeps the compiler out
        importlib.import_module("torch.distributed.pipelining")  # and FSDP, as several ranks do
        if function.startswith("titanlike."):  # custom code only after the config is validated
            with contextlib.suppress(ImportError):  # loading the job will raise it again
                importlib.import_module(function.rpartition(".")[0])
        while not (folder / "job.json").exists():
            if os.getppid() != driver:  # for systems whose kernel does not end orphans
                exit_now(1)
            time.sleep(_JOB_POLL)
        events = os.open(folder / "ranks", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        gc.freeze()  # no rank collects imported objects, so their memory stays shared
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
    """Fork a rank of the job; returns its process id. handlers: signal handlers of the child."""
    from titanlike.core.torch_private.accelerator import in_bad_fork  # imports torch

    server = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, handlers)  # until the child has its handlers
    with warnings.catch_warnings():
        # Python warns of threads that libraries started at import, which a fork ends
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    for signum, handler in handlers.items() if pid == 0 else ():
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    if pid:
        return pid
    os.setsid()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if in_bad_fork():  # CUDA cannot be used after a fork: start a new interpreter
        call = f"rank_main({scratch!r}, {server})"
        os.execv(sys.executable, _python(sys.path, "rank_main", call))
    random.seed()  # forked ranks would share the global generators' states
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    rank_main(scratch, server)


def _python(path: list[str], function: str, call: str) -> list[str]:
    """The command line of a process that calls a function of this file."""
    program = f"import sys; sys.path[:] = {path!r}; from {__name__} import {function}; {call}"
    return [*interpreter(), "-u", "-c", program]


def rank_main(scratch: str, parent: int) -> NoReturn:
    """Run a rank's process: read scratch/job.json, write result.json or this rank's error there.

    A signal that is not deferred ends the process immediately: the driver reports it.
    """
    die_with_parent(parent, signal.SIGKILL)  # safe: checkpoints are atomic
    folder = Path(scratch)
    stop = StopRequest(folder)
    try:
        with interruptible(stop=stop, grace=0):
            job = Job.from_json((folder / "job.json").read_text(encoding="utf-8"))
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            try:
                from torch.distributed import FileStore

                store, run_dir = FileStore(str(folder / "store"), size), job.run_dir
                worker = Worker(
                    rank, size, rank, size, run_dir, store, job.overrides, stop, one_machine=True
                )
                result = run_job(job, worker)
                if rank == 0:
                    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
                # no rank exits before all have finished: an ended peer counts as failed
                barrier(worker, "end", job.config.launch.timeout, failed_come=True)
            except Interrupted:
                raise
            except BaseException as error:
                _leave_failed(folder, failures.describe(rank, error))
            _note_end(folder, rank)
    except Interrupted as interrupted:  # even while an error is being reported
        exit_now(interrupted.exit_code)
    leave(0)


def _leave_failed(folder: Path, failure: failures.Failure) -> None:
    if not failure.transport:  # not to run_dir, which may be lost or taken over
        with contextlib.suppress(OSError):  # deleted: the driver has read a peer's cause
            failures.write_failure(folder, failure)
    _note_end(folder, failure.rank)
    exit_now(1)  # destroying the process groups would look like the root cause to peers


def _note_end(folder: Path, rank: int) -> None:
    """Tell the driver that this rank ends on its own, unlike after os._exit in a user's code."""
    with contextlib.suppress(OSError):
        events = os.open(folder / "ranks", os.O_WRONLY | os.O_APPEND)
        os.write(events, b"left %d 0\n" % rank)
        os.close(events)
