"""result.json: how a run ended, for sweeps and scripts. Written however it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from titanlike.config import files
from titanlike.config.credentials import redact, redact_override

# invalid: an error in the config, nothing was started; stopped: early, by a stop request, with a
# checkpoint; interrupted: ended immediately by a signal
Status = Literal["completed", "stopped", "failed", "invalid", "interrupted"]


def write_result(
    run_dir: Path,
    *,
    status: Status,
    value: float | None,
    error: str | None,
    seconds: float,
    overrides: list[str],
) -> None:
    """Write run_dir/result.json atomically. value: the objective. seconds: wall time."""
    result = {
        "status": status,
        "value": value,
        "error": error and redact(error),
        "seconds": seconds,
        "overrides": [redact_override(text) for text in overrides],
    }
    files.atomic_write_text(Path(run_dir) / "result.json", files.dumps(result) + "\n")


def ended_by_max_time(status: str | None, error: str | None) -> bool:
    """Whether max_time ended a run: a sweep counts such a job as done."""
    return status == "stopped" and "by max_time" in (error or "")


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """result.json, or None where there is none: the job has not started, or was killed."""
    try:
        return files.loads((Path(run_dir) / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
