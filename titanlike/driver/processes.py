"""A sweep's jobs as processes of this machine: one after another, or several at a time.

Each job is a process, as if the user had typed its command: a crash does not affect the next one.
One after another they share the terminal; several at a time, each writes to its own output.log, and
a line says when it begins and ends.

Several share the devices: each job gets as many GPUs as it has ranks (by the driver's variable,
CUDA_VISIBLE_DEVICES for CUDA), or on the CPU a share of the threads. A job that needs more than there
are runs alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Any

from titanlike.launch.environment import (
    available_cores,
    import_path,
    interpreter,
    without_rank_variables,
)
from titanlike.launch.failures import describe_exit
from titanlike.launch.signals import Interrupted, interruptible
from titanlike.launch.stop_request import StopRequest
from titanlike.metrics.result import ended_by_max_time, read_result, write_result

OUTPUT = "output.log"  # of a job that has no terminal
_POLL = 0.05  # seconds
_KILL_AFTER = 30.0  # seconds from a second signal
_STOPPED = 75  # exit code of a run that has stopped with a checkpoint
_TAIL = 2000  # characters of output that are shown for a job without result.json


@dataclass(frozen=True)
class Command:
    """One job's command."""

    name: str  # for the user: "3: schedule=gpipe"
    function: str  # of the job, as `cli.start_job` takes it
    inner: str
    arguments: list[str]  # of the command line
    overrides: list[str]  # for result.json, where the job itself leaves none
    folder: Path  # where it writes result.json
    ranks: int
    device: str  # auto, cpu or cuda
    checked: bool = False  # its config is known to have no errors


@dataclass(frozen=True)
class EndedJob:
    """How a job's process ended."""

    command: Command
    code: int  # negative: the signal that killed it
    status: str  # as in result.json
    error: str
    value: float | None
    seconds: float

    @property
    def done(self) -> bool:
        """Completed, or ended by its own max_time."""
        return self.status == "completed" or ended_by_max_time(self.status, self.error)


class Processes:
    """Runs commands, at most `parallel` at a time (0 = as many as there are devices for)."""

    def __init__(
        self, parallel: int, begun: Callable[[Command], None], ended: Callable[[EndedJob], None]
    ) -> None:
        self._parallel, self._begun, self._ended = parallel, begun, ended
        self._running: dict[int, _Running] = {}  # by the command's index

    def run(self, builders: list[Callable[[], Command]]) -> list[EndedJob]:
        """Run all commands, each built when it is due; returns how each ended, in their order.

        Raises SystemExit(75) where a signal stopped the jobs with checkpoints, Interrupted where
        it ended them.
        """
        ended: dict[int, EndedJob] = {}
        waiting = dict(enumerate(builders))
        made: dict[int, Command] = {}
        stop = _ForwardedStop(self._forward)
        free, total = list[str](), 0
        with interruptible(stop=stop):
            try:
                while waiting or self._running:
                    for number, build in list(waiting.items()):
                        if stop.received or len(self._running) >= (self._parallel or inf):
                            break
                        new = number not in made
                        command = made[number] = made.get(number) or build()
                        if not total and not ended and not self._running:
                            free = devices(command.device, self._parallel)
                            total = len(free)
                        need = min(command.ranks, total)
                        if need <= len(free):
                            taken, free = free[:need], free[need:]
                            del waiting[number]
                            self._start(number, made.pop(number), taken, total)
                        elif new:
                            break  # a smaller one behind it may fit: tried at the next poll
                    for number in [n for n, at in self._running.items() if at.has_ended]:
                        running = self._running.pop(number)
                        free += running.taken
                        ended[number] = self._end(running)
                    if stop.received and not self._running:
                        break
                    stop.kill_overdue(self._running.values())
                    time.sleep(_POLL)
            finally:
                for running in self._running.values():  # after an exception here
                    running.kill()
        all_done = len(ended) == len(builders) and all(end.done for end in ended.values())
        if stop.received and not all_done:
            if all(end.code in (0, _STOPPED) for end in ended.values()):
                raise SystemExit(_STOPPED)
            raise Interrupted(stop.code())
        return [ended[number] for number in sorted(ended)]

    def _start(self, number: int, command: Command, taken: list[str], total: int) -> None:
        self._begun(command)
        running = self._running[number] = _Running(command, taken, time.monotonic())
        try:
            command.folder.mkdir(parents=True, exist_ok=True)
            (command.folder / "result.json").unlink(missing_ok=True)
            if self._parallel != 1:
                running.output = (command.folder / OUTPUT).open("ab")
            running.process = subprocess.Popen(
                [*interpreter(), "-c", _program(command), *command.arguments],
                env=_environment(command, taken, self._parallel, total),
                stdin=subprocess.DEVNULL,
                stdout=running.output,
                stderr=None if running.output is None else subprocess.STDOUT,
            )
        except OSError as error:
            running.error = f"could not be started: {error.strerror}: {error.filename}"

    def _end(self, running: _Running) -> EndedJob:
        command, seconds = running.command, time.monotonic() - running.start
        if running.output is not None:
            running.output.close()
        result: dict[str, Any] | None = None
        with contextlib.suppress(ValueError, OSError):
            result = read_result(command.folder)
        if result is None or running.error:
            error = running.error or describe_exit(running.code)
            error += _output_tail(command.folder) if running.output else ""
            result = {"status": "failed", "value": None, "error": error}
            record: dict[str, Any] = {**result, "seconds": seconds, "overrides": command.overrides}
            with contextlib.suppress(OSError):  # a full disk may be why it failed
                write_result(command.folder, **record)
        error = result["error"] or ""
        ended = EndedJob(command, running.code, result["status"], error, result["value"], seconds)
        self._ended(ended)
        return ended

    def _forward(self, signum: int) -> bool:
        for running in list(self._running.values()):
            if running.process is not None:
                running.process.send_signal(signum)
        return bool(self._running)


