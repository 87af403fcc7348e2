"""Reads and writes sweep.jsonl, the jobs of a sweep, and derives the status of each from files. No
torch.

sweep.jsonl has a header, then a line for each job. Several processes may write a sweep's directory
at once (jobs that a launcher started, a search), so jobs are appended; the last line of a number
counts.

Whether a job without result.json is alive is derived from the age of files that a run rewrites
(heartbeats, metrics.jsonl): waiting for a heartbeat to change would take 10 s or more.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.config.credentials import redact_override
from titanlike.config.errors import quoted
from titanlike.config.files import open_regular
from titanlike.driver.job import SWEEP_FILE
from titanlike.launch.run_dir_lock import is_locked, try_lock
from titanlike.metrics.run_files import ended_by_max_time, read_result
from titanlike.metrics.summary import OBJECTIVES, Summary, last_number, summarize

_LOCK_TIMEOUT = 10.0  # seconds to wait for the file's lock


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int
    folder: str  # relative to the sweep's directory, "3"
    overrides: list[str]  # all overrides of the job
    swept: list[str]  # the overrides that the sweep varies


@dataclass(frozen=True)
class SweepSpec:
    """A sweep: its objective and its jobs."""

    value: str  # the objective, see `summary.objective_value`
    inner: str = ""  # a tool's folder inside each job's folder, "verify"
    jobs: list[Job] = field(default_factory=list)  # by number


def run_dir_word(folder: Path) -> str:
    """Return the override that sets a sweep's directory."""
    plain = re.fullmatch(r"[\w./-]+", str(folder), re.ASCII)  # needs no quotes in an override
    return f"run_dir={folder if plain else quoted(str(folder))}"


def write_spec(folder: Path, spec: SweepSpec) -> bool:
    """Write folder/sweep.jsonl atomically. Returns False if there is a spec already.

    Credentials in overrides are written as ***.
    """
    header = {"value": spec.value, "inner": spec.inner}
    lines = [files.dumps(header), *map(_line, spec.jobs)]
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if (folder / SWEEP_FILE).exists():  # another process wrote it
            return False
        files.atomic_write_text(folder / SWEEP_FILE, "\n".join(lines) + "\n")
        return True


def add_jobs(folder: Path, jobs: list[Job]) -> None:
    """Append jobs, replacing equal numbers; several processes may do so at once.

    Raises FileNotFoundError if there is no spec.
    """
    with _locked(folder), (folder / SWEEP_FILE).open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"\n", b"")  # a writer was killed
        text = ("\n" if torn else "") + "".join(_line(job) + "\n" for job in jobs)
        with (folder / SWEEP_FILE).open("ab", buffering=0) as end_of_file:
            end_of_file.write(text.encode())  # a single write, so that no line is torn


