"""The processes of a job's ranks on this machine: forked from one that has imported what they need,
watched, ended together.

torch's elastic agent would do the latter, but it starts processes only once there is a job for them,
and imports for a second itself. Nothing listens here: the ranks meet in a file of the driver's
scratch folder, which no other user can open.

1. A fork server starts once the number of ranks is known, and imports torch and the job's modules while
   the driver still checks the config (`EarlyWorkers`): one import for all ranks.
2. Once the job is in the folder that it shares with the driver, it forks a process for each rank
   (`worker.serve`). It has started no device, no thread pool and no process group: these are the ranks'.
3. The server writes into the same folder how its children end. When one fails, the driver sends
   SIGTERM to the others, later SIGKILL.

A launch that is given up (an error in the config, a signal) kills the server, which has forked nothing. If
the driver dies, the kernel kills the server, and with it the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from titanlike.config.errors import ConfigError
from titanlike.launch.environment import import_path, interpreter, workers_environment
from titanlike.launch.scratch_folder import scratch_folder

_SHUTDOWN_TIMEOUT = 15.0  # seconds between SIGTERM and SIGKILL to the workers
_KILLED = 10.0  # seconds for the kernel to end what was killed
_POLL = 0.02  # seconds between two looks at the processes


class WorkerProcesses:
    """One process a rank, forked once folder/job.json is there."""

    def __init__(self, count: int, folder: Path, function: str) -> None:
        """folder: new, private. function: of the job, whose modules are imported meanwhile."""
        self.count, self.folder = count, folder
        self.situation = _situation()
        self._pids: dict[int, int] = {}  # of each rank that has been forked
        self._codes: dict[int, int] = {}  # of each rank that has ended; -N = by signal N
        folder.mkdir()
        program = (
            f"import sys; sys.path[:] = {import_path()!r}; "
            "from titanlike.launch.worker import serve; "
            f"serve({str(folder)!r}, {os.getpid()}, {function!r}, {count})"
        )
        size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        with workers_environment(count):
            command, env = [*interpreter(), "-u", "-c", program], os.environ | size
            # a terminal's Ctrl-C is for the driver, which passes it on
            self._server = subprocess.Popen(command, env=env, start_new_session=True)

    def run(self, job: str) -> dict[int, int]:
        """Run a job (JSON) to its end; the exit codes of ranks that failed, the others are ended."""
        unfinished = self.folder / "job.tmp"
        unfinished.write_text(job, encoding="utf-8")
        unfinished.replace(self.folder / "job.json")
        try:
            while self._running():
                if failed := {rank: code for rank, code in self._codes.items() if code}:
                    return failed
                time.sleep(_POLL)
            return {rank: code for rank, code in self._codes.items() if code}
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
        while time.monotonic() < deadline and self._running():
            time.sleep(_POLL)

    def _running(self) -> list[int]:
        """The ranks that have not ended; before they are forked, all of them."""
        gone = self._server.poll()
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "ranks").read_text().split("\n")[:-1]:
                what, rank, number = line.split()
                (self._pids if what == "began" else self._codes)[int(rank)] = int(number)
        if gone is not None:  # whoever killed it: its children were killed with it
            for rank in range(self.count):
                self._codes.setdefault(rank, gone or -signal.SIGKILL)
        return [rank for rank in range(self.count) if rank not in self._codes]


def _situation() -> tuple[dict[str, str], str, list[str]]:
    """What workers inherit. A config may set environment variables, or change the folder."""
    own = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return own, os.getcwd(), import_path()


class EarlyWorkers:
    """Workers that are started before their job is known to be right; ended with this context."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._scratch: Path | None = None
        self._started: WorkerProcesses | None = None
        self._starts = 0

    def start(self, count: int, function: str) -> None:
        """Start the workers of a job that is still to be checked."""
        if self._started is None:
            with contextlib.suppress(OSError, ConfigError):  # raised where they are needed
                self._started = self._new(count, function)

    def settle(self) -> None:
        """The check is over: variables that libraries have set when it imported them are none of
        the config's, and make no difference to the workers."""
        if self._started is not None:
            self._started.situation = _situation()

    def take(self, count: int, function: str) -> WorkerProcesses:
        """So many workers that wait for their job: those that were started, or new ones."""
        started, self._started = self._started, None
        if started is not None and (started.count, started.situation) == (count, _situation()):
            return started
        if started is not None:
            started.end(0)
        return self._new(count, function)

    def close(self) -> None:
        if self._started is not None:
            self._started.end(0)
            self._started = None
        self._stack.close()
        self._scratch = None

    def __enter__(self) -> EarlyWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _new(self, count: int, function: str) -> WorkerProcesses:
        if self._scratch is None:
            self._scratch = self._stack.enter_context(scratch_folder())
        self._starts += 1
        return WorkerProcesses(count, self._scratch / str(self._starts - 1), function)