@dataclass
class _Running:
    command: Command
    taken: list[str]  # devices
    start: float
    output: IO[bytes] | None = None
    process: subprocess.Popen[bytes] | None = None
    error: str = ""  # why there is no process

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    @property
    def code(self) -> int:
        """Of a process that has ended."""
        return 1 if self.process is None else self.process.returncode

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()  # its workers end with it


class _ForwardedStop(StopRequest):
    """Forwards signals to the jobs, which stop after a step, or immediately at the second one."""

    def __init__(self, forward: Callable[[int], bool]) -> None:
        super().__init__()
        self._forward = forward
        self._last, self._times, self._code = -inf, 0, 0

    def receive(self, signum: int) -> bool:
        """Pass a signal on; False where there is nobody to end first."""
        now = time.monotonic()
        if now - self._last < 1.0:  # Ctrl-C reaches every process of a terminal at once
            return True
        self._last, self._code, self._times = now, signum, self._times + 1
        return self._forward(signum)

    @property
    def received(self) -> bool:
        return bool(self._code)

    def code(self, max_time: float | None = None) -> int:
        return self._code

    def kill_overdue(self, jobs: Iterable[_Running]) -> None:
        """Kill jobs that have not ended long after a second signal."""
        if self._times > 1 and time.monotonic() - self._last > _KILL_AFTER:
            for running in jobs:
                running.kill()


def devices(device: str, parallel: int) -> list[str]:
    """The devices that jobs share: GPUs by name, or cores of the CPU.

    Empty where jobs run one after another; cores only where `parallel` is 0.
    """
    if parallel == 1:
        return []
    if device != "cpu":
        from titanlike.device import accelerator  # imports torch

        if names := accelerator.visible_names():
            return names
    return [] if parallel else [f"core {index}" for index in range(available_cores())]


def _environment(command: Command, taken: list[str], parallel: int, total: int) -> dict[str, str]:
    env = without_rank_variables(os.environ)
    if parallel == 1:
        return env
    if taken and not taken[0].startswith("core "):
        from titanlike.device.accelerator import visible_variable

        env[visible_variable()] = ",".join(taken)
        at_once = max(1, total // command.ranks)
    else:
        at_once = parallel or max(1, total // command.ranks)
    env.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // (at_once * command.ranks))))
    return env


def _program(command: Command) -> str:
    """The Python code of a job's process: the sweep's own import path and program."""
    words = command.function, command.inner, str(command.folder), command.checked
    call = f"run_as_process(lambda: start_job{words!r})"
    return (
        f"import sys; sys.path[:] = {import_path()!r}; sys.argv[0] = {sys.argv[0]!r}; "
        "from signal import SIGTERM; from titanlike.launch.signals import die_with_parent; "
        f"die_with_parent({os.getpid()}, SIGTERM); "  # a stop request, if it trains
        "from titanlike.launch.process_end import run_as_process; "
        f"from titanlike.cli import start_job; {call}"
    )


def _output_tail(folder: Path) -> str:
    """The last lines in a job's output.log."""
    text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(f"\n  {line}" for line in lines[-5:])
