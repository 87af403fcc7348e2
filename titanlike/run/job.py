"""Runs one job in the process that reports it (rank 0 or the driver), config to result.json."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.core.config.credentials import redact_override
from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.watching import Wandb
from titanlike.core.config.imports import outside_code
from titanlike.core.config.parse import write_config
from titanlike.core.config.schema import Config
from titanlike.core.launch import failures, signals
from titanlike.core.launch.environment import RestartState, available_cores, will_restart
from titanlike.core.launch.run_dir_lock import lock_run_dir
from titanlike.core.launch.worker import Job, run_alone
from titanlike.core.metrics.goodput import goodput
from titanlike.core.metrics.run_files import Events, Status, write_result

if TYPE_CHECKING:
    from titanlike.core.launch.torchrun import TorchrunRanks
    from titanlike.run.local import PrestartedWorkers

TRAIN, FIRST_START = "titanlike.core.training.loop.train", "titanlike.proof.first_start.train"
SWEEP_FILE = "sweep.jsonl"  # in a sweep's directory


@dataclass(frozen=True)
class JobRunner:
    """Runs the jobs of a command line; its fields are common to all of them."""

    function: str  # the job's function, `package.module.function`
    folder: str  # a tool's folder inside run_dir, or ""
    ranks: TorchrunRanks | None = None  # launched by torchrun or srun; None = launched here
    restart_state: RestartState = field(default_factory=RestartState)
    restart: bool = False  # whether this command was started before
    checked: bool = False  # whether the sweep has checked the job's config
    # single runs only: returns the prestarted workers, always the same
    workers: Callable[[], PrestartedWorkers] | None = None
    # value of an environment variable -> its name, which errors show instead
    environment: dict[str, str] = field(default_factory=dict)
    callbacks: tuple[object, ...] = ()  # for a job in this process, see Worker

    def job_of(self, config: Config) -> str:
        """Return the job's function: with `verify`, at the first launch it also compares."""
        if self.function != TRAIN or config.world_size == 1 or config.verify.name == "off":
            return self.function
        return FIRST_START if config.verify.name == "required" or outside_code(config) else TRAIN

    def start_workers(self, config: Config) -> None:
        """Launch the workers of a single run, which import torch while its config is checked."""
        many = config.world_size > max(8, available_cores())  # probably a mistake
        checks = config.device not in ("auto", "cpu")  # checking that it exists needs torch
        if self.workers and self.ranks is None and not (self._alone(config) or many or checks):
            self.workers().start(config.world_size, self.job_of(config))

    def _alone(self, config: Config) -> bool:
        """Return whether a job launched here runs in this process, and so cannot be restarted."""
        return config.world_size == 1 and (bool(self.folder) or not config.launch.max_restarts)

    def run(
        self,
        config: Config,
        problems: list[Problem],
        run_dir: Path,
        overrides: list[str],
        name: tuple[str, str] | None = None,
    ) -> JobEnd:
        """Run a job to its end and write result.json.

        problems: found when the config was parsed. name: of the sweep and of this job in it; None
        for a single run. Raises Interrupted if a signal ended the job immediately.
        """
        # 1. make the run's folder
        run_dir = run_dir / self.folder
        run_dir.mkdir(parents=True, exist_ok=True)
        config = replace(config, run_dir=str(run_dir))
        folder = config.checkpoint.folder
        if folder is not None and "://" not in folder:  # independent of the working directory
            folder = str(Path(folder).expanduser().absolute())
            config = replace(config, checkpoint=replace(config.checkpoint, folder=folder))
        overrides = [redact_override(text) for text in overrides]
        if name is not None and isinstance(config.logger, Wandb):
            logger, sweep = config.logger, os.environ.get("WANDB_RUN_GROUP") or name[0]
            group, run_name = logger.group or sweep, logger.run_name or name[1]
            config = replace(config, logger=replace(logger, group=group, run_name=run_name))
        stop = signals.StopRequest()
        reporter = ResultReporter(run_dir, overrides, config.world_size, stop)
        with signals.interruptible(reporter.interrupted, stop), lock_run_dir(run_dir):
            try:
                # 2. fit it to the available ranks, check and write it
                config = self._prepare(config, problems, run_dir, single=name is None)
                # 3. run the job on all ranks
                started = self.restart_state.get("started") if name is None else None
                start = float(started or time.time())
                job = Job(self.job_of(config), config, run_dir, overrides, start)
                if self.ranks:
                    result = self.ranks.run(job, stop, reporter.failed)
                elif self._alone(config):
                    result = run_alone(job, stop, reporter.failed, self.callbacks)
                else:
                    from titanlike.run.local import run_local

                    # a tool's job cannot be restarted
                    restarted = None if self.folder else partial(restarted_config, job.config)
                    workers = self.workers() if self.workers and name is None else None
                    result = run_local(job, stop, restarted, workers)
            # 4. write result.json
            except signals.Interrupted as interrupted:
                reporter.interrupted(interrupted)
                self._write_report(config, run_dir)
                raise
            except ConfigError as invalid:
                error = ConfigError(item.hiding(self.environment) for item in invalid.problems)
                reporter.write("invalid", error=str(error))
                return JobEnd(print_problems(error.problems), str(error))
            except failures.JobFailed as failed:
                if not failed.taken_over:
                    reporter.job_failed(failed)
                    self._write_report(config, run_dir)
                print(f"\n{failed}", file=sys.stderr)
                failures.record_for_torchrun(failed)
                code = 2 if failed.invalid else 1
                return JobEnd(code, failed.error, ends_sweep=failed.ends_sweep)
            value, code = result.get("value"), result.get("exit_code", 0)
            stopped, verification = result.get("stopped"), result.get("verification", "")
            error_text = f"exit code {code}" if code else ""
            if stopped:
                error_text = f"stopped early by {stopped}, with a checkpoint; the same command "
                error_text += "resumes the run"
                code = 0 if will_restart() else code
            status: Status = "stopped" if stopped else "completed"
            reporter.write(status, value, error_text if stopped else None, verification)
            self._write_report(config, run_dir)
        # a signal ends the sweep, too
        by_signal = stopped is not None and stopped != signals.stop_reason(signals.MAX_TIME)
        return JobEnd(code, error_text, value, ends_sweep=by_signal)

    def _write_report(self, config: Config, run_dir: Path) -> None:
        """Write report.html of a run that has trained. Never makes a run fail."""
        if self.folder or not config.report or not (run_dir / "metrics.jsonl").exists():
            return
        try:
            from titanlike.watch import report

            charts_of: report.ChartsOf | None = None
            if config.pp > 1 or config.timeline.enabled:
                from titanlike.planning.run_charts import run_charts

                charts_of = run_charts
            report.write_reports(run_dir / report.FILE, [run_dir], charts_of, quick=True)
        except Exception as error:
            _warn(f"report.html could not be written: {type(error).__name__}: {error}")

    def _prepare(self, config: Config, known: list[Problem], run_dir: Path, single: bool) -> Config:
        """Return the config to run, after writing config.yaml. Raises ConfigError."""
        from titanlike.core.checkpoint.discovery import resumed_config
        from titanlike.run import checks

        if self.restart:
            config, _ = resumed_config(config)
        started = self.ranks.world_size if self.ranks else None
        ranks = checks.available_ranks(started, self.restart_state)
        problems = [*known]
        if not (single or self.checked):  # a single run is checked already
            problems += config_problems(config, ranks, problems)
        if problems:
            raise ConfigError(problems)
        if config.schedule.name == "auto":
            from titanlike.planning.auto_schedule import ORDER, with_found_order

            note = f"kept in {run_dir / ORDER}"
            config = with_found_order(config, lambda line: print(f"{line}; {note}", flush=True))
        if self.folder or not (run_dir / "config.yaml").exists():
            write_config(config, run_dir)  # a resumed run writes it after loading (session.py)
        if ranks is not None:
            self.restart_state.set(checks.RANKS, str(ranks))
        return config


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    code: int  # exit code of a single run
    error: str = ""  # why it did not complete
    value: float | None = None  # the objective that a sweep compares
    ends_sweep: bool = False  # whether these processes run no further jobs


