"""Runs the jobs of a sweep: only checked, on the ranks of torchrun or srun, submitted, or as processes.

Each process of a job is as if the user had typed its command: a crash does not affect the next one.
One after another they share the terminal; several at a time, each writes to its own output.log, and
a line says when it begins and ends.

Several share the devices: each job gets as many GPUs as it has ranks (by the driver's variable,
CUDA_VISIBLE_DEVICES for CUDA), or on the CPU a share of the threads. A job that needs more than there
are runs alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import IO, Any

from titanlike.config.credentials import redact, redact_command, redact_output
from titanlike.config.errors import ConfigError, Problem, quoted
from titanlike.config.imports import outside
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config, Wandb
from titanlike.driver.job import JobRunner, ResultReporter, config_problems, with_run_name
from titanlike.driver.sweep import SweepRun
from titanlike.driver.sweep_status import SUBMITTED, Job
from titanlike.launch.environment import (
    available_cores,
    import_path,
    interpreter,
    without_rank_variables,
)
from titanlike.launch.failures import JobFailed, describe_exit
from titanlike.launch.signals import Interrupted, interruptible
from titanlike.launch.stop_request import StopRequest
from titanlike.metrics.run_files import ended_by_max_time, read_result, write_result

_CHECK_TIME = 60.0  # seconds for checking jobs before the first begins
_SUBMIT_TIMEOUT = 120.0  # seconds
_OUTPUT_SHOWN = 200  # characters of a submit command's output
_RESULT_POLL = 2.0  # seconds, for the results of submitted jobs


@dataclass
class Prepared:
    """A job and its config, which is composed when first read: that takes time."""

    job: Job
    compose: Callable[[], tuple[Config | None, list[Problem]]]
    checked: bool = False  # without an error; else it is checked when it begins

    @cached_property
    def composed(self) -> tuple[Config | None, list[Problem]]:
        """The config, None where the overrides cannot be composed; and problems of form."""
        return self.compose()

    @property
    def config(self) -> Config | None:
        return self.composed[0]

    @property
    def name(self) -> str:
        return f"{self.job.number}: {','.join(self.job.swept)}".rstrip(": ")


# the value of a job that is done, or why there is none
End = float | None | Exception
Here = Callable[[Prepared], float | None]  # runs a job in this process; raises JobFailed


def run_jobs(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared], here: Here) -> list[End]:
    """Run jobs to their ends; submitted ones only if sweep.wait is set.

    All are checked before the first begins, so that what is wrong is known at once.
    """
    refused = _check_all(sweep, runner, jobs)
    valid = [item for item in jobs if item.job.number not in refused]
    sweep.refused += len(refused)
    ends: dict[int, End] = {**refused}
    if sweep.check or not (valid or sweep.begun):
        return [ends.get(item.job.number) for item in jobs]
    sweep.begun = True
    sweep.ran.update(item.job.number for item in jobs)
    for item in jobs:
        if failed := refused.get(item.job.number):
            with contextlib.suppress(OSError):
                folder = sweep.job_folder(item.job)
                folder.mkdir(parents=True, exist_ok=True)
                ResultReporter(folder, item.job.overrides, 1).job_failed(failed)
    if runner.ranks is not None:
        for item in valid:
            sweep.say(f"\njob {item.name}")
            try:
                ends[item.job.number] = here(item)
            except JobFailed as failed:  # already reported
                ends[item.job.number] = failed
    elif sweep.settings.submit is not None:
        ends |= _submit_all(sweep, runner, valid, sweep.settings.submit)
    else:
        ends |= _as_processes(sweep, runner, valid)
    return [ends[item.job.number] for item in jobs]


def _check_all(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared]) -> dict[int, JobFailed]:
    """The errors of the jobs that have some, by number. What takes too long is checked later."""
    refused, start = {}, time.monotonic()
    for index, item in enumerate(jobs):
        if not sweep.check and time.monotonic() - start > _CHECK_TIME:
            rest = "the others are checked when they begin"
            sweep.say(f"checked {index} of {len(jobs)} jobs in {_CHECK_TIME:.0f} s; {rest}")
            break
        for line in outside(to_plain(item.config), {}) if item.config is not None else ():
            if line not in sweep.imports:
                sweep.imports.append(line)
                sweep.say(redact(line))
        if failed := _refusal(runner, item):
            _say_failed(sweep, item, " is invalid" if failed.invalid else "", failed.error)
            refused[item.job.number] = failed
        item.checked = failed is None
    return refused


def _say_failed(sweep: SweepRun, item: Prepared, what: str, error: str) -> JobFailed:
    """Print that a job failed; its end."""
    sweep.say_error(f"job {item.name}{what}{_indented(error)}")
    return JobFailed(error, error)


def _refusal(runner: JobRunner, item: Prepared) -> JobFailed | None:
    """What is wrong with a job's config: nothing, errors, or the failure of a user's function."""
    config, problems = item.composed
    try:
        started = runner.ranks.world_size if runner.ranks else None
        if config is not None:
            problems = problems + config_problems(config, started, problems)
    except JobFailed as failed:
        return failed
    text = str(ConfigError(item.hiding(runner.environment) for item in problems))
    return JobFailed(text, text, invalid=True) if text else None


def _as_processes(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared]) -> dict[int, End]:
    count = 0

    def begun(command: Command) -> None:
        nonlocal count
        count += 1
        of = f"  ({count} of {len(jobs)})" if len(jobs) > 1 else ""
        alone = sweep.settings.parallel == 1
        sweep.say(f"\njob {command.name}{of}" if alone else f"job {command.name} begins{of}")

    def ended(end: JobProcess) -> None:
        if end.done and sweep.settings.parallel == 1:
            return  # the job has printed it
        what = {"completed": "is done"}.get(end.status, end.status)
        value = f", value {end.value:.6g}" if end.value is not None else ""
        line = f"job {end.command.name} {what} after {end.seconds:.0f} s{value}"
        if end.done:
            sweep.say(line)
        else:
            sweep.say_error(line + _indented(end.error))

    def command(item: Prepared) -> Command:
        return Command(
            name=item.name,
            function=runner.function,
            inner=runner.folder,
            arguments=arguments(sweep, item),
            overrides=item.job.overrides,
            folder=sweep.job_folder(item.job),
            ranks=item.config.world_size if item.config else 1,
            device=item.config.device if item.config else "auto",
            checked=item.checked,
        )

    processes = Processes(sweep.settings.parallel, begun, ended)
    ends = processes.run([partial(command, item) for item in jobs])
    return {
        item.job.number: end.value if end.done else JobFailed(end.error, end.error)
        for item, end in zip(jobs, ends, strict=True)
    }


def _submit_all(
    sweep: SweepRun, runner: JobRunner, jobs: list[Prepared], submit: str
) -> dict[int, End]:
    """Pass each job to the submit command; wait for the results if sweep.wait is set."""
    ends: dict[int, End] = {}
    for item in jobs:
        if error := _submit(sweep, runner, item, submit):
            ends[item.job.number] = _say_failed(sweep, item, " is not submitted", error)
    if sweep.settings.wait is not None:
        ends |= _wait_for(sweep, [item for item in jobs if item.job.number not in ends])
    return {item.job.number: ends.get(item.job.number) for item in jobs}


def submit_command(submit: str, arguments: list[str]) -> list[str]:
    """The command with a job's arguments: shell-quoted in place of {args}, else appended."""
    words = shlex.split(submit)
    if any("{args}" in word for word in words):
        return [word.replace("{args}", shlex.join(arguments)) for word in words]
    return [*words, *arguments]


