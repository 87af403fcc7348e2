"""Runs the jobs of a sweep: only checking them, on the ranks of torchrun or srun, or as processes.

A job's process runs as if the user had typed its command, so a crash does not affect the next one.
Sequential jobs share the terminal; parallel ones write to their own output.log, and their beginning
and end are reported.

Parallel jobs share the CPU's threads. Which GPUs a job uses is up to the scheduler, or to
CUDA_VISIBLE_DEVICES of a command.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import IO, Any

from titanlike.config.credentials import redact
from titanlike.config.errors import ConfigError, Problem, quoted
from titanlike.config.imports import outside
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config, Wandb
from titanlike.driver.job import JobRunner, ResultReporter, config_problems, with_run_name
from titanlike.driver.sweep import SweepRun
from titanlike.driver.sweep_status import Job
from titanlike.launch.environment import (
    available_cores,
    import_path,
    interpreter,
    without_rank_variables,
)
from titanlike.launch.failures import JobFailed, describe_exit
from titanlike.launch.signals import Interrupted, StopRequest, interruptible
from titanlike.metrics.console import OPENING
from titanlike.metrics.run_files import ended_by_max_time, read_result, write_result

OUTPUT = "output.log"  # output of a job without a terminal
_CHECK_TIME = 60.0  # seconds spent on checking jobs before the first begins
_POLL = 0.05  # seconds
_KILL_AFTER = 30.0  # seconds after a second signal
_STOPPED = 75  # exit code of a run that stopped with a checkpoint
_TAIL = 2000  # characters of output searched for a crashed job's last lines


@dataclass
class Prepared:
    """A job and its config, composed when first read since that takes time."""

    job: Job
    compose: Callable[[], tuple[Config | None, list[Problem]]]
    checked: bool = False  # checked without error; otherwise checked when it begins

    @cached_property
    def composed(self) -> tuple[Config | None, list[Problem]]:
        """The config (None if the overrides do not compose), and problems of parsing."""
        return self.compose()

    @property
    def config(self) -> Config | None:
        return self.composed[0]

    @property
    def name(self) -> str:
        return f"{self.job.number}: {','.join(self.job.swept)}".rstrip(": ")


# a completed job's value, or why there is none
End = float | None | Exception
Ends = dict[int, End]  # job's number -> its end
Here = Callable[[Prepared], float | None]  # runs a job in this process; raises JobFailed


def run_jobs(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared], here: Here) -> list[End]:
    """Run jobs to their ends. All are checked before the first begins."""
    refused = _check_all(sweep, runner, jobs)
    valid = [item for item in jobs if item.job.number not in refused]
    sweep.refused += len(refused)
    ends: Ends = {**refused}
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
    else:
        processes = run_processes(sweep, runner, valid)
        ends |= {
            item.job.number: end.value if end.done else JobFailed(end.error, end.error)
            for item, end in zip(valid, processes, strict=True)
        }
    return [ends.get(item.job.number) for item in jobs]


def _check_all(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared]) -> dict[int, JobFailed]:
    """Return errors of jobs by number. Jobs that the time limit leaves out are checked later."""
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
            what = " is invalid" if failed.invalid else ""
            sweep.say_error(f"job {item.name}{what}{_indented(failed.error)}")
            refused[item.job.number] = failed
        item.checked = failed is None
    return refused


def _refusal(runner: JobRunner, item: Prepared) -> JobFailed | None:
    """Return what is wrong with a job's config (errors, or a user's function that fails)."""
    config, problems = item.composed
    try:
        started = runner.ranks.world_size if runner.ranks else None
        if config is not None:
            problems = problems + config_problems(config, started, problems)
    except JobFailed as failed:
        return failed
    text = str(ConfigError(item.hiding(runner.environment) for item in problems))
    return JobFailed(text, text, invalid=True) if text else None


def arguments(sweep: SweepRun, item: Prepared) -> list[str]:
    """Return a job's command line after the program's name."""
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


# --- as processes ---------------------------------------------------------------------------------


@dataclass
class JobProcess:
    """A job's process, and how it ended."""

    item: Prepared
    folder: Path  # the folder of result.json
    start: float
    output: IO[bytes] | None = None
    process: subprocess.Popen[bytes] | None = None
    status: str = ""  # as in result.json
    error: str = ""  # why it failed or could not be launched
    value: float | None = None

    @property
    def code(self) -> int:
        """The exit code of an ended process; negative: the signal that killed it."""
        return 1 if self.process is None else self.process.returncode

    @property
    def done(self) -> bool:
        """Whether it completed, or reached its own max_time."""
        return self.status == "completed" or ended_by_max_time(self.status, self.error)

    def end(self, seconds: float) -> None:
        """Read the result of an ended process, or write a result if it left none."""
        result: dict[str, Any] | None = None
        with contextlib.suppress(ValueError, OSError):
            result = read_result(self.folder)
        if result is None or self.error:
            error = self.error or describe_exit(self.code)
            if self.output is not None:  # report its last lines
                self.output.close()
                text = (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
                lines = [line for line in text[-_TAIL:].splitlines() if line.strip()]
                error += "".join(f"\n  {line}" for line in lines[-5:])
            result = {"status": "failed", "value": None, "error": error}
            record: dict[str, Any] = {"seconds": seconds, "overrides": self.item.job.overrides}
            with contextlib.suppress(OSError):  # it may have failed because the disk is full
                write_result(self.folder, **result, **record)
        if self.output is not None:
            self.output.close()
        self.status, self.value = result["status"], result["value"]
        self.error = result["error"] or ""


def run_processes(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared]) -> list[JobProcess]:
    """Run jobs, at most sweep.parallel at a time; return the ended processes.

    Raises SystemExit(75) if a signal stopped the jobs with checkpoints, Interrupted if it ended
    them.
    """
    parallel, waiting = sweep.settings.parallel, [*jobs]
    running: dict[int, JobProcess] = {}
    ended: dict[int, JobProcess] = {}
    stop = _ForwardedStop(running)
    with interruptible(stop=stop):
        try:
            while waiting or running:
                while waiting and len(running) < parallel and not stop.received:
                    item, begun = waiting.pop(0), len(running) + len(ended) + 1
                    of = f"  ({begun} of {len(jobs)})" if len(jobs) > 1 else ""
                    alone = f"\njob {item.name}{of}"
                    sweep.say(alone if parallel == 1 else f"job {item.name} begins{of}")
                    running[item.job.number] = _start(sweep, runner, item)
                for number, job in list(running.items()):
                    if job.process is not None and job.process.poll() is None:
                        continue
                    del running[number]
                    ended[number] = job
                    job.end(time.monotonic() - job.start)
                    _say_end(sweep, job)
                if stop.received and not running:
                    break
                stop.kill_overdue()
                time.sleep(_POLL)
        finally:
            for job in running.values():  # only after an exception
                if job.process is not None:
                    job.process.kill()  # its workers die with it
    if stop.received and not (len(ended) == len(jobs) and all(job.done for job in ended.values())):
        if all(job.code in (0, _STOPPED) for job in ended.values()):
            raise SystemExit(_STOPPED)
        raise Interrupted(stop.code())
    return [ended[item.job.number] for item in jobs]


