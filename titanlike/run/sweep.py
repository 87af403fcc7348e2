"""A sweep in progress: its settings, directory, jobs, exit code, and the table at its end. No torch.

sweep.jsonl has a line for each job: {"number": 3, "overrides": [...]}; its files are in the folder of
its number. Several processes append to it at once: a launcher's, which add the jobs of a search.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from titanlike.core.config import files
from titanlike.core.config.credentials import redact_override
from titanlike.core.config.errors import Problem, printable, quoted
from titanlike.core.config.overrides import from_hydra, key_of
from titanlike.core.config.program import program
from titanlike.core.config.schema import OBJECTIVES, Config
from titanlike.core.launch.run_dir_lock import claim, is_locked
from titanlike.core.metrics import units
from titanlike.core.metrics.console import LOG_WIDTH, shorten, table_lines
from titanlike.core.metrics.run_files import append_line, ended_by_max_time, read_result
from titanlike.core.metrics.summary import Summary, is_maximized, summarize
from titanlike.run.job import SWEEP_FILE, JobRunner

_LOCK = f".{SWEEP_FILE}.run.lock"
_KILLED = re.compile(r"(rank \d+ failed: )?killed by ")
_LEFT_BY_RUNS = ("config.yaml", "metrics.jsonl", "logs", "result.json")
_ROUNDING = 1e-5  # relative difference of equal objectives: layouts round differently
_NAMED, _ERRORS = 8, 20  # jobs that are listed by number, distinct errors below the table


@dataclass
class SweepRun:
    """A sweep. Picklable, for launchers that run jobs on another machine."""

    folder: Path  # absolute
    fixed: frozenset[str] = frozenset()  # keys with one value in all jobs
    grid: bool = True  # whether all jobs are known from the start (a search adds them as it goes)
    command: list[str] = field(default_factory=lambda: sys.argv[1:])
    program: list[str] = field(default_factory=program)  # as typed: titanlike train
    value: str = "loss"  # the objective by which jobs are compared
    parallel: int = 1
    inner: str = ""  # a tool's folder inside a job's folder, or ""
    check: bool = False  # --check
    jobs: dict[int, list[str]] = field(default_factory=dict)  # number -> overrides
    own: frozenset[int] | None = None  # of a grid: this command's; earlier ones had others
    notes: list[str] = field(default_factory=list)  # printed lines about user code
    begun: bool = False  # whether its folder has a sweep, from this or an earlier launch
    refused: int = 0  # number of jobs whose configs have errors
    lock: IO[str] | None = None  # held while this process runs the sweep

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "lock": None}

    @property
    def group(self) -> str:
        """The sweep's name in W&B: its folder's name, with the date if that is only a time."""
        name, parent = self.folder.name, self.folder.parent.name
        return name if any(map(str.isalpha, name)) else f"{parent}/{name}"

    def open(self, resume: bool, patience: float = 0.0) -> list[Problem]:
        """Take the directory, for a new sweep or one to resume; return problems with it.

        patience: seconds to wait for an earlier launch to end.
        """
        reason, fix = "", "run_dir=outputs/NAME"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock, who = claim(self.folder / _LOCK, patience)
            self.jobs = read_jobs(self.folder)
            self.begun = bool(self.jobs) or not self.grid
            if self.lock is None:
                reason = f"this sweep is run by another start ({who})"
            elif not self.jobs and (self.folder / "config.yaml").exists():
                reason = "has a run, not a sweep"
            elif self.jobs and not resume:
                reason = f"holds a sweep of {_count(self.jobs)} already"
                fix = "sweep.resume=true to run what is not done, or another run_dir"
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        return [Problem("run_dir", str(self.folder), reason, fix)] if reason else []

    def job_name(self, number: int) -> str:
        """Return a job's name: the overrides that the sweep varies, or ""."""
        return ",".join(text for text in self.jobs[number] if key_of(text) not in self.fixed)

    def label(self, number: int) -> str:
        """Return a job's number and name, as "3: seed=1"."""
        return f"{number}: {self.job_name(number)}".rstrip(": ")

    def add(self, number: int, overrides: Iterable[str]) -> None:
        """Add a job, unless its number is known."""
        if number not in self.jobs:
            self.jobs[number] = job_overrides(overrides)
            if not self.check:
                add_job(self.folder, number, self.jobs[number])

    def number_of(self, overrides: Iterable[str]) -> int:
        """Return the number of the job with these overrides, in any order; a new one is added.

        A job keeps its number and folder when the sweep is run again, also with further values.
        """
        identity = _identity(job_overrides(overrides))
        number = self._numbers.setdefault(identity, max(self.jobs, default=-1) + 1)
        self.add(number, overrides)
        return number

    @cached_property
    def _numbers(self) -> dict[tuple[str, ...], int]:
        return {_identity(overrides): number for number, overrides in self.jobs.items()}

    def job_folder(self, number: int) -> Path:
        """Return the folder of a job's result.json and metrics.jsonl."""
        return self.folder / str(number) / self.inner

    def row(self, number: int) -> JobRow:
        """Return how a job stands."""
        return read_row(self.job_folder(number), number, self.jobs[number])

    def rows(self) -> list[JobRow]:
        """Return how each job of the directory stands, by number."""
        if self.check:
            return []
        self.jobs = read_jobs(self.folder)  # other processes may have added some
        return [*map(self.row, self.jobs)]

    def jobs_to_run(self, combinations: list[list[str]]) -> list[int]:
        """Add all jobs of a grid; return the numbers of those that this command runs."""
        numbers = dict.fromkeys(map(self.number_of, combinations))
        self.own = frozenset(numbers)
        own = [row for row in self.rows() if row.number in numbers]
        done = [row.number for row in own if row.done]
        running = [row.number for row in own if row.status == "running"]
        if not self.check:
            before = f", {len(done)} of them done before" if done else ""
            self.say(f"a sweep of {_count(numbers)}{before}, in {self.folder}")
        for number in running:
            self.say(f"job {number} runs elsewhere")
        return [number for number in numbers if number not in {*done, *running}]

    def close(self, code: int | str | None) -> int | str | None:
        """Print the table; return the exit code. code: the exit code so far."""
        if self.check:
            if not code and not self.refused:
                self.say("config OK; nothing was started (--check)")
            return 2 if self.refused else code
        if self.refused and not self.begun:
            self.say("no job is valid; nothing was started", error=True)
            with contextlib.suppress(OSError):
                for name in (SWEEP_FILE, _LOCK):
                    (self.folder / name).unlink()
                self.folder.rmdir()
            return 2
        if not (rows := self.rows()):
            return code  # no job was planned
        best = None if self.inner else best_job(rows, self.value)  # of a tool's value unknown
        own = [row for row in rows if self.own is None or row.number in self.own]
        left = {row.status for row in own if not row.done}
        again = self._again() if left else []
        for line in ["", *sweep_lines(rows, self.value, best, self._start(), again)]:
            self.say(line)
        if code or not left - {"running"}:  # a job that runs elsewhere is no failure
            return code
        return 75 if left <= {"stopped", "interrupted", "running"} else 1

    def _start(self) -> list[str]:
        """Return the words before a job's overrides that run it alone."""
        typed = {"-m", "--multirun"} & {*self.command}
        mode = [] if typed else ["hydra.mode=RUN"]  # or a file's mode would begin the sweep again
        return [*self.program, *self.options(), *mode]

    def _again(self) -> list[str]:
        """Return the words that run this sweep again, in the same directory."""
        words = [redact_override(w) for w in self.command if not w.startswith("sweep.resume=")]
        if not any(word.startswith(("run_dir=", "hydra.sweep.dir=")) for word in words):
            plain = re.fullmatch(r"[\w./-]+", str(self.folder), re.ASCII)  # needs no quotes
            words.append(f"run_dir={self.folder if plain else quoted(str(self.folder))}")
        return [*self.program, *words, "sweep.resume=true"]

    def options(self) -> list[str]:
        """Return the options of the command line that each job needs, too."""
        flags = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
        sweep_only = ("hydra.sweep", "hydra.launcher", "hydra.run.", "hydra.mode", "hydra/")
        options, words = [], [*self.command]
        while words:
            word = words.pop(0)
            if word.partition("=")[0] in flags:
                options.append(word)
                if "=" not in word and words:
                    options.append(words.pop(0))
            elif word.lstrip("+~").startswith("hydra.") and not word.startswith(sweep_only):
                options.append(word)
        return options

    def say(self, line: str, error: bool = False) -> None:
        with contextlib.suppress(OSError):  # jobs continue although stdout is closed
            sys.stdout.flush()
            print(printable(line), file=sys.stderr if error else sys.stdout, flush=True)


