"""Files that stay open in a run's directory until its end, and result.json, which says how it
ended.

starts.jsonl has one line per launch or restart and is never truncated: {"time": seconds since the
epoch, "step": from which it starts, "host": ..., "overrides": [...], "versions": {"torch": ...,
"git": ...}, "config": {...}, "layout": {...}}. events.jsonl likewise: {"time": ..., "event":
"rollback", "step": 120, ...}.

`RunFiles` detects that a file was deleted or replaced: writes to its descriptor would succeed, and
nobody could read them. If a file system is unavailable for a moment, writes are retried.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import titanlike
from titanlike.core.config import files
from titanlike.core.config.credentials import redact, redact_override, redact_value
from titanlike.core.config.errors import override_text, printable
from titanlike.core.config.files import NotRegularFile, regular_fd, sync_to_disk
from titanlike.core.metrics.summary import jsonl_records

_PAUSES = (0.1, 0.4, 1.5, 4.0)  # seconds before each retry
_Result = TypeVar("_Result")


class LostFiles(OSError):
    """A file or folder of the run was deleted or replaced while the run used it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"{path} was {what} while the run wrote to it; what it writes would be lost, so it ends. "
            "The same command resumes from the newest checkpoint that is left"
        )


class FailedWrite(OSError):
    """A file, which the message names, could not be written."""


class AppendedFile:
    """A file to which lines are appended, unbuffered. Raises FailedWrite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._fd = self._retry(lambda: regular_fd(path, flags))

    def write(self, line: str) -> None:
        left = f"{line}\n".encode()
        while left:
            left = left[self._retry(partial(os.write, self._fd, left)) :]

    def sync(self) -> None:
        """Flush to disk (fsync)."""
        self._retry(partial(sync_to_disk, self._fd))

    def close(self) -> None:
        os.close(self._fd)

    def _retry(self, attempt: Callable[[], _Result]) -> _Result:
        try:
            return _retried(attempt, final=NotRegularFile)
        except OSError as error:
            text = f"{self._path} could not be written: {error.strerror or error}"
            failed = FailedWrite(text)
            failed.errno = error.errno
            raise failed from None


def append_line(path: Path, line: str) -> None:
    """Append a line to a file. Raises FailedWrite."""
    with contextlib.closing(AppendedFile(path)) as file:
        file.write(line)


class RunFiles:
    """Detects that a run's directory, or a file in it, was deleted or replaced."""

    def __init__(self, run_dir: Path) -> None:
        names = ("metrics.jsonl", "events.jsonl", "checkpoints", "logs")
        self._paths = [run_dir, *(run_dir / name for name in names)]
        # inodes, and open descriptors, without which an inode number could be reused
        self._seen: dict[Path, tuple[int, int]] = {}
        self.renew()

    def renew(self) -> None:
        """Accept the existing files as the run's; files created later are added by `check`."""
        self.close()
        self.check()

    def close(self) -> None:
        for _, descriptor in self._seen.values():
            os.close(descriptor)
        self._seen.clear()

    def check(self) -> None:
        """Raise LostFiles if something was deleted or replaced. Takes a few microseconds."""
        for path in self._paths:
            if path not in self._seen:
                with contextlib.suppress(OSError):  # not there yet
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    self._seen[path] = os.fstat(descriptor).st_ino, descriptor
            elif self._inode(path) != self._seen[path][0]:
                raise LostFiles(path, "replaced")

    def _inode(self, path: Path) -> int:
        # only the run directory may vanish for a moment, with its file system
        final = () if path == self._paths[0] else FileNotFoundError
        try:
            return _retried(partial(os.stat, path), final).st_ino
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            what = "deleted or moved" if missing else f"lost ({error.strerror})"
            raise LostFiles(path, what) from None


def _retried(attempt: Callable[[], _Result], final: type[OSError] | tuple[()]) -> _Result:
    """Call `attempt`, and retry after each OSError except those in `final`."""
    for pause in _PAUSES:
        try:
            return attempt()
        except final:
            raise
        except OSError:
            time.sleep(pause)
    return attempt()


class Events:
    """Appends events to run_dir/events.jsonl and prints them by `say`, which is None on ranks other
    than 0."""

    def __init__(self, run_dir: Path, say: Callable[[str], None] | None) -> None:
        self._path, self._say = run_dir / "events.jsonl", say

    def log(self, event: str, step: int, text: str = "", **fields: Any) -> None:
        """Write an event, and print its `text` if it has one; credentials are redacted."""
        if self._say is None:
            return
        text = printable(redact(text))  # e.g. a file system's error message may contain credentials
        shown = {key: redact(v) if isinstance(v, str) else v for key, v in fields.items()}
        record = {"time": time.time(), "event": event, "step": step, **shown}
        append_line(self._path, files.dumps(record | ({"text": text} if text else {})))
        if text:
            self._say(text)


STARTS = "starts.jsonl"
_GIT_TIMEOUT = 5.0  # seconds per git command


