"""The files of a run's directory that are written until its end, and result.json, which says how it
ended.

starts.jsonl, a line each start and restart, never truncated: {"time": seconds since the epoch,
"step": from which it begins, "host": ..., "overrides": [...], "versions": {"torch": ..., "git":
...}, "config": {...}, "layout": {...}}; events.jsonl, the same: {"time": ..., "event": "rollback",
"step": 120, ...}.

They must stay where they are: a file that was deleted or replaced takes what is written to it
without an error, and nobody can read it. A file system that is unavailable for a moment is waited
for.
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
from titanlike.config import files
from titanlike.config.credentials import redact, redact_override, redact_value
from titanlike.config.errors import override_text
from titanlike.config.files import NotRegularFile, regular_fd
from titanlike.metrics.summary import jsonl_records

_PAUSES = (0.1, 0.4, 1.5, 4.0)  # seconds before another attempt
_Result = TypeVar("_Result")


class LostFiles(OSError):
    """A file or folder of the run was deleted or replaced while the run used it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"{path} was {what} while the run wrote to it; what it writes would be lost, so it ends. "
            "The same command resumes from the newest checkpoint that is left"
        )


class FailedWrite(OSError):
    """A file could not be written; the error names it."""


class AppendedFile:
    """Lines are appended, each in the file when `write` returns. Raises FailedWrite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._fd = self._retry(lambda: regular_fd(path, flags))

    def write(self, line: str) -> None:
        left = f"{line}\n".encode()
        while left:
            left = left[self._retry(partial(os.write, self._fd, left)) :]

    def sync(self) -> None:
        """Make what was written durable."""
        self._retry(partial(os.fsync, self._fd))

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
    """Raises FailedWrite."""
    with contextlib.closing(AppendedFile(path)) as file:
        file.write(line)


class RunFiles:
    """Finds out whether a run's directory and what is in it are still the same."""

    def __init__(self, run_dir: Path) -> None:
        names = ("metrics.jsonl", "events.jsonl", "checkpoints", "logs")
        self._paths = [run_dir, *(run_dir / name for name in names)]
        # inodes, and descriptors that keep their numbers from being used for other files
        self._seen: dict[Path, tuple[int, int]] = {}
        self.renew()

    def renew(self) -> None:
        """Take the files that there are now as the run's; those that come later are added."""
        self.close()
        self.check()

    def close(self) -> None:
        for _, descriptor in self._seen.values():
            os.close(descriptor)
        self._seen.clear()

    def check(self) -> None:
        """Raises LostFiles; a few microseconds."""
        for path in self._paths:
            if path not in self._seen:
                with contextlib.suppress(OSError):  # not there yet
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    self._seen[path] = os.fstat(descriptor).st_ino, descriptor
            elif self._inode(path) != self._seen[path][0]:
                raise LostFiles(path, "replaced")

    def _inode(self, path: Path) -> int:
        # only a whole directory may be gone for a moment, with its file system
        final = () if path == self._paths[0] else FileNotFoundError
        try:
            return _retried(partial(os.stat, path), final).st_ino
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            what = "deleted or moved" if missing else f"lost ({error.strerror})"
            raise LostFiles(path, what) from None


def _retried(attempt: Callable[[], _Result], final: type[OSError] | tuple[()]) -> _Result:
    """final: errors that another attempt would repeat."""
    for pause in _PAUSES:
        try:
            return attempt()
        except final:
            raise
        except OSError:
            time.sleep(pause)
    return attempt()


class Events:
    """Appends to run_dir/events.jsonl and prints lines by `say`, which is None on ranks other than
    0."""

    def __init__(self, run_dir: Path, say: Callable[[str], None] | None) -> None:
        self._path, self._say = run_dir / "events.jsonl", say

    def log(self, event: str, step: int, text: str = "", **fields: Any) -> None:
        """Write an event, and print its `text` if it has one; credentials are redacted."""
        if self._say is None:
            return
        text = redact(text)  # a file system's error may have some
        shown = {key: redact(v) if isinstance(v, str) else v for key, v in fields.items()}
        record = {"time": time.time(), "event": event, "step": step, **shown}
        append_line(self._path, files.dumps(record | ({"text": text} if text else {})))
        if text:
            self._say(text)