def config_problems(
    config: Config,
    world_size: int | None,
    known: list[Problem],
    when_valid: Callable[[], object] | None = None,
) -> list[Problem]:
    """Return problems of a config beyond those of parsing (`known`), without consequences of these.

    when_valid: called once the cheap checks pass, before those that take seconds. Raises JobFailed
    if a user's function fails in a check.
    """
    from titanlike.run.checks import problems

    try:
        others = problems(config, world_size, _warn, when_valid)
    except Exception as error:
        if known:  # defaults replace unparsed values, and may not fit together
            return []
        failure = failures.describe(0, error)
        text = f"{failure.error}\n{failure.frames}".rstrip()
        raise failures.JobFailed(text, failure.error) from error
    keys = {problem.key.lstrip("+~") for problem in known}
    unique = {str(problem): problem for problem in others if problem.key not in keys}
    return list(unique.values())


def _warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def restarted_config(config: Config, failed: failures.JobFailed, number: int) -> Config:
    """Report restart `number` after a failure, also in events.jsonl; return the config for it."""
    from titanlike.core.checkpoint.discovery import resumed_config

    resumed, step = resumed_config(config)
    most = config.launch.max_restarts
    where = f"from step {step}" if step else "from the beginning"
    text = f"{failed.error}; restart {number} of {most} {where}"
    say = partial(print, "", sep="\n", file=sys.stderr, flush=True)
    Events(Path(config.run_dir), say).log("restart", step, text, restart=number, of=most)
    return resumed


