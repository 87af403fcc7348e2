"""The processes of a job's ranks on this machine: started early, watched, ended together.

torch's elastic agent would do the latter, but it starts processes only once there is a job for them,
and imports for a second itself. Nothing listens here: the ranks meet in a file of the driver's
scratch folder, which no other user can open.

1. They start once the number of ranks is known, and import torch and the job's modules while the
   driver still checks the config (`EarlyWorkers`).
2. Each waits until its job is in the folder that it shares with the driver, and runs it.
3. The driver watches them: when one fails, the others get SIGTERM, later SIGKILL.

A start that is given up (an error in the config, a signal) kills them: they have not begun. If the
driver dies, the kernel kills them.
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
_POLL = 0.02  # seconds between two looks at the processes


class WorkerProcesses:
    """One process a rank, which waits for folder/job.json."""

    def __init__(self, count: int, folder: Path, function: str) -> None:
        """folder: new, private. function: of the job, whose modules they import meanwhile."""
        self.count, self.folder = count, folder
        self.situation = _situation()
        folder.mkdir()
        program = (
            f"import sys; sys.path[:] = {import_path()!r}; "
            "from titanlike.launch.worker import main; "
            f"main({str(folder)!r}, {os.getpid()}, {function!r})"
        )
        command = [*interpreter(), "-u", "-c", program]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            with workers_environment(count):
                for rank in range(count):
                    own = {"RANK": rank, "LOCAL_RANK": rank}
                    size = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
                    env = os.environ | {name: str(value) for name, value in (own | size).items()}
                    # a terminal's Ctrl-C is for the driver, which passes it on
                    process = subprocess.Popen(command, env=env, start_new_session=True)
                    self._processes.append(process)
        except BaseException:
            self.end(0)
            raise

    def run(self, job: str) -> dict[int, int]:
        """Run a job (JSON) to its end; the exit codes of ranks that failed, the others are ended."""
        unfinished = self.folder / "job.tmp"
        unfinished.write_text(job, encoding="utf-8")
        unfinished.replace(self.folder / "job.json")
        try:
            while True:
                codes = [process.poll() for process in self._processes]
                failed = {rank: code for rank, code in enumerate(codes) if code}
                if failed or all(code == 0 for code in codes):
                    return failed
                time.sleep(_POLL)
        finally:
            self.end(_SHUTDOWN_TIMEOUT)

    def end(self, grace: float) -> None:
        """End those that run: with SIGTERM, after `grace` seconds with SIGKILL; 0 = immediately."""
        running = [process for process in self._processes if process.poll() is None]
        deadline = time.monotonic() + grace
        try:
            for process in running if grace else ():
                _signal_session(process, signal.SIGTERM)
            while any(process.poll() is None for process in running):
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL)
        finally:  # also where a signal ends the waiting
            for process in running:
                _signal_session(process, signal.SIGKILL)
            for process in running:
                process.wait()


def _signal_session(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Also its children, as long as it runs: data loaders."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signum)
        except OSError:  # it has no session yet
            process.send_signal(signum)


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
