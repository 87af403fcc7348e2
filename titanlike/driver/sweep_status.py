"""sweep.jsonl, the jobs of a sweep, and the status of each, read from the files in its directory. No torch.

sweep.jsonl has a header, then a line for each job. The directory may be written by several processes at
once (the tasks of a job array, a search that adds jobs as it goes), so jobs are appended; of a number that
is there twice, the last line counts.

Whether a job without result.json is alive is derived from the age of the files that a run rewrites
(heartbeats, metrics.jsonl): waiting for a heartbeat to change would take 10 s or more. Ages use the
file system's clock: that of the machine on which the job runs may differ.
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
from functools import cached_property
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.config.credentials import redact, redact_override
from titanlike.config.files import open_regular
from titanlike.driver.job import SWEEP_FILE
from titanlike.launch.run_dir_owner import is_locked
from titanlike.metrics.run_files import ended_by_max_time, flat, read_result
from titanlike.metrics.summary import OBJECTIVES, Summary, objective_value, summarize

_LOCK_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int
    folder: str  # relative to the sweep's directory, "3"
    overrides: list[str]  # all of the job's
    swept: list[str]  # those of them that the sweep varies
    skipped: str | None = None  # why it is not started at all


@dataclass(frozen=True)
class SweepSpec:
    """A sweep: the command that resumes it, its objective and its jobs."""

    command: str  # shell line that runs it again, into the same directory
    value: str  # the objective, one of `summary.OBJECTIVES`
    inner: str = ""  # a tool's folder inside each job's, "verify"
    jobs: list[Job] = field(default_factory=list)  # by number


def write_spec(folder: Path, spec: SweepSpec) -> bool:
    """Write folder/sweep.jsonl atomically. Returns False where there is a spec already.

    Credentials in the command and in overrides are written as ***.
    """
    header = {"command": redact(spec.command), "value": spec.value, "inner": spec.inner}
    lines = [files.dumps(header), *map(_line, spec.jobs)]
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if (folder / SWEEP_FILE).exists():  # written by another task of a job array
            return False
        files.atomic_write_text(folder / SWEEP_FILE, "\n".join(lines) + "\n")
        return True


def add_jobs(folder: Path, jobs: list[Job]) -> None:
    """Append jobs; several processes may. A number that exists is replaced.

    Raises FileNotFoundError where there is no spec.
    """
    with _locked(folder), (folder / SWEEP_FILE).open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"\n", b"")  # by a process that was killed while it wrote
        text = ("\n" if torn else "") + "".join(_line(job) + "\n" for job in jobs)
        with (folder / SWEEP_FILE).open(
            "ab", buffering=0
        ) as appended:  # one write: no line is torn
            appended.write(text.encode())


def read_spec(folder: Path) -> SweepSpec | None:
    """The spec of a sweep's directory; None where there is none.

    Raises ValueError where the file's first line is no header of a sweep.
    """
    try:
        with files.open_regular(
            folder / SWEEP_FILE, "r", encoding="utf-8", errors="replace"
        ) as file:
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
    jobs = {job.number: job for job in map(_job, rest) if job}
    return replace(spec, jobs=[jobs[number] for number in sorted(jobs)])


def _line(job: Job) -> str:
    plain: dict[str, Any] = asdict(job)
    for key in ("overrides", "swept"):
        plain[key] = [redact_override(text) for text in plain[key]]
    plain["skipped"] = job.skipped and redact(job.skipped)
    return files.dumps(plain)


def _job(line: str) -> Job | None:
    try:
        return files.as_record(files.loads(line), Job)
    except ValueError:  # torn, or empty
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time, where the file system has locks."""
    deadline = time.monotonic() + _LOCK_TIMEOUT
    with open(folder / f".{SWEEP_FILE}.lock", "ab") as file:
        while time.monotonic() <= deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield


DONE = ("completed", "skipped")
SUBMITTED = "submitted"  # a file in a job's folder: what the submit command said
HEARTBEAT = 10.0  # seconds, where config.yaml does not say
STARTING = 60.0  # seconds from config.yaml to a first heartbeat: processes start, torch is imported
_KILLED = re.compile(r"(rank \d+ failed: )?killed by ")
_NESTED = 4000  # brackets and dashes in a config.yaml, of which a few dozen are usual
_LEFT_BY_RUNS = ("result.json", "config.yaml", "metrics.jsonl")


@dataclass(frozen=True)
class JobRow:
    """A job, its status and its numbers. Statuses:

    completed, failed, interrupted, stopped (early by a stop request: it can be resumed) and invalid
    (an error in its config, nothing was started), as result.json says; killed: it ended without
    result.json, or a signal killed one of its processes; running; waiting: not started yet;
    submitted: queued in a scheduler; skipped: not to be run.
    """

    job: Job
    run_dir: Path
    status: str
    error: str | None
    seconds: float | None  # wall time of its last start
    summary: Summary
    value: float | None  # the objective so far
    settings: dict[str, str]  # those of its overrides that differ between the jobs

    @property
    def done(self) -> bool:
        """Also a job that its max_time ended."""
        return self.status in DONE or ended_by_max_time(self.status, self.error)


def read_job_rows(
    folder: Path, spec: SweepSpec | None, ended: Collection[int] = ()
) -> list[JobRow]:
    """A row a job: those of the spec, and others that are found in the folder, by number.

    ended: numbers of jobs whose processes have ended; they do not count as running.
    Raises OSError where something cannot be read.
    """
    clock = _FileSystemClock(folder)
    value = spec.value if spec else "val_loss"
    rows = []
    for job in [*(spec.jobs if spec else ()), *_others(folder, spec)]:
        run_dir = folder / job.folder / (spec.inner if spec else "")
        rows.append(_row(job, run_dir, value, clock, job.number in ended))
    rows = _with_overrides_from_configs(rows)
    return _with_settings(sorted(rows, key=lambda row: row.job.number))


def _row(job: Job, run_dir: Path, value: str, clock: _FileSystemClock, ended: bool) -> JobRow:
    result: dict[str, Any] = {}
    unread = ""
    try:
        result = read_result(run_dir) or {}
    except NotADirectoryError:
        pass
    except ValueError as odd:  # truncated by a copy
        unread = str(odd)
    numbers = summarize(run_dir)
    error: str | None = result.get("error")
    if result:
        status = str(result.get("status"))
        if status == "failed" and _KILLED.match(error or ""):
            status = "killed"
    elif unread:
        status, error = "killed", unread
    elif job.skipped is not None:
        status, error = "skipped", job.skipped
    elif not any((run_dir / name).exists() for name in (*_LEFT_BY_RUNS, "logs")):
        status = "submitted" if (run_dir / SUBMITTED).exists() else "waiting"
    elif not ended and _alive(run_dir, clock):
        status = "running"
    else:
        status, error = "killed", "it ended without a word: no result.json"
    own = result.get("value") if status in ("completed", "stopped") else None
    if not isinstance(own, (int, float)):
        own = objective_value(value, numbers) if value in OBJECTIVES else None
    overrides = job.overrides or list(result.get("overrides") or ())
    job = replace(job, overrides=overrides)
    return JobRow(job, run_dir, status, error, result.get("seconds"), numbers, own, {})


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep's spec, or jobs."""
    return read_spec(folder) is not None or any(_others(folder, None))


def _others(folder: Path, spec: SweepSpec | None) -> Iterator[Job]:
    """Jobs in subfolders that are not in the spec: of an older sweep, or another sweeper."""
    spec = spec or SweepSpec("", "")
    known = {job.folder.partition("/")[0] for job in spec.jobs}
    taken = {job.number for job in spec.jobs}
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and entry.name not in known]
    inner = spec.inner
    found = [
        n for n in names if any((folder / n / inner / file).exists() for file in _LEFT_BY_RUNS)
    ]
    for name in sorted(found, key=lambda name: (not name.isdecimal(), name.zfill(20))):
        number = int(name) if name.isdecimal() else -1
        if number < 0 or number in taken:
            number = max(taken, default=-1) + 1
        taken.add(number)
        yield Job(number, name, [], [])