STARTS = "starts.jsonl"
_GIT_TIMEOUT = 5.0  # seconds for each call


def log_start(
    run_dir: Path,
    step: int,
    overrides: list[str],
    config: dict[str, Any],
    layout: dict[str, Any],
    job_began: float = 0.0,
) -> None:
    """Append this start. config: as plain dicts; credentials are written as ***. layout: mesh and
    stages, for the report. job_began: in seconds since the epoch."""
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
    """Other folders in which this run has trained, the newest first: it was moved, or copied."""
    found = []
    for record in jsonl_records(run_dir / STARTS, b'"config"'):
        config = record.get("config")
        found.append(config.get("run_dir") if isinstance(config, dict) else None)
    for folder in dict.fromkeys(reversed(found)):
        if isinstance(folder, str) and not files.same_folder(folder, run_dir):
            yield folder


def process_age() -> float:
    """Seconds since this process was started or forked; 0 where Linux' /proc does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def versions() -> dict[str, Any]:
    """The versions of the program, torch and Python, and of the git repository that it runs in, if
    any."""
    import torch  # late: a rank has it

    versions = {"titanlike": titanlike.__version__, "torch": str(torch.__version__)}
    versions["python"] = platform.python_version()
    if not (commit := git("rev-parse", "HEAD")):
        return versions
    changed = git("status", "--porcelain", "--untracked-files=no")
    dirty = None if changed is None else bool(changed)  # None: took too long
    return {**versions, "git": commit, "git_dirty": dirty}


def own_version() -> str:
    """titanlike's version, with the commit of its checkout."""
    root = Path(titanlike.__file__).parents[1]
    if not (root / ".git").exists():  # it is installed, and a repository around it is another's
        return titanlike.__version__
    commit = git("-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")
    return f"{titanlike.__version__} (commit {commit or 'unknown'})"


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key old -> new` for each key that differs between two plain configs."""
    old, new = flat(before), flat(now)
    changes = {key: (old.get(key, "unset"), new.get(key, "unset")) for key in (*new, *old)}
    changes.pop("data.changed", None)  # of one start alone
    return [f"{key} {was} -> {is_now}" for key, (was, is_now) in changes.items() if was != is_now]


def flat(plain: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> value, as an override has it, of a plain config; credentials are ***."""
    values: dict[str, str] = {}
    for name, value in plain.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = override_text(redact_value(f"{prefix}{name}", value))
    return values


def git(*arguments: str) -> str | None:
    """The output of a git command; None where it fails, or takes long."""
    env, null = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, subprocess.DEVNULL
    try:
        return subprocess.check_output(
            ["git", *arguments], env=env, stdin=null, stderr=null, timeout=_GIT_TIMEOUT, text=True
        ).strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


# invalid: an error in the config, nothing was started; stopped: early, by a stop request, with a
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
    """Write run_dir/result.json atomically. value: the objective. seconds: wall time.
    verification: whether the layout was compared with one process, if that was asked. goodput: see
    `metrics/goodput.py`."""
    shown = [redact_override(text) for text in overrides]
    result: dict[str, Any] = {"status": status, "value": value, "error": error and redact(error)}
    result |= {"seconds": seconds, "overrides": shown} | (
        {"verification": verification} if verification else {}
    )
    result |= {"goodput": goodput} if goodput else {}
    files.atomic_write_text(Path(run_dir) / "result.json", files.dumps(result) + "\n")


def ended_by_max_time(status: str | None, error: str | None) -> bool:
    """Whether max_time ended a run: a sweep counts such a job as done."""
    return status == "stopped" and "by max_time" in (error or "")


@dataclass(frozen=True)
class _ResultFile:
    """What must be in result.json."""

    status: str
    value: float | None
    error: str | None
    seconds: float | None = None
    overrides: list[str] = field(default_factory=list)
    verification: str = ""
    goodput: dict[str, Any] = field(default_factory=dict)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """result.json, or None where there is none: the job has not started, or was killed.

    Raises ValueError naming the file where it is damaged.
    """
    try:
        return asdict(files.read_object(Path(run_dir) / "result.json", _ResultFile))
    except FileNotFoundError:
        return None
