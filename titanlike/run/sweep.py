"""A sweep in progress: its settings, directory, jobs and exit code."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from titanlike.core.config.credentials import redact_override
from titanlike.core.config.errors import Problem, printable, quoted
from titanlike.core.config.overrides import from_hydra, key_of
from titanlike.core.config.program import program
from titanlike.core.config.schema import Config
from titanlike.core.launch.run_dir_lock import claim
from titanlike.core.metrics.summary import is_maximized
from titanlike.run.job import SWEEP_FILE, JobRunner
from titanlike.run.sweep_table import JobRow, add_job, best_job, read_jobs, read_row, sweep_lines

_LOCK = f".{SWEEP_FILE}.run.lock"


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