def read_spec(folder: Path) -> SweepSpec | None:
    """Read the spec of a sweep's directory; None if there is none.

    Raises ValueError if the first line is not a sweep's header.
    """
    try:
        with open_regular(folder / SWEEP_FILE, "r", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except files.NotRegularFile:
        raise ValueError(f"{folder / SWEEP_FILE} is not a regular file") from None
    first, *rest = text.split("\n")
    try:
        spec = files.as_record(files.loads(first), SweepSpec)
    except ValueError:
        raise ValueError(f"{folder / SWEEP_FILE}: its first line is no header of a sweep") from None
    jobs: dict[int, Job] = {}
    for line in rest:
        with contextlib.suppress(ValueError):  # a torn or empty line
            job = files.as_record(files.loads(line), Job)
            jobs[job.number] = job
    for job in jobs.values():  # numbers may be missing
        run_dir = (folder / job.folder / spec.inner).resolve()
        if not run_dir.is_relative_to(folder.resolve()):
            reason = f"its job {job.number} is not in this folder: {run_dir}"
            raise ValueError(f"{folder / SWEEP_FILE}: {reason}")
    return replace(spec, jobs=[jobs[number] for number in sorted(jobs)])


def _line(job: Job) -> str:
    plain: dict[str, Any] = asdict(job)
    for key in ("overrides", "swept"):
        plain[key] = [redact_override(text) for text in plain[key]]
    return files.dumps(plain)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a sweep's directory, if the file system has locks."""
    deadline = time.monotonic() + _LOCK_TIMEOUT
    with open(folder / f".{SWEEP_FILE}.lock", "ab") as file:
        while not try_lock(file, fcntl.LOCK_EX) and time.monotonic() <= deadline:
            time.sleep(0.01)
        yield


HEARTBEAT = 10.0  # seconds, if config.yaml does not say
STARTING = 60.0  # seconds from config.yaml to the first heartbeat: launch, import of torch
_KILLED = re.compile(r"(rank \d+ failed: )?killed by ")
_NESTED = 4000  # limit of brackets and dashes in a config.yaml; a few dozen are usual
_LEFT_BY_RUNS = ("config.yaml", "metrics.jsonl", "logs")


@dataclass(frozen=True)
class JobRow:
    """A job, its status and its numbers. Statuses:

    completed, failed, interrupted, stopped (early by a stop request: it can be resumed) and invalid
    (an error in its config, nothing was started), as result.json says; killed: it ended without
    result.json, or a signal killed one of its processes; running; waiting: not started yet.
    """

    job: Job
    run_dir: Path
    status: str
    error: str | None
    seconds: float | None  # wall time of its last launch
    summary: Summary
    value: float | None  # the objective so far
    settings: dict[str, str]  # overrides that differ between the jobs

    @property
    def done(self) -> bool:
        """Whether it completed, or reached its max_time."""
        return self.status == "completed" or ended_by_max_time(self.status, self.error)


def read_job_rows(folder: Path, spec: SweepSpec, ended: Collection[int] = ()) -> list[JobRow]:
    """Return a row for each job of the spec, by number.

    ended: numbers of jobs whose processes have ended, which do not count as running. Raises OSError
    for unreadable files.
    """
    settings = [_settings(job.overrides) for job in spec.jobs]
    keys = dict.fromkeys(key for values in settings for key in values)
    differ = [key for key in keys if len({values.get(key) for values in settings}) > 1]
    rows = []
    for job, values in zip(spec.jobs, settings, strict=True):
        run_dir = folder / job.folder / spec.inner
        result, unread = dict[str, Any](), ""
        try:
            result = read_result(run_dir) or {}
        except NotADirectoryError:
            pass
        except ValueError as odd:  # for example truncated by a copy
            unread = str(odd)
        summary = summarize(run_dir)
        error: str | None = result.get("error")
        if result:
            status = str(result.get("status"))
            if status == "failed" and _KILLED.match(error or ""):
                status = "killed"
        elif unread:
            status, error = "killed", unread
        elif not any((run_dir / name).exists() for name in _LEFT_BY_RUNS):
            status = "waiting"
        elif job.number not in ended and _alive(run_dir):
            status = "running"
        else:
            status, error = "killed", "it ended without a word: no result.json"
        value = result.get("value") if status in ("completed", "stopped") else None
        if not isinstance(value, (int, float)):
            known = spec.value in OBJECTIVES
            value = getattr(summary, spec.value) if known else last_number(run_dir, spec.value)
        shown = {key: values[key] for key in differ if key in values}
        seconds = result.get("seconds")
        rows.append(JobRow(job, run_dir, status, error, seconds, summary, value, shown))
    return rows


def _settings(overrides: list[str]) -> dict[str, str]:
    """Map keys to values as written; ~key to "deleted". Keys of the sweep itself are left out."""
    pairs = [text.lstrip("+").partition("=") for text in overrides]
    settings = {key.lstrip("~"): value if equals else "deleted" for key, equals, value in pairs}
    return {key: v for key, v in settings.items() if not key.startswith(("sweep.", "hydra."))}


def _alive(run_dir: Path) -> bool:
    """Return whether a run without a result is in progress.

    On another machine: whether its files changed within three heartbeats, by their file system's
    clock.
    """
    if (locked := is_locked(run_dir)) is not None:
        return locked
    try:
        with tempfile.TemporaryFile(dir=run_dir) as file:
            file.write(b"\n")
            file.flush()
            now = os.fstat(file.fileno()).st_mtime
    except OSError:  # read-only
        now = time.time()
    launch = _config(run_dir).get("launch")
    beat = launch.get("heartbeat") if isinstance(launch, dict) else None
    beat = beat if isinstance(beat, (int, float)) and beat < STARTING else HEARTBEAT
    files = [*(run_dir / "logs").glob("rank*.heartbeat"), run_dir / "metrics.jsonl"]
    if now - max(map(_changed, files)) <= 3 * beat + 5:
        return True
    return now - _changed(run_dir / "config.yaml") <= STARTING


def _changed(path: Path) -> float:
    try:
        with open_regular(path) as file:  # a network file system may cache a stat, not an open
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return -math.inf


def _config(run_dir: Path) -> dict[str, Any]:
    import yaml

    try:
        with open_regular(run_dir / "config.yaml", "r", encoding="utf-8") as file:
            text = file.read()
        if sum(map(text.count, "[{-?")) > _NESTED:  # deep nesting overflows libyaml's stack
            return {}
        plain = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return plain if isinstance(plain, dict) else {}
