"""One job as the process that reports it sees it: from a composed config to result.json.

It is rank 0, or the driver that starts the workers. Knows no Hydra: `cli` composes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.parse import parse
from titanlike.config.schema import Config, Wandb
from titanlike.config.write import write_config
from titanlike.launch.environment import will_restart
from titanlike.launch.external import ExternalRanks, record_for_torchrun
from titanlike.launch.failures import Failure, JobFailed, describe, root_cause
from titanlike.launch.job import Job
from titanlike.launch.local import run_local
from titanlike.launch.restart_state import RestartState
from titanlike.launch.run_dir_owner import lock_run_dir
from titanlike.launch.signals import Interrupted, interruptible
from titanlike.launch.stop_request import MAX_TIME, StopRequest, stop_reason
from titanlike.metrics.result import Status, write_result


@dataclass(frozen=True)
class JobRunner:
    """What all jobs of a command line have in common."""

    function: str  # of the job, `package.module:function`
    folder: str  # a tool's own place inside run_dir, or ""
    ranks: ExternalRanks | None = None  # that torchrun or srun started; None = started here
    restart_state: RestartState = field(default_factory=RestartState)
    restart: bool = False  # whether this command was started before

    def run(
        self,
        plain: dict[str, Any],
        run_dir: Path,
        overrides: list[str],
        name: tuple[str, str] | None = None,
    ) -> JobEnd:
        """Run a job to its end, which result.json and the user are told.

        `name`: of a sweep and of this job of it; None for a run of its own. Raises Interrupted where a signal ended
        it at once.
        """
        from titanlike.checkpoint.restart import restarted_config, resumed_config
        from titanlike.job import elastic

        run_dir = run_dir / self.folder
        run_dir.mkdir(parents=True, exist_ok=True)
        config, problems = parse({**plain, "run_dir": str(run_dir)})
        if name is not None:
            config = with_run_name(config, *name)
        world_size = self.ranks.world_size if self.ranks else None
        report = ResultReporter(run_dir, overrides, config.world_size)
        stop = StopRequest()
        with interruptible(report.interrupted, stop), lock_run_dir(run_dir):
            try:
                if self.restart:
                    config, _ = resumed_config(config)
                declared, ranks = (
                    config,
                    elastic.available_ranks(config, world_size, self.restart_state),
                )
                config, unfit = elastic.fit_mesh(declared, ranks)
                problems += unfit
                if (
                    name is not None and not unfit
                ):  # a run of its own was checked before it came here
                    problems += config_problems(config, ranks, problems)
                if problems:
                    raise ConfigError(problems)
                write_config(config, run_dir)
                elastic.report_layout(config, declared, ranks, self.restart_state)
                started = None if name is not None else self.restart_state.get("started")
                start = float(started or time.time())
                job = Job(self.function, config, run_dir, overrides, start)
                if self.ranks:
                    result = self.ranks.run(job, stop, report.failed)
                else:  # a tool's job is not for being started again
                    again = None if self.folder else partial(restarted_config, config)
                    result = run_local(job, stop, report.failed, again)
            except Interrupted as interrupted:
                report.interrupted(interrupted)
                raise
            except ConfigError as error:
                report.write("invalid", error=str(error))
                return JobEnd(print_problems(error.problems), str(error))
            except JobFailed as failed:
                report.write("failed", error=failed.error)
                print(f"\n{failed}", file=sys.stderr)
                record_for_torchrun(failed)
                return JobEnd(1, failed.error, ends_sweep=failed.ends_sweep)
        value, code = result.get("value"), result.get("exit_code", 0)
        if stopped := result.get("stopped"):
            why = f"stopped early by {stopped}, with a checkpoint; the same command goes on"
            report.write("stopped", value, why)
            by_signal = stopped != stop_reason(MAX_TIME)  # the user wants out of a sweep, too
            return JobEnd(0 if will_restart() else code, why, value, ends_sweep=by_signal)
        report.write("completed", value)
        return JobEnd(code, f"exit code {code}" if code else "", value)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    code: int  # exit code of a run of its own
    error: str = ""  # why, where it is not completed
    value: float | None = None  # what a sweep compares
    ends_sweep: bool = False  # whether the processes have no further jobs in them


def with_run_name(config: Config, sweep: str, name: str) -> Config:
    """A sweep's job in W&B: in the sweep's group, by its overrides' name, unless the user has said
    otherwise."""
    if not isinstance(config.logger, Wandb):
        return config
    group, run_name = config.logger.group or sweep, config.logger.run_name or name
    return replace(config, logger=replace(config.logger, group=group, run_name=run_name))


def config_problems(config: Config, world_size: int | None, known: list[Problem]) -> list[Problem]:
    """What is well-formed but cannot work, apart from what follows from `known` problems.

    Raises JobFailed where a function of the user's own fails in a check.
    """
    from titanlike.job.check import problems as check

    try:
        found = check(config, world_size)
    except Exception as error:
        if not known:  # by a function of the user's own, which a check calls
            failure = describe(0, error)
            text = f"{failure.error}\n{failure.frames}".rstrip()
            raise JobFailed(text, failure.error) from error
        return []  # defaults stand in for what could not be read, and need not fit together
    wrong = {problem.key.lstrip("+~") for problem in known}
    told = {str(problem): problem for problem in found if problem.key not in wrong}
    return list(told.values())


def print_problems(problems: list[Problem]) -> int:
    """Tell the user every mistake; the exit code."""
    error = ConfigError(problems)
    count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    lines = "\n".join(f"  {problem}" for problem in error.problems)
    print(f"{count} in the config; nothing was started\n{lines}", file=sys.stderr)
    record_for_torchrun(error)
    return 2


class ResultReporter:
    """Writes result.json when a job ends, from whichever thread learns of it."""

    def __init__(self, run_dir: Path, overrides: list[str], world_size: int) -> None:
        self._world_size = world_size
        self._run_dir, self._overrides, self._start = run_dir, overrides, time.monotonic()
        (run_dir / "result.json").unlink(missing_ok=True)  # of an earlier run

    def write(self, status: Status, value: float | None = None, error: str | None = None) -> None:
        """Leave result.json."""
        try:
            write_result(
                self._run_dir,
                status=status,
                value=value,
                error=error,
                seconds=time.monotonic() - self._start,
                overrides=self._overrides,
            )
        except OSError as problem:  # a full disk must not hide what happened
            print(f"result.json could not be written: {problem}", file=sys.stderr)

    def interrupted(self, interrupted: Interrupted) -> None:
        """A signal; torchrun sends one, too, when another rank has failed."""
        cause = root_cause(self._run_dir)
        if cause is None or cause.transport:
            self.write("interrupted", error=str(interrupted))
        else:
            self.write("failed", error=f"rank {cause.rank} failed: {cause.error}")
            print(f"\n{cause.to_job_failed(self._run_dir, 2)}", file=sys.stderr)

    def failed(self, failure: Failure) -> None:
        """The job hangs, and this process is about to end itself."""
        cause = root_cause(self._run_dir) or failure
        told = cause.to_job_failed(self._run_dir, self._world_size)
        self.write("failed", error=told.error)
        print(f"\n{told}", file=sys.stderr, flush=True)