def _submit(sweep: SweepRun, runner: JobRunner, item: Prepared, submit: str) -> str:
    """Submit a job; the error, "" for none."""
    folder = sweep.job_folder(item.job)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    report = ResultReporter(folder, item.job.overrides, 1)  # removes an earlier result
    if not item.checked and (failed := _refusal(runner, item)):
        report.job_failed(failed)
        return failed.error
    output, error_text = _run_submit_command(submit, arguments(sweep, item))
    if error_text:
        report.write("failed", error=error_text)
        return error_text
    shown = output[:_OUTPUT_SHOWN] or "(the command printed nothing)"
    with contextlib.suppress(OSError):
        (folder / SUBMITTED).write_text(f"{time.ctime()}: {shown}\n", encoding="utf-8")
    sweep.say(f"job {item.name} submitted: {shown}")
    return ""


def _run_submit_command(submit: str, arguments: list[str]) -> tuple[str, str]:
    """A submit command's output, or its error; both without the secrets in the command."""
    command = submit_command(submit, arguments)
    name = f"sweep.submit={redact_command(command[0])}"
    try:
        streams: dict[str, Any]
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(command, timeout=_SUBMIT_TIMEOUT, errors="replace", **streams)
    except subprocess.TimeoutExpired:
        return "", f"{name}: did not end within {_SUBMIT_TIMEOUT:.0f} s"
    except OSError as error:
        return "", f"{name}: {redact(str(error))}"
    printed = redact_output(" ".join(f"{done.stdout} {done.stderr}".split()), submit)
    if done.returncode:
        return "", f"{name} ended with {done.returncode}: {printed}"
    return printed, ""


