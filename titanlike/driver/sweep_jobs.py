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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from titanlike.config.credentials import redact
from titanlike.config.errors import ConfigError, Problem, quoted
from titanlike.config.imports import outside
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config
from titanlike.driver.job import JobRunner, ResultReporter, config_problems
from titanlike.driver.sweep import SweepRun
from titanlike.driver.sweep_table import JobRow
from titanlike.launch.environment import (
    available_cores,
    import_path,
    interpreter,
    without_rank_variables,
)
from titanlike.launch.failures import JobFailed, describe_exit
from titanlike.launch.signals import Interrupted, StopRequest, interruptible

OUTPUT = "output.log"  # output of a job without a terminal
_POLL = 0.05  # seconds
_STOPPED = 75  # exit code of a run that stopped with a checkpoint
_TAIL = 2000  # characters of output searched for a crashed job's last lines


@dataclass
class ComposedJob:
    """A job and its config."""

    number: int
    name: str  # "3: seed=1"
    composed: DictConfig | None = None  # by Hydra; this and config: None if it cannot compose it
    config: Config | None = None
    problems: Sequence[Problem] = ()  # of composing and parsing


def run_jobs(
    sweep: SweepRun,
    runner: JobRunner,
    jobs: list[ComposedJob],
    here: Callable[[ComposedJob], float | None],
) -> dict[int, float | None]:
    """Run jobs to their ends, once all are checked; return the values of those that completed.

    here: runs a job in this process, on the ranks of `runner`; raises JobFailed.
    """
    refused: dict[int, JobFailed] = {}
    for item in jobs:
        for line in outside(to_plain(item.config), {}) if item.config is not None else ():
            if line not in sweep.notes:  # before user code is imported
                sweep.notes.append(line)
                sweep.say(redact(line))
        if failed := _refusal(runner, item):
            what = " is invalid" if failed.invalid else ""
            sweep.say(f"job {item.name}{what}{_indented(failed.error)}", error=True)
            refused[item.number] = failed
    valid = [item for item in jobs if item.number not in refused]
    sweep.refused += len(refused)
    if sweep.check or not (valid or sweep.begun):
        return {}
    sweep.begun = True
    for item in jobs:
        if failed := refused.get(item.number):
            with contextlib.suppress(OSError):
                _reporter(sweep, item).job_failed(failed)
    if runner.ranks is None:
        return {row.number: row.value for row in run_processes(sweep, runner, valid) if row.done}
    values = {}
    for item in valid:
        sweep.say(f"\njob {item.name}")
        with contextlib.suppress(JobFailed):  # it has been reported
            values[item.number] = here(item)
    return values


def _refusal(runner: JobRunner, item: ComposedJob) -> JobFailed | None:
    """Return what is wrong with a job's config (errors, or a user's function that fails)."""
    problems = [*item.problems]
    try:
        started = runner.ranks.world_size if runner.ranks else None
        if item.config is not None:
            problems += config_problems(item.config, started, problems)
    except JobFailed as failed:
        return failed
    text = str(ConfigError(problem.hiding(runner.environment) for problem in problems))
    return JobFailed(text, text, invalid=True) if text else None


def _reporter(sweep: SweepRun, item: ComposedJob) -> ResultReporter:
    """Return what writes a job's result.json; an earlier one is deleted."""
    folder = sweep.job_folder(item.number)
    folder.mkdir(parents=True, exist_ok=True)
    return ResultReporter(folder, sweep.jobs[item.number], 1)


def _indented(text: str) -> str:
    return "".join(f"\n  {line}" for line in text.splitlines())


# --- as processes ---------------------------------------------------------------------------------


class JobProcess(NamedTuple):
    """A job's process."""

    item: ComposedJob
    process: subprocess.Popen[bytes]
    reporter: ResultReporter
    start: float


def run_processes(sweep: SweepRun, runner: JobRunner, jobs: list[ComposedJob]) -> list[JobRow]:
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
                    item, begun = waiting.pop(0), len(running) + len(rows) + 1
                    of = f"  ({begun} of {len(jobs)})" if len(jobs) > 1 else ""
                    alone = f"\njob {item.name}{of}"
                    sweep.say(alone if sweep.parallel == 1 else f"job {item.name} begins{of}")
                    running.append(_start(sweep, runner, item))
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


def _start(sweep: SweepRun, runner: JobRunner, item: ComposedJob) -> JobProcess:
    """Launch a job's process, as if its command had been typed. Raises OSError."""
    reporter, folder = _reporter(sweep, item), sweep.job_folder(item.number)
    env = without_rank_variables(os.environ)
    env.setdefault("WANDB_RUN_GROUP", sweep.group)
    env["WANDB_NAME"] = sweep.job_name(item.number) or sweep.group
    words = [*sweep.options(), *sweep.jobs[item.number], "hydra.mode=RUN"]
    words += [f"hydra.job.num={item.number}"]
    words += [f"run_dir={quoted(str(sweep.folder / str(item.number)))}"]
    command = [*interpreter(), "-c", _program(runner, folder), *words]
    with contextlib.ExitStack() as stack:
        output = None
        if sweep.parallel > 1:
            output = stack.enter_context((folder / OUTPUT).open("ab"))
            ranks = item.config.world_size if item.config else 1
            threads = max(1, available_cores() // (sweep.parallel * ranks))
            env.setdefault("OMP_NUM_THREADS", str(threads))
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    return JobProcess(item, process, reporter, time.monotonic())


def _end(sweep: SweepRun, job: JobProcess) -> JobRow:
    """Say how a job ended, after writing a result if it has left none."""
    folder = sweep.job_folder(job.item.number)
    if not (folder / "result.json").exists():
        error = describe_exit(job.process.returncode)
        with contextlib.suppress(OSError):  # without a terminal: its last lines
            text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text[-_TAIL:].splitlines() if line.strip()]
            error += _indented("\n".join(lines[-5:]))
        job.reporter.write("failed", error=error)
    row = sweep.row(job.item.number)
    if not (row.done and sweep.parallel == 1):  # else it has said it itself
        what = "is done" if row.status == "completed" else row.status
        value = f", value {row.value:.6g}" if row.done and row.value is not None else ""
        line = f"job {job.item.name} {what} after {time.monotonic() - job.start:.0f} s{value}"
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
        f"import sys; sys.path[:] = {import_path()!r}; sys.argv[0] = {sys.argv[0]!r}; "
        "from signal import SIGTERM; from titanlike.launch.signals import die_with_parent; "
        f"die_with_parent({os.getpid()}, SIGTERM); "  # a stop request, if it trains
        f"from titanlike.cli import run_as_process, start_job; run_as_process(lambda: {call})"
    )
