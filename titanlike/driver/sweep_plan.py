"""sweep.jsonl: the plan of a sweep. A header, then a line for each job, in the sweep's directory.

The directory may be written by several processes at once (the tasks of a job array, a search that
adds jobs as it goes), so jobs are appended; of a number that is there twice, the last line counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.config.credentials import redact, redact_override

FILE = "sweep.jsonl"
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
class Plan:
    """A sweep: the command that resumes it, its objective and its jobs."""

    command: str  # shell line that runs it again, into the same directory
    value: str  # the objective, one of `summary.OBJECTIVES`
    inner: str = ""  # a tool's folder inside each job's, "verify"
    jobs: list[Job] = field(default_factory=list)  # by number


def write_plan(folder: Path, plan: Plan) -> bool:
    """Write folder/sweep.jsonl atomically. Returns False where there is a plan already.

    Credentials in the command and in overrides are written as ***.
    """
    header = {"command": redact(plan.command), "value": plan.value, "inner": plan.inner}
    lines = [files.dumps(header), *map(_line, plan.jobs)]
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if (folder / FILE).exists():  # written by another task of a job array
            return False
        files.atomic_write_text(folder / FILE, "\n".join(lines) + "\n")
        return True


def add_jobs(folder: Path, jobs: list[Job]) -> None:
    """Append jobs; several processes may. A number that exists is replaced.

    Raises FileNotFoundError where there is no plan.
    """
    with _locked(folder), (folder / FILE).open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"\n", b"")  # by a process that was killed while it wrote
        text = ("\n" if torn else "") + "".join(_line(job) + "\n" for job in jobs)
        with (folder / FILE).open("ab", buffering=0) as appended:  # one write: no line is torn
            appended.write(text.encode())


def read_plan(folder: Path) -> Plan | None:
    """The plan of a sweep's directory; None where there is none.

    Raises ValueError where the file's first line is no header of a sweep.
    """
    try:
        with files.open_regular(folder / FILE, "r", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except files.NotRegularFile:
        raise ValueError(f"{folder / FILE} is not a regular file") from None
    first, *rest = text.split("\n")
    try:
        plan = files.as_record(files.loads(first), Plan)
    except ValueError:
        raise ValueError(f"{folder / FILE}: its first line is no header of a sweep") from None
    jobs = {job.number: job for job in map(_job, rest) if job}
    return replace(plan, jobs=[jobs[number] for number in sorted(jobs)])


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
    with open(folder / f".{FILE}.lock", "ab") as file:
        while time.monotonic() <= deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