def log_start(
    run_dir: Path,
    step: int,
    overrides: list[str],
    config: dict[str, Any],
    layout: dict[str, Any],
    job_began: float = 0.0,
) -> None:
    """Append this launch to starts.jsonl.

    config: plain dicts; credentials are written as ***. layout: mesh and stages, for the report.
    job_began: seconds since the epoch.
    """
    now = time.time()
    record = {
        "time": now,
        "began": max(now - process_age(), job_began),
        "step": step,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "overrides": [redact_override(text) for text in overrides],
        "versions": versions(),
        "config": redact_value("", config),
        "layout": layout,
    }
    append_line(run_dir / STARTS, files.dumps(record))


def earlier_folders(run_dir: Path) -> Iterator[str]:
    """Yield other directories in which this run has trained before it was moved or copied, newest
    first."""
    folders = []
    for record in jsonl_records(run_dir / STARTS, b'"config"'):
        config = record.get("config")
        folders.append(config.get("run_dir") if isinstance(config, dict) else None)
    for folder in dict.fromkeys(reversed(folders)):
        if isinstance(folder, str) and not files.same_folder(folder, run_dir):
            yield folder


def process_age() -> float:
    """Seconds since this process was started or forked; 0 without Linux' /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def versions() -> dict[str, Any]:
    """The versions of titanlike, torch and Python, and the commit of the working directory's git
    repository, if any."""
    import torch  # imported here, as only ranks need it

    versions = {"titanlike": titanlike.__version__, "torch": str(torch.__version__)}
    versions["python"] = platform.python_version()
    if not (commit := git("rev-parse", "HEAD")):
        return versions
    changed = git("status", "--porcelain", "--untracked-files=no")
    dirty = None if changed is None else bool(changed)  # None if git timed out
    return {**versions, "git": commit, "git_dirty": dirty}


def own_version() -> str:
    """titanlike's version, with the commit of its checkout if it is not an installed package."""
    root = Path(titanlike.__file__).parents[1]
    if not (root / ".git").exists():  # installed: a repository around it is a different project's
        return titanlike.__version__
    commit = git("-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")
    return f"{titanlike.__version__} (commit {commit or 'unknown'})"


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key old -> new` for each key in which two plain configs differ."""
    old, new = flat(before), flat(now)
    changes = {key: (old.get(key, "unset"), new.get(key, "unset")) for key in (*new, *old)}
    changes.pop("data.changed", None)  # it applies to a single launch
    return [f"{key} {was} -> {is_now}" for key, (was, is_now) in changes.items() if was != is_now]


def flat(plain: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a plain config: dotted key -> value as in an override; credentials are ***."""
    values: dict[str, str] = {}
    for name, value in plain.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = override_text(redact_value(f"{prefix}{name}", value))
    return values


def git(*arguments: str) -> str | None:
    """The output of a git command; None if it fails or times out."""
    env, null = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, subprocess.DEVNULL
    try:
        return subprocess.check_output(
            ["git", *arguments], env=env, stdin=null, stderr=null, timeout=_GIT_TIMEOUT, text=True
        ).strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


# invalid: the config is wrong, nothing was launched; stopped: early, by a stop request, with a
# checkpoint; interrupted: ended immediately by a signal
Status = Literal["completed", "stopped", "failed", "invalid", "interrupted"]


def write_result(
    run_dir: Path,
    status: Status,
    value: float | None,
    error: str | None,
    seconds: float,
    overrides: list[str],
    verification: str = "",
    goodput: dict[str, float] | None = None,
) -> None:
    """Write run_dir/result.json atomically.

    value: the objective; seconds: wall time; verification: the result of comparing the layout with
    one process, "" if not asked for; goodput: see `core/metrics/goodput.py`.
    """
    result: dict[str, Any] = {
        "status": status,
        "value": value,
        "error": error and printable(redact(error)),
        "seconds": seconds,
        "overrides": [redact_override(text) for text in overrides],
    }
    result |= {"verification": verification} if verification else {}
    result |= {"goodput": goodput} if goodput else {}
    files.atomic_write_text(Path(run_dir) / "result.json", files.dumps(result) + "\n")


def ended_by_max_time(status: str | None, error: str | None) -> bool:
    """Whether max_time ended a run; a sweep counts such a job as done."""
    return status == "stopped" and "by max_time" in (error or "")


@dataclass(frozen=True)
class _ResultFile:
    """The fields of result.json."""

    status: str
    value: float | None
    error: str | None
    seconds: float | None = None
    overrides: list[str] = field(default_factory=list)
    verification: str = ""
    goodput: dict[str, Any] = field(default_factory=dict)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """Read result.json; None if there is none, as the job has not started or was killed.

    Raises ValueError naming the file if it is damaged.
    """
    try:
        return asdict(files.read_object(Path(run_dir) / "result.json", _ResultFile))
    except FileNotFoundError:
        return None