def job_overrides(overrides: Iterable[str]) -> list[str]:
    """Return a job's overrides as typed, without those of the sweep and of Hydra."""
    ours = ("sweep.", "run_dir=", "hydra.", "hydra/")
    return [text for text in map(from_hydra, overrides) if not text.lstrip("+~").startswith(ours)]


def _identity(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return a key that jobs with equal settings share; a repeated key's last value counts."""
    return tuple(sorted({key_of(text): redact_override(text) for text in overrides}.values()))


def _count(jobs: Collection[int]) -> str:
    return "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"


def open_sweep(
    sweep_run: SweepRun, args: argparse.Namespace, config: Config, runner: JobRunner, sweeper: Any
) -> list[Problem]:
    """Start or resume a sweep, or return its problems; adds to args.overrides.

    sweeper: Hydra's section of that name.
    """
    value = config.value or ("val_loss" if config.validation.every else "loss")
    sweep_run.value, sweep_run.parallel = value, config.sweep.parallel
    sweep_run.inner, sweep_run.check = runner.folder, args.check
    args.overrides.append(f"hydra.sweep.dir={quoted(str(sweep_run.folder))}")
    if not sweep_run.grid:
        # of Optuna: it optimizes `value`, and outlives failed jobs. With a seed it tries the same
        # jobs when it is resumed, of which those that are done are not run again
        search = {
            "direction": "maximize" if is_maximized(value) else "minimize",
            "max_failure_rate": "1.0",
            "n_jobs": str(config.sweep.parallel),
            "sampler.seed": str(config.seed),
        }
        known = {*sweeper, *(f"sampler.{key}" for key in sweeper.get("sampler") or ())}
        args.overrides[:0] = [  # first, so that what the user sets counts
            f"hydra.sweeper.{key}={text}" for key, text in search.items() if key in known
        ]
    if args.check or runner.ranks is not None:  # jobs run here, or on these ranks
        others = [text for text in args.overrides if not text.startswith("hydra/launcher=")]
        args.overrides = [*others, f"hydra/launcher={'jobs' if args.check else 'basic'}"]
    if args.check:
        return []
    if runner.ranks is None and (problems := shared_gpus(config)):
        return problems
    return sweep_run.open(config.sweep.resume or runner.restart, 60.0 if runner.restart else 0.0)


def shared_gpus(config: Config) -> list[Problem]:
    """Return the problem of parallel jobs, which would use the same GPU of several."""
    if config.sweep.parallel == 1 or config.device == "cpu":
        return []
    from titanlike.core.device.accelerator import visible_names, visible_variable

    if len(names := visible_names()) < 2:
        return []
    own = f"{visible_variable()}={names[0]}"
    reason = f"the jobs would take the same of GPUs {','.join(names)}; in several terminals "
    reason += f"give each command its own, and other values: {own} ..."
    return [Problem("sweep.parallel", config.sweep.parallel, reason, "sweep.parallel=1")]


# --- its jobs, and how each ended -----------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """A line of sweep.jsonl."""

    number: int
    overrides: list[str]


def add_job(folder: Path, number: int, overrides: Sequence[str]) -> None:
    """Append a job to sweep.jsonl; credentials are written as ***."""
    shown = [redact_override(text) for text in overrides]
    # after a new line, for a killed process may have torn the last one
    append_line(folder / SWEEP_FILE, "\n" + files.dumps({"number": number, "overrides": shown}))


def read_jobs(folder: Path) -> dict[int, list[str]]:
    """Read the jobs of a sweep's directory by number, the last line of each; none if there is none.

    Raises ValueError if sweep.jsonl is no regular file, OSError if it is unreadable.
    """
    jobs = {}
    try:
        lines = files.read_bytes(folder / SWEEP_FILE).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ValueError(f"{folder / SWEEP_FILE} {error}") from None
    for line in lines:
        with contextlib.suppress(ValueError):  # torn, empty, or the header of earlier versions
            job = files.as_record(files.loads(line), _Job)
            jobs[job.number] = job.overrides
    return dict(sorted(jobs.items()))


@dataclass(frozen=True)
class JobRow:
    """A job, its status and its numbers. Statuses:

    completed, failed, interrupted, stopped (early by a stop request: it can be resumed) and invalid
    (an error in its config, nothing was started), as result.json says; killed: it ended without
    result.json, or a signal killed one of its processes; running; waiting: not started yet.
    """

    number: int
    overrides: list[str]
    status: str
    error: str | None
    summary: Summary
    value: float | None  # the objective, once it has ended
    seconds: float | None  # wall time of its last launch

    @property
    def done(self) -> bool:
        """Whether it completed, or reached its max_time."""
        return self.status == "completed" or ended_by_max_time(self.status, self.error)


def read_row(run_dir: Path, number: int, overrides: list[str]) -> JobRow:
    """Return how a job stands. Raises OSError for unreadable files."""
    result, unread = dict[str, Any](), "it ended without a word: no result.json"
    try:
        result = read_result(run_dir) or {}
    except NotADirectoryError:
        pass
    except ValueError as odd:  # for example truncated by a copy
        unread = str(odd)
    status, error = result.get("status", "killed"), result.get("error") if result else unread
    if status == "failed" and _KILLED.match(error or ""):
        status = "killed"
    elif not result and is_locked(run_dir):
        status, error = "running", None
    elif not result and not any((run_dir / name).exists() for name in _LEFT_BY_RUNS):
        status, error = "waiting", None
    numbers = summarize(run_dir), result.get("value"), result.get("seconds")
    return JobRow(number, overrides, status, error, *numbers)


def best_job(rows: Sequence[JobRow], value: str) -> JobRow | None:
    """Return the completed job with the best objective, the fastest of those that are equal up to
    rounding; None = none has one."""
    sign = -1 if is_maximized(value) else 1
    numbers = [(row.value, row) for row in rows if row.done]
    done = [(sign * v, row) for v, row in numbers if v is not None and math.isfinite(v)]
    least = min((number for number, _ in done), default=0.0)
    ties = [row for number, row in done if number - least <= _ROUNDING * abs(least)]
    return max(ties, key=lambda row: row.summary.tokens_per_second or 0.0, default=None)


def sweep_lines(
    rows: Sequence[JobRow], value: str, best: JobRow | None, start: list[str], again: list[str]
) -> list[str]:
    """Format the table, errors, the best job and the unfinished ones.

    start: the words before a job's own overrides. again: those that run this sweep again, if it has
    jobs left. Both are this command's own: of sweep.jsonl, which others may have written, only
    overrides are printed, each quoted. Commands are not cut, so that they can be copied.
    """
    width = shutil.get_terminal_size((LOG_WIDTH, 0)).columns
    lines = table_lines("", *_columns(rows, value), width)
    told = [
        f"  {row.number} {row.status}: {row.error.splitlines()[0]}"
        for row in rows
        if row.error and row.status != "completed"
    ]
    lines += [""] * bool(told) + [shorten(line, width) for line in told[:_ERRORS]]
    if len(told) > _ERRORS:
        lines.append(f"  and {len(told) - _ERRORS} other errors, each in its job's result.json")
    if best is not None and best.value is not None:
        lines += ["", f"best {value}: {best.value:.6g}, of job {best.number}"]
        lines += [f"  {shlex.join([*start, *best.overrides])}"]
    left: dict[str, list[JobRow]] = {}
    for row in rows:
        if not row.done:
            left.setdefault(row.status, []).append(row)
    named = ", ".join(f"{_numbers(jobs)} ({status})" for status, jobs in left.items())
    done = f"{sum(row.done for row in rows)} of {len(rows)} done"
    lines += ["", f"{done}; left: {named}" if left else done]
    if again and left.keys() - {"running"}:
        invalid = _numbers(left.get("invalid", []))
        purpose = f" (jobs {invalid} are invalid as they are)" if invalid else ""
        lines += [f"to run what is left{purpose}:", f"  {shlex.join(again)}"]
    return lines


def _columns(rows: Sequence[JobRow], value: str) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and each job's cells: overrides that differ between jobs, and numbers that
    any has. value: the objective's name; a metric of the user's (not in OBJECTIVES) is shown."""
    columns = [("job", [str(row.number) for row in rows])]
    settings = [{key_of(text): text.partition("=")[2] for text in row.overrides} for row in rows]
    for key in dict.fromkeys(key for values in settings for key in values):
        cells = [values.get(key, "") for values in settings]
        if len({*cells}) > 1:
            columns.append((key, cells))
    columns.append(("status", [row.status for row in rows]))
    numbers: list[tuple[str, list[Any], Callable[[Any], str]]] = [
        ("loss", [row.summary.loss for row in rows], units.decimal),
        ("val_loss", [row.summary.val_loss for row in rows], units.decimal),
        (value, [row.value for row in rows if value not in OBJECTIVES], units.decimal),
        ("tok/s", [row.summary.tokens_per_second for row in rows], units.count),
        ("samples/s", [row.summary.samples_per_second for row in rows], units.count),
        ("memory", [row.summary.memory_bytes for row in rows], units.size),
        ("time", [row.seconds for row in rows], units.duration),
    ]
    for header, values, form in numbers:
        if any(number is not None for number in values):
            columns.append((header, ["-" if v is None else form(v) for v in values]))
    headers, by_column = zip(*columns, strict=True)
    return [*headers], [[*row] for row in zip(*by_column, strict=True)]


def _numbers(rows: Sequence[JobRow]) -> str:
    """Format job numbers; only the first few."""
    numbers = [str(row.number) for row in rows]
    more = f", ... {len(numbers)} in all" if len(numbers) > _NAMED else ""
    return ", ".join(numbers[:_NAMED]) + more