def _wait_for(sweep: SweepRun, jobs: list[Prepared]) -> dict[int, End]:
    ends: dict[int, End] = {}
    assert sweep.settings.wait is not None
    deadline = time.monotonic() + sweep.settings.wait
    while len(ends) < len(jobs):
        for item in jobs:
            if item.job.number in ends:
                continue
            result = _final_result(sweep.job_folder(item.job))
            if result is None and time.monotonic() <= deadline:
                continue
            if result is not None and result["status"] in ("completed", "stopped"):
                ends[item.job.number] = result["value"]
                sweep.say(f"job {item.name} is done")
                continue
            late = f"has not ended after {sweep.settings.wait:g} s (sweep.wait)"
            text = late if result is None else result["error"]
            ends[item.job.number] = _say_failed(sweep, item, " failed", text)
        time.sleep(_RESULT_POLL if len(ends) < len(jobs) else 0)
    return ends


def _final_result(folder: Path) -> dict[str, Any] | None:
    """result.json of a submitted job that will not be restarted; None before that.

    A job that a signal stopped was preempted: its scheduler restarts it.
    """
    with contextlib.suppress(ValueError):
        result = read_result(folder)
        if result is None:
            return None
        status = result["status"]
        if status != "interrupted" and (
            status != "stopped" or ended_by_max_time(status, result["error"])
        ):
            return result
    return None


def arguments(sweep: SweepRun, item: Prepared) -> list[str]:
    """A job's own command line, after the program's name."""
    words = [*sweep.options, *item.job.overrides, "hydra.mode=RUN"]
    words += [f"hydra.job.num={item.job.number}"]
    words += [f"run_dir={quoted(str(sweep.folder / item.job.folder))}"]
    if item.config is not None and isinstance(item.config.logger, Wandb):
        logger = with_run_name(item.config, sweep.group, sweep.job_name(item.job.overrides)).logger
        assert isinstance(logger, Wandb)
        words += [f"logger.group={quoted(logger.group or '')}"]
        words += [f"logger.run_name={quoted(logger.run_name or '')}"]
    return words


def _indented(text: str) -> str:
    return "".join(f"\n  {line}" for line in text.splitlines())


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


@dataclass
class JobProcess:
    """A job's process, and how it ended."""

    command: Command
    taken: list[str]  # devices
    start: float
    output: IO[bytes] | None = None
    process: subprocess.Popen[bytes] | None = None
    status: str = ""  # as in result.json
    error: str = ""  # of its end, or why there is no process
    value: float | None = None
    seconds: float = 0.0

    @property
    def code(self) -> int:
        """Of a process that has ended; negative: the signal that killed it."""
        return 1 if self.process is None else self.process.returncode

    @property
    def done(self) -> bool:
        """Completed, or ended by its own max_time."""
        return self.status == "completed" or ended_by_max_time(self.status, self.error)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()  # its workers end with it


class Processes:
    """Runs commands, at most `parallel` at a time (0 = as many as there are devices for)."""

    def __init__(
        self, parallel: int, begun: Callable[[Command], None], ended: Callable[[JobProcess], None]
    ) -> None:
        self._parallel, self._begun, self._ended = parallel, begun, ended
        self._running: dict[int, JobProcess] = {}  # by the command's index

    def run(self, builders: list[Callable[[], Command]]) -> list[JobProcess]:
        """Run all commands, each built when it is due; returns how each ended, in their order.

        Raises SystemExit(75) where a signal stopped the jobs with checkpoints, Interrupted where
        it ended them.
        """
        ended: dict[int, JobProcess] = {}
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
                    for number, running in list(self._running.items()):
                        if running.process is not None and running.process.poll() is None:
                            continue
                        del self._running[number]
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
        running = self._running[number] = JobProcess(command, taken, time.monotonic())
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

    def _end(self, running: JobProcess) -> JobProcess:
        command = running.command
        running.seconds = time.monotonic() - running.start
        if running.output is not None:
            running.output.close()
        result: dict[str, Any] | None = None
        with contextlib.suppress(ValueError, OSError):
            result = read_result(command.folder)
        if result is None or running.error:
            error = running.error or describe_exit(running.code)
            if running.output:  # its last lines
                path = command.folder / OUTPUT
                text = path.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
                lines = [line for line in text.splitlines() if line.strip()]
                error += "".join(f"\n  {line}" for line in lines[-5:])
            result = {"status": "failed", "value": None, "error": error}
            record: dict[str, Any] = {"seconds": running.seconds, "overrides": command.overrides}
            with contextlib.suppress(OSError):  # a full disk may be why it failed
                write_result(command.folder, **result, **record)
        running.status, running.value = result["status"], result["value"]
        running.error = result["error"] or ""
        self._ended(running)
        return running

    def _forward(self, signum: int) -> bool:
        for running in list(self._running.values()):
            if running.process is not None:
                running.process.send_signal(signum)
        return bool(self._running)


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

    def kill_overdue(self, jobs: Iterable[JobProcess]) -> None:
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
