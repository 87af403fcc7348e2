"""What the user gets from a job: result.json, and errors on stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from titanlike.config.errors import ConfigError, Problem
from titanlike.launch.external import record_for_torchrun
from titanlike.launch.failures import Failure, JobFailed, root_cause
from titanlike.launch.signals import Interrupted
from titanlike.metrics.result import Status, write_result


class ResultReporter:
    """Writes result.json when a job ends, from any thread."""

    def __init__(self, run_dir: Path, overrides: list[str], world_size: int) -> None:
        self._run_dir, self._overrides, self._world_size = run_dir, overrides, world_size
        self._start = time.monotonic()
        (run_dir / "result.json").unlink(missing_ok=True)  # of an earlier run

    def write(
        self,
        status: Status,
        value: float | None = None,
        error: str | None = None,
        numbers: str = "",
    ) -> None:
        try:
            write_result(
                self._run_dir,
                status=status,
                value=value,
                error=error,
                seconds=time.monotonic() - self._start,
                overrides=self._overrides,
                numbers=numbers,
            )
        except OSError as problem:  # a full disk must not hide how the job ended
            print(f"result.json could not be written: {problem}", file=sys.stderr)

    def job_failed(self, failed: JobFailed) -> None:
        self.write("invalid" if failed.invalid else "failed", error=failed.error)

    def interrupted(self, interrupted: Interrupted) -> None:
        """Report a signal, or the failure of another rank, for which torchrun sent it."""
        cause = root_cause(self._run_dir)
        if cause is None or cause.transport:
            self.write("interrupted", error=str(interrupted))
        else:
            self.write("failed", error=f"rank {cause.rank} failed: {cause.error}")
            print(f"\n{cause.to_job_failed(self._run_dir, 2)}", file=sys.stderr)

    def failed(self, failure: Failure) -> None:
        """Report a hang, after which this process exits."""
        cause = root_cause(self._run_dir) or failure
        failed = cause.to_job_failed(self._run_dir, self._world_size)
        self.write("failed", error=failed.error)
        print(f"\n{failed}", file=sys.stderr, flush=True)


def print_problems(problems: list[Problem]) -> int:
    """Print all errors of a config; the exit code."""
    error = ConfigError(problems)
    count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    lines = "\n".join(f"  {problem}" for problem in error.problems)
    print(f"{count} in the config; nothing was started\n{lines}", file=sys.stderr)
    record_for_torchrun(error)
    return 2