class _FileSystemClock:
    """The current time of a folder's file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def now(self) -> float:
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                file.write(b"\n")
                file.flush()
                return os.fstat(file.fileno()).st_mtime
        except OSError:  # read-only
            return time.time()


def _alive(run_dir: Path, clock: _FileSystemClock) -> bool:
    """Whether a run without a result is in progress.

    On another machine: whether its files changed within three heartbeats.
    """
    if (locked := is_locked(run_dir)) is not None:
        return locked
    launch = _config(run_dir).get("launch")
    beat = launch.get("heartbeat") if isinstance(launch, dict) else None
    beat = beat if isinstance(beat, (int, float)) and beat < STARTING else HEARTBEAT
    files = [*(run_dir / "logs").glob("rank*.heartbeat"), run_dir / "metrics.jsonl"]
    if clock.now - max(map(_changed, files)) <= 3 * beat + 5:
        return True
    return clock.now - _changed(run_dir / "config.yaml") <= STARTING


def _changed(path: Path) -> float:
    try:
        with open_regular(path) as file:  # opened: a network file system may cache a stat
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return -math.inf


def _with_settings(rows: list[JobRow]) -> list[JobRow]:
    """Give each row those of its overrides that are not the same in all."""
    own = [_parse(row.job.overrides) for row in rows]
    keys = dict.fromkeys(key for settings in own for key in settings)
    differ = [key for key in keys if len({settings.get(key) for settings in own}) > 1]
    return [
        replace(row, settings={key: settings[key] for key in differ if key in settings})
        for row, settings in zip(rows, own, strict=True)
    ]


def _parse(overrides: list[str]) -> dict[str, str]:
    """key -> value as it was written; ~key -> "deleted". Nothing of how the sweep is run."""
    settings = {}
    for text in overrides:
        key, is_, value = text.partition("=")
        if key.startswith("~"):
            key, value = key[1:], "deleted"
        elif not is_:
            continue
        settings[key.lstrip("+")] = value
    return {key: v for key, v in settings.items() if not key.startswith(("sweep.", "hydra."))}


def _with_overrides_from_configs(rows: list[JobRow]) -> list[JobRow]:
    """Give rows without overrides those of their config.yaml: of the keys that the others override.

    Where there are no others, of the keys that differ.
    """
    unknown = [r for r in rows if not r.job.overrides and (r.run_dir / "config.yaml").exists()]
    configs = {id(row): flat(_config(row.run_dir)) for row in unknown}
    keys = list(dict.fromkeys(key for row in rows for key in _parse(row.job.overrides)))
    if not keys:
        every = dict.fromkeys(key for config in configs.values() for key in config)
        every.pop("run_dir", None)
        keys = [key for key in every if len({config.get(key) for config in configs.values()}) > 1]
    updated = []
    for row in rows:
        if config := configs.get(id(row)):
            values = {key: config.get(key, config.get(f"{key}.name")) for key in keys}
            overrides = [f"{key}={value}" for key, value in values.items() if value is not None]
            row = replace(row, job=replace(row.job, overrides=overrides))
        updated.append(row)
    return updated


def _config(run_dir: Path) -> dict[str, Any]:
    import yaml

    try:
        with open_regular(run_dir / "config.yaml", "r", encoding="utf-8") as file:
            text = file.read()
        if sum(map(text.count, "[{-?")) > _NESTED:  # libyaml overflows the stack
            return {}
        plain = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    # `defaults` and `hydra` are how it was launched
    plain = plain if isinstance(plain, dict) else {}
    return {key: value for key, value in plain.items() if key not in ("defaults", "hydra")}
