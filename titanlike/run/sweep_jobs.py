"""Checks the jobs of a sweep, and runs them as processes.

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
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from titanlike.core.config.credentials import redact
from titanlike.core.config.errors import ConfigError, Problem, quoted
from titanlike.core.config.imports import outside
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import Config
from titanlike.core.launch import environment
from titanlike.core.launch.failures import JobFailed, describe_exit
from titanlike.core.launch.signals import Interrupted, StopRequest, interruptible
from titanlike.run.job import JobRunner, ResultReporter, config_problems
from titanlike.run.sweep import JobRow, SweepRun

OUTPUT = "output.log"  # output of a job without a terminal
_POLL = 0.05  # seconds
_STOPPED = 75  # exit code of a run that stopped with a checkpoint
_TAIL = 2000  # characters of output searched for a crashed job's last lines


Composed = tuple[Config | None, list[Problem]]  # None if Hydra cannot compose the config


def run_jobs(
    sweep: SweepRun, runner: JobRunner, jobs: Mapping[int, Composed]
) -> dict[int, float | None]:
    """Run jobs to their ends, once all are checked; return the values of those that completed."""
    refused, valid = dict[int, JobFailed](), dict[int, Config]()
    for number, (config, problems) in jobs.items():
        for line in outside(to_plain(config), {}) if config is not None else ():
            if line not in sweep.notes:  # before user code is imported
                sweep.notes.append(line)
                sweep.say(redact(line))
        try:
            if config is not None:
                valid[number] = config
                problems = problems + config_problems(config, None, problems)
            text = str(ConfigError(problem.hiding(runner.environment) for problem in problems))
            failed = JobFailed(text, text, invalid=True) if text else None
        except JobFailed as error:  # a user's function
            failed = error
        if failed is not None:
            what = " is invalid" if failed.invalid else ""
            sweep.say(f"job {sweep.label(number)}{what}{_indented(failed.error)}", error=True)
            refused[number] = failed
            valid.pop(number, None)
    sweep.refused += len(refused)
    if sweep.check or not (valid or sweep.begun):
        return {}
    sweep.begun = True
    for number, failed in refused.items():
        with contextlib.suppress(OSError):
            _reporter(sweep, number).job_failed(failed)
    return {row.number: row.value for row in run_processes(sweep, runner, valid) if row.done}


def _reporter(sweep: SweepRun, number: int) -> ResultReporter:
    """Return what writes a job's result.json; an earlier one is deleted."""
    folder = sweep.job_folder(number)
    folder.mkdir(parents=True, exist_ok=True)
    return ResultReporter(folder, sweep.jobs[number], 1)


def _indented(text: str) -> str:
    return "".join(f"\n  {line}" for line in text.splitlines())


# --- as processes ---------------------------------------------------------------------------------


class JobProcess(NamedTuple):
    """A job's process."""

    number: int
    process: subprocess.Popen[bytes]
    reporter: ResultReporter
    start: float


def run_processes(sweep: SweepRun, runner: JobRunner, jobs: Mapping[int, Config]) -> list[JobRow]:
    """Run jobs, at most sweep.parallel at a time; return how they ended, in this order.

    Raises SystemExit(75) if a signal stopped the jobs with checkpoints, Interrupted if it ended
    them.
    """
    waiting, rows, codes = [*jobs], list[JobRow](), list[int]()
    running: list[JobProcess] = []
    stop = _ForwardedStop(running)
    with interruptible(stop=stop):
        try:
            while running or (waiting and not stop.received):
                while waiting and len(running) < sweep.parallel and not stop.received:
                    number, begun = waiting.pop(0), len(running) + len(rows) + 1
                    of = f"  ({begun} of {len(jobs)})" if len(jobs) > 1 else ""
                    label = f"job {sweep.label(number)}"
                    sweep.say(f"\n{label}{of}" if sweep.parallel == 1 else f"{label} begins{of}")
                    running.append(_start(sweep, runner, number, jobs[number]))
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    codes.append(job.process.returncode)
                    rows.append(_end(sweep, job))
                time.sleep(_POLL)
        finally:
            for job in running:  # only after an exception
                job.process.kill()  # its workers die with it
    if stop.received and not (len(rows) == len(jobs) and all(row.done for row in rows)):
        if {*codes} <= {0, _STOPPED}:
            raise SystemExit(_STOPPED)
        raise Interrupted(stop.code())
    return rows


def _start(sweep: SweepRun, runner: JobRunner, number: int, config: Config) -> JobProcess:
    """Launch a job's process, as if its command had been typed. Raises OSError."""
    reporter, folder = _reporter(sweep, number), sweep.job_folder(number)
    env = environment.without_rank_variables(os.environ)
    env.setdefault("WANDB_RUN_GROUP", sweep.group)
    env["WANDB_NAME"] = sweep.job_name(number) or sweep.group
    words = [*sweep.options(), *sweep.jobs[number], "hydra.mode=RUN", f"hydra.job.num={number}"]
    words += [f"run_dir={quoted(str(sweep.folder / str(number)))}"]
    command = [*environment.interpreter(), "-c", _program(runner, folder), *words]
    with contextlib.ExitStack() as stack:
        output = None
        if sweep.parallel > 1:
            output = stack.enter_context((folder / OUTPUT).open("ab"))
            threads = max(1, environment.available_cores() // (sweep.parallel * config.world_size))
            env.setdefault("OMP_NUM_THREADS", str(threads))
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    return JobProcess(number, process, reporter, time.monotonic())


def _end(sweep: SweepRun, job: JobProcess) -> JobRow:
    """Say how a job ended, after writing a result if it has left none."""
    folder = sweep.job_folder(job.number)
    if not (folder / "result.json").exists():
        error = describe_exit(job.process.returncode)
        with contextlib.suppress(OSError):  # without a terminal: its last lines
            text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text[-_TAIL:].splitlines() if line.strip()]
            error += _indented("\n".join(lines[-5:]))
        job.reporter.write("failed", error=error)
    row = sweep.row(job.number)
    if not (row.done and sweep.parallel == 1):  # else it has said it itself
        what = "is done" if row.status == "completed" else row.status
        value = f", value {row.value:.6g}" if row.done and row.value is not None else ""
        line = f"job {sweep.label(job.number)} {what} after {time.monotonic() - job.start:.0f} s{value}"
        sweep.say(line + _indented(row.error or "") * (not row.done), error=not row.done)
    return row


class _ForwardedStop(StopRequest):
    """Forwards signals to the jobs, which stop after a step, or immediately at the second one."""

    def __init__(self, running: list[JobProcess]) -> None:
        super().__init__()
        self._running = running

    def receive(self, signum: int) -> bool:
        """Forward a signal; return False if there is no job to stop first."""
        now = time.monotonic()
        if now - self._received_at < 1.0:  # Ctrl-C also reaches the terminal's other processes
            return True
        self._signum, self._received_at = signum, now
        for job in [*self._running]:
            job.process.send_signal(signum)
        return bool(self._running)


def _program(runner: JobRunner, folder: Path) -> str:
    """Return the Python code of a job's process, with the sweep's import path and program."""
    call = f"start_job{(runner.function, runner.folder, str(folder), True)!r}"
    return (
        f"import sys; sys.path[:] = {environment.import_path()!r}; sys.argv[0] = {sys.argv[0]!r}; "
        "from signal import SIGTERM; from titanlike.core.launch.signals import die_with_parent; "
        f"die_with_parent({os.getpid()}, SIGTERM); "  # a stop request, if it trains
        f"from titanlike.cli import run_as_process, start_job; run_as_process(lambda: {call})"
    )