class ResultReporter:
    """Writes result.json when a job ends, from any thread."""

    def __init__(
        self,
        run_dir: Path,
        overrides: list[str],
        world_size: int,
        stop: signals.StopRequest | None = None,
    ) -> None:
        self._run_dir, self._overrides, self._world_size = run_dir, overrides, world_size
        self._stop = stop or signals.StopRequest()
        self._start = time.monotonic()
        (run_dir / "result.json").unlink(missing_ok=True)  # from an earlier launch

    def write(
        self,
        status: Status,
        value: float | None = None,
        error: str | None = None,
        verification: str = "",
    ) -> None:
        run_dir, overrides = self._run_dir, self._overrides
        seconds = time.monotonic() - self._start
        try:
            shares = goodput(run_dir, time.time())
            write_result(run_dir, status, value, error, seconds, overrides, verification, shares)
        except OSError as problem:  # a full disk must not hide how the job ended
            print(f"result.json could not be written: {problem}", file=sys.stderr)

    def job_failed(self, failed: failures.JobFailed) -> None:
        self.write("invalid" if failed.invalid else "failed", error=failed.error)

    def interrupted(self, interrupted: signals.Interrupted) -> None:
        """Report a signal, or the failure of another rank, for which torchrun sent it."""
        self._stop.peer_failed()  # finds the rank that exited without an error
        cause = failures.root_cause(self._run_dir)
        if cause is None or cause.transport:
            self.write("interrupted", error=str(interrupted))
        else:
            failed = cause.to_job_failed(self._run_dir, 2)
            self.write("failed", error=failed.error)
            print(f"\n{failed}", file=sys.stderr)

    def failed(self, failure: failures.Failure) -> None:
        """Report a hang, after which this process exits."""
        cause = failures.root_cause(self._run_dir) or failure
        failed = cause.to_job_failed(self._run_dir, self._world_size)
        self.write("failed", error=failed.error)
        print(f"\n{failed}", file=sys.stderr, flush=True)


def print_problems(problems: list[Problem]) -> int:
    """Print all errors of a config; return the exit code."""
    error = ConfigError(problems)
    count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    lines = "\n".join(f"  {problem}" for problem in error.problems)
    print(f"{count} in the config; nothing was started\n{lines}", file=sys.stderr)
    failures.record_for_torchrun(error)
    return 2
