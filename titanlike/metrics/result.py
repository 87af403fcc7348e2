"""result.json: how a run ended, for sweeps and scripts. Written however it ends."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
    numbers: str = "",
) -> None:
    """Write run_dir/result.json atomically. value: the objective. seconds: wall time. numbers: whether
    those of the layout were verified, if that was asked."""
    result = {
        "status": status,
        "value": value,
        "error": error and redact(error),
        "seconds": seconds,
        "overrides": [redact_override(text) for text in overrides],
    }
    if numbers:
        result["numbers"] = numbers
    files.atomic_write_text(Path(run_dir) / "result.json", files.dumps(result) + "\n")


def ended_by_max_time(status: str | None, error: str | None) -> bool:
    """Whether max_time ended a run: a sweep counts such a job as done."""
    return status == "stopped" and "by max_time" in (error or "")


@dataclass(frozen=True)
class _Result:
    """What must be in result.json."""

    status: str
    value: float | None
    error: str | None
    seconds: float | None = None
    overrides: list[str] = field(default_factory=list)
    numbers: str = ""


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """result.json, or None where there is none: the job has not started, or was killed.

    Raises ValueError naming the file where it is no such file.
    """
    try:
        return asdict(files.read_object(Path(run_dir) / "result.json", _Result))
    except FileNotFoundError:
        return None
