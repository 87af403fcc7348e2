"""Runs the jobs of a sweep: only checked, on the ranks of torchrun or srun, submitted, or as processes."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from titanlike.config.credentials import redact, redact_command, redact_output
from titanlike.config.errors import ConfigError, Problem, quoted
from titanlike.config.imports import outside
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config, Wandb
from titanlike.driver.job import JobRunner, config_problems, with_run_name
from titanlike.driver.processes import Command, EndedJob, Processes
from titanlike.driver.report import ResultReporter
from titanlike.driver.sweep import SweepRun
from titanlike.driver.sweep_plan import Job
from titanlike.driver.sweep_status import SUBMITTED
from titanlike.launch.failures import JobFailed
from titanlike.metrics.result import ended_by_max_time, read_result

_CHECK_TIME = 60.0  # seconds for checking jobs before the first begins
_SUBMIT_TIMEOUT = 120.0  # seconds
_OUTPUT_SHOWN = 200  # characters of a submit command's output
_POLL = 2.0  # seconds, for the results of submitted jobs


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
    numbers = [item.job.number for item in valid]
    ends |= zip(numbers, _run(sweep, runner, valid, here), strict=True)
    return [ends[item.job.number] for item in jobs]


def _run(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared], here: Here) -> list[End]:
    if runner.ranks is not None:
        return [_run_here(sweep, item, here) for item in jobs]
    if sweep.settings.submit is not None:
        return _submit_all(sweep, runner, jobs)
    return _as_processes(sweep, runner, jobs)


def _check_all(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared]) -> dict[int, JobFailed]:
    """The errors of the jobs that have some, by number. What takes too long is checked later."""
    refused, start = {}, time.monotonic()
    for index, item in enumerate(jobs):
        if not sweep.check and time.monotonic() - start > _CHECK_TIME:
            rest = "the others are checked when they begin"
            sweep.say(f"checked {index} of {len(jobs)} jobs in {_CHECK_TIME:.0f} s; {rest}")
            break
        _say_imports(sweep, item)
        if failed := _refusal(runner, item):
            _say_failed(sweep, item, " is invalid" if failed.invalid else "", failed.error)
            refused[item.job.number] = failed
        item.checked = failed is None
    return refused


def _say_imports(sweep: SweepRun, item: Prepared) -> None:
    lines = outside(to_plain(item.config), {}) if item.config is not None else ()
    for line in lines:
        if line not in sweep.imports:
            sweep.imports.append(line)
            sweep.say(redact(line))


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


def _run_here(sweep: SweepRun, item: Prepared, here: Here) -> End:
    sweep.say(f"\njob {item.name}")
    try:
        return here(item)
    except JobFailed as failed:  # already reported
        return failed


def _as_processes(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared]) -> list[End]:
    count = 0

    def begun(command: Command) -> None:
        nonlocal count
        count += 1
        of = f"  ({count} of {len(jobs)})" if len(jobs) > 1 else ""
        alone = sweep.settings.parallel == 1
        sweep.say(f"\njob {command.name}{of}" if alone else f"job {command.name} begins{of}")

    def ended(end: EndedJob) -> None:
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
    return [end.value if end.done else JobFailed(end.error, end.error) for end in ends]


def _submit_all(sweep: SweepRun, runner: JobRunner, jobs: list[Prepared]) -> list[End]:
    """Pass each job to the submit command; wait for the results if sweep.wait is set."""
    assert sweep.settings.submit is not None
    ends: dict[int, End] = {}
    for item in jobs:
        if error := _submit(sweep, runner, item, sweep.settings.submit):
            ends[item.job.number] = _say_failed(sweep, item, " is not submitted", error)
    if sweep.settings.wait is not None:
        ends |= _wait_for(sweep, [item for item in jobs if item.job.number not in ends])
    return [ends.get(item.job.number) for item in jobs]


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
        time.sleep(_POLL if len(ends) < len(jobs) else 0)
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
