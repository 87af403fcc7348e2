"""starts.jsonl: every start of a run and every restart, a JSON object a line, never truncated.

{"time": seconds since the epoch, "step": the step that it begins from, "host": ..., "overrides":
[...], "versions": {"torch": ..., "git": ...}, "config": {...}, "layout": {...}}
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import titanlike
from titanlike.config import files
from titanlike.config.credentials import redact_override, redact_value
from titanlike.config.errors import override_text
from titanlike.metrics.run_files import append_line

FILE = "starts.jsonl"
_GIT_TIMEOUT = 5.0  # seconds for each call


def log_start(
    run_dir: Path,
    step: int,
    overrides: list[str],
    config: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    """Append this start. config: as plain dicts; credentials are written as ***. layout: mesh and
    stages, for the report."""
    record = {
        "time": time.time(),
        "step": step,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "overrides": [redact_override(text) for text in overrides],
        "versions": versions(),
        "config": redact_value("", config),
        "layout": layout,
    }
    append_line(run_dir / FILE, files.dumps(record))


def versions() -> dict[str, Any]:
    """Of the program, of torch and Python, and of the git repository that it runs in, if any."""
    import torch  # late: a rank has it

    found: dict[str, Any] = {
        "titanlike": titanlike.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if commit := _git("rev-parse", "HEAD"):
        found["git"] = commit
        changed = _git("status", "--porcelain", "--untracked-files=no")
        found["git_dirty"] = None if changed is None else bool(changed)  # None: took too long
    return found


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key old -> new` for each key that differs between two plain configs."""
    old, new = flat(before), flat(now)
    each = {key: (old.get(key, "unset"), new.get(key, "unset")) for key in (*new, *old)}
    each.pop("data.changed", None)  # of one start alone
    return [f"{key} {was} -> {is_now}" for key, (was, is_now) in each.items() if was != is_now]


def flat(plain: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> value, as an override has it, of a plain config; credentials are ***."""
    found: dict[str, str] = {}
    for name, value in plain.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = override_text(redact_value(f"{prefix}{name}", value))
    return found


def _git(*arguments: str) -> str | None:
    """The output of a git command in the working directory; None where it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