def _start(sweep: SweepRun, runner: JobRunner, item: Prepared) -> JobProcess:
    """Launch a job's process."""
    folder, parallel = sweep.job_folder(item.job), sweep.settings.parallel
    job = JobProcess(item, folder, time.monotonic())
    env = without_rank_variables(os.environ)
    if parallel == 1:
        env[OPENING] = str(sweep.opening)
    else:
        ranks = item.config.world_size if item.config else 1
        env.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // (parallel * ranks))))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").unlink(missing_ok=True)
        if parallel != 1:
            job.output = (folder / OUTPUT).open("ab")
        job.process = subprocess.Popen(
            [*interpreter(), "-c", _program(runner, folder, item), *arguments(sweep, item)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=job.output,
            stderr=None if job.output is None else subprocess.STDOUT,
        )
    except OSError as error:
        job.error = f"could not be started: {error.strerror}: {error.filename}"
    return job


def _say_end(sweep: SweepRun, job: JobProcess) -> None:
    if job.done and sweep.settings.parallel == 1:
        return  # the job printed it itself
    what = "is done" if job.status == "completed" else job.status
    value = f", value {job.value:.6g}" if job.value is not None else ""
    line = f"job {job.item.name} {what} after {time.monotonic() - job.start:.0f} s{value}"
    if job.done:
        sweep.say(line)
    else:
        sweep.say_error(line + _indented(job.error))


class _ForwardedStop(StopRequest):
    """Forwards signals to the jobs, which stop after a step, or immediately at the second one."""

    def __init__(self, jobs: dict[int, JobProcess]) -> None:
        super().__init__()
        self._jobs = jobs
        self._last, self._times, self._code = -inf, 0, 0

    def receive(self, signum: int) -> bool:
        """Forward a signal; return False if there is no job to stop first."""
        now = time.monotonic()
        if now - self._last < 1.0:  # Ctrl-C also reaches the terminal's other processes
            return True
        self._last, self._code, self._times = now, signum, self._times + 1
        for job in list(self._jobs.values()):
            if job.process is not None:
                job.process.send_signal(signum)
        return bool(self._jobs)

    @property
    def received(self) -> bool:
        return bool(self._code)

    def code(self, max_time: float | None = None) -> int:
        return self._code

    def kill_overdue(self) -> None:
        """Kill jobs that still run long after a second signal."""
        if self._times > 1 and time.monotonic() - self._last > _KILL_AFTER:
            for job in self._jobs.values():
                if job.process is not None:
                    job.process.kill()


def _program(runner: JobRunner, folder: Path, item: Prepared) -> str:
    """Return the Python code of a job's process, with the sweep's import path and program."""
    call = f"start_job{(runner.function, runner.folder, str(folder), item.checked)!r}"
    return (
        f"import sys; sys.path[:] = {import_path()!r}; sys.argv[0] = {sys.argv[0]!r}; "
        "from signal import SIGTERM; from titanlike.launch.signals import die_with_parent; "
        f"die_with_parent({os.getpid()}, SIGTERM); "  # a stop request, if it trains
        f"from titanlike.cli import run_as_process, start_job; run_as_process(lambda: {call})"
    )
