"""A sweep in progress: its settings, directory, jobs and exit code."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from omegaconf import DictConfig

from titanlike.config.credentials import redact_override
from titanlike.config.errors import Problem, printable, quoted
from titanlike.config.overrides import from_hydra, key_of
from titanlike.config.program import program
from titanlike.config.schema import Config, Sweep
from titanlike.driver.job import SWEEP_FILE, JobRunner
from titanlike.driver.sweep_status import (
    Job,
    JobRow,
    SweepSpec,
    add_jobs,
    read_job_rows,
    read_spec,
    run_dir_word,
    write_spec,
)
from titanlike.launch.run_dir_lock import claim
from titanlike.metrics.summary import is_maximized

_RESTART_PATIENCE = 60.0  # seconds to wait for the previous launch to end


@dataclass
class SweepRun:
    """A sweep. Picklable, for launchers that run jobs on another machine."""

    folder: Path  # absolute
    settings: Sweep
    value: str  # the objective by which jobs are compared
    program: list[str]  # as typed: titanlike train, python train.py
    options: list[str]  # options that each job needs, too: --config-dir ...
    command: list[str]  # the sweep's command line after the program
    inner: str  # a tool's folder inside a job's folder, or ""
    grid: bool  # whether all jobs are known from the start (a search adds them as it goes)
    fixed: frozenset[str]  # keys with one value in all jobs
    restart: bool = False  # whether this command was launched before
    check: bool = False  # --check
    base: int = 0  # resumed search: number of the first new job
    created: list[Path] = field(default_factory=list)  # folders created for it, innermost first
    done: int = 0  # resumed search: number of jobs done before
    begun: bool = False  # whether its folder has a spec, from this or an earlier launch
    refused: int = 0  # number of jobs whose configs have errors
    imports: list[str] = field(default_factory=list)  # printed lines about user code
    problems: list[Problem] = field(default_factory=list)  # errors; if any, nothing is launched
    ran: set[int] = field(default_factory=set)  # numbers of the jobs that this command ran
    planned: dict[str, Job] = field(default_factory=dict)  # folder -> job
    lock: IO[str] | None = None  # held while this process runs the sweep

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "lock": None}

    @property
    def group(self) -> str:
        """The sweep's name in W&B: its folder's name, with the date if that is only a time."""
        name, parent = self.folder.name, self.folder.parent.name
        return name if any(map(str.isalpha, name)) else f"{parent}/{name}"

    @property
    def opening(self) -> Path:
        """File: what earlier jobs printed before their first step, see `Console.only_new`."""
        return self.folder / ".opening"

    @property
    def resumes(self) -> bool:
        """Whether only unfinished jobs are run."""
        return self.settings.resume or self.restart

    def open(self) -> list[Problem]:
        """Write the spec, or read the one to resume; return problems with the directory."""
        if self.check:
            return []
        reason, fix = "", "run_dir=outputs/NAME"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self.folder / f".{SWEEP_FILE}.run.lock"
            self.lock, who = claim(lock, _RESTART_PATIENCE if self.restart else 0.0)
            spec = read_spec(self.folder)
            self.opening.unlink(missing_ok=True)
            if self.lock is None:
                reason = f"this sweep is run by another start ({who})"
            elif spec is None and (self.folder / "config.yaml").exists():
                reason = "has a run, not a sweep"
            elif spec is None:
                new = SweepSpec(self.value, self.inner)
                spec = None if write_spec(self.folder, new) else read_spec(self.folder)
            self.begun = spec is not None or not self.grid
        except OSError as error:
            reason, spec = error.strerror or str(error), None
        except ValueError as error:
            reason, spec = str(error), None
        if spec is not None and not reason:
            if spec.inner != self.inner:
                reason = "has the sweep of another program"
            elif not self.resumes:
                reason = f"holds a sweep of {_count(len(spec.jobs))} already"
                fix = "sweep.resume=true to run what is not done, or another run_dir"
            elif spec.jobs and not self.grid:
                self.base = spec.jobs[-1].number + 1
                self.done = sum(row.done for row in read_job_rows(self.folder, spec))
        return [Problem("run_dir", str(self.folder), reason, fix)] if reason else []

    def _again(self) -> list[str]:
        """Return the words that run this sweep again, in the same directory."""
        words = [redact_override(w) for w in self.command if not w.startswith("sweep.resume=")]
        if not any(word.startswith(("run_dir=", "hydra.sweep.dir=")) for word in words):
            words.append(run_dir_word(self.folder))
        return [*self.program, *words]

    def swept(self, overrides: Iterable[str]) -> list[str]:
        """Return the overrides of a job that the sweep varies."""
        return [text for text in overrides if key_of(text) not in self.fixed]

    def job_name(self, overrides: Iterable[str]) -> str:
        """Return a job's name: the overrides that the sweep varies, or the sweep's name."""
        return ",".join(self.swept(job_overrides(overrides))) or self.group

    def job_folder(self, job: Job) -> Path:
        """Return the folder of a job's result.json and metrics.jsonl."""
        return self.folder / job.folder / self.inner

    def jobs_to_run(self, combinations: list[list[str]]) -> list[Job]:
        """Add all jobs of a grid to the spec; return those that this command runs.

        A job keeps its number and folder when the sweep is run again, also with additional values
        or reordered overrides.
        """
        spec = None if self.check else read_spec(self.folder)
        known = {_identity(job.overrides): job for job in spec.jobs} if spec else {}
        number = max((job.number for job in known.values()), default=-1) + 1
        jobs: dict[int, Job] = {}
        new = []
        for combination in combinations:
            overrides = job_overrides(combination)
            key = _identity(overrides)
            job = known.get(key)
            if job is None:
                job = known[key] = Job(number, str(number), overrides, self.swept(overrides))
                new.append(job)
                number += 1
            jobs[job.number] = job
        self.planned = {job.folder: job for job in jobs.values()}
        if self.check:
            return list(jobs.values())
        add_jobs(self.folder, new)
        rows: list[JobRow] = []
        if self.resumes and (spec := read_spec(self.folder)):
            rows = [row for row in read_job_rows(self.folder, spec) if row.job.number in jobs]
        done = {row.job.number for row in rows if row.done}
        ended = {row.job.number for row in rows if row.status in ("failed", "invalid")}
        before = f", {len(done)} of them done before" if done else ""
        self.say(f"a sweep of {_count(len(jobs))}{before}, in {self.folder}")
        for row in rows:
            if row.status == "running":
                self.say(f"job {row.job.number} runs elsewhere")
                del jobs[row.job.number]
        left = [job for at, job in jobs.items() if at not in done]
        if self.restart and not self.settings.resume:  # failed jobs last: they may fail again
            left.sort(key=lambda job: job.number in ended)
        return left

    def job_for(self, overrides: list[str], number: int) -> Job:
        """Return the job with these overrides, of the grid or a new one of a search."""
        for text in overrides:
            key, _, folder = text.partition("=")
            if key == "hydra.sweep.subdir" and folder in self.planned:
                return self.planned[folder]
        return self._add_job(str(number), number, job_overrides(overrides))

    def register(self, overrides: list[str], number: int, run_dir: Path) -> list[str]:
        """Add a job to the spec if it is new; return the overrides that it varies."""
        folder = str(run_dir.relative_to(self.folder)) if run_dir != self.folder else "."
        if folder not in self.planned:
            self._add_job(folder, self.base + number, job_overrides(overrides))
        return job_overrides(overrides)

    def _add_job(self, folder: str, number: int, overrides: list[str]) -> Job:
        """Add a new job to the spec."""
        job = self.planned[folder] = Job(number, folder, overrides, self.swept(overrides))
        if not self.check:
            add_jobs(self.folder, [job])
        return job

    def close(self, code: int | str | None) -> int | str | None:
        """Print the table; return the exit code. code: the exit code so far."""
        from titanlike.driver.sweep_table import read_table, report

        with contextlib.suppress(OSError):
            self.opening.unlink(missing_ok=True)
        if self.check:
            if not code and not self.refused:
                self.say("config OK; nothing was started (--check)")
            return 2 if self.refused else code
        if self.refused and not self.begun:  # all refused: remove this launch's spec and folders
            print("no job is valid; nothing was started", file=sys.stderr)
            if self.created:
                files = self.folder / SWEEP_FILE, *self.folder.glob(f".{SWEEP_FILE}.*lock")
                with contextlib.suppress(OSError):
                    for path in files:
                        path.unlink(missing_ok=True)
                    for folder in self.created:
                        folder.rmdir()
            return 2
        if code and not ((spec := read_spec(self.folder)) and spec.jobs):
            return code  # no job was planned
        self.say("")
        table = read_table(self.folder, self.ran)
        typed = {"-m", "--multirun"} & {*self.command}
        mode = [] if typed else ["hydra.mode=RUN"]  # or a file's mode would begin the sweep again
        report(table, [*self.program, *self.options, *mode], self._again(), self.say)
        if code:
            return code
        own_numbers = {job.number for job in self.planned.values()}
        statuses = {
            row.status for row in table.rows if row.job.number in own_numbers and not row.done
        }
        if self.ran and "waiting" in statuses:
            return 1  # it could not be launched
        if statuses & {"failed", "invalid", "killed"}:
            return 1
        return 75 if statuses & {"stopped", "interrupted"} else 0

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # jobs continue although stdout is closed
            print(printable(line), flush=True)

    def say_error(self, line: str) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            print(printable(line), file=sys.stderr, flush=True)


def job_overrides(overrides: Iterable[str]) -> list[str]:
    """Return a job's overrides as typed, without those of the sweep and of Hydra."""
    ours = ("sweep.", "run_dir=", "hydra.", "hydra/")
    return [text for text in map(from_hydra, overrides) if not text.lstrip("+~").startswith(ours)]


def _identity(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return a key that jobs with equal settings share; a repeated key's last value counts."""
    return tuple(sorted({key_of(text): redact_override(text) for text in overrides}.values()))


def _count(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


@dataclass(frozen=True)
class SweepSettings:
    """A sweep as described by its command line."""

    folder: Path  # the sweep's directory, absolute
    sweeper: DictConfig  # hydra.sweeper
    given: frozenset[str]  # keys that the overrides set
    fixed: frozenset[str]  # keys with the same value in all jobs

    @property
    def grid(self) -> bool:
        """Whether all jobs are known from the start; otherwise a search adds them."""
        return str(self.sweeper.get("_target_")).startswith("hydra_plugins.titanlike_sweeps.")

    def search_overrides(self, config: Config, value: str, done: int) -> list[str]:
        """Return overrides for a search with Optuna, for keys that the user has not set.

        The search optimizes `value`, tolerates failed jobs, is reproducible, and is stored on disk:
        resumed, it has `done` fewer trials left.
        """
        defaults = {
            "direction": _direction(value),
            "max_failure_rate": "1.0",
            "n_jobs": str(config.sweep.parallel),
            "storage": f"'sqlite:///{self.folder}/optuna.db'",
            "study_name": "sweep",
        }
        if "seed" in (self.sweeper.get("sampler") or {}):
            defaults["sampler.seed"] = str(config.seed + done)
        overrides = [
            f"hydra.sweeper.{key}={text}"
            for key, text in defaults.items()
            if key.partition(".")[0] in self.sweeper and f"hydra.sweeper.{key}" not in self.given
        ]
        if done and "n_trials" in self.sweeper:
            overrides.append(f"hydra.sweeper.n_trials={max(0, self.sweeper.n_trials - done)}")
        return overrides

    def problems(self, value: str, config: Config, processes: bool) -> Iterator[Problem]:
        """Yield settings that contradict `value`, that prevent resuming the sweep, or with which
        parallel `processes` would use the same GPUs."""
        if processes and config.sweep.parallel > 1 and config.device != "cpu":
            from titanlike.device.accelerator import visible_names, visible_variable

            if len(names := visible_names()) > 1:
                own = f"{visible_variable()}={names[0]}"
                reason = (
                    f"the jobs would take the same of GPUs {','.join(names)}; in several terminals "
                )
                reason += f"give each command its own, and other values: {own} ..."
                yield Problem("sweep.parallel", config.sweep.parallel, reason, "sweep.parallel=1")
        key, best = "hydra.sweeper.direction", _direction(value)
        direction = self.sweeper.get("direction")
        if key in self.given and getattr(direction, "name", direction) != best:
            reason = f"the best {value} is the {'highest' if is_maximized(value) else 'lowest'} one"
            yield Problem(key, direction, reason, f"{key}={best}")
        key = "hydra.sweeper.storage"
        if config.sweep.resume and key in self.given and not self.sweeper.get("storage"):
            reason = "a search without storage cannot be resumed"
            yield Problem(key, "null", reason, "sweep.resume=false, and another run_dir")


def _direction(value: str) -> str:
    return "maximize" if is_maximized(value) else "minimize"


def open_sweep(
    args: argparse.Namespace,
    config: Config,
    notes: Iterable[str],
    settings: SweepSettings,
    runner: JobRunner,
    created: list[Path],
) -> SweepRun:
    """Start or resume a sweep, or find its problems; appends the sweeper's settings to
    args.overrides.

    created: folders created for this sweep, removed again if no job is valid.
    """
    words, value = sys.argv[1:], config.value or ("val_loss" if config.validation.every else "loss")
    sweep_run = SweepRun(
        folder=settings.folder,
        settings=config.sweep,
        value=value,
        program=program(),
        options=_job_options(words),
        command=words,
        inner=runner.folder,
        grid=settings.grid,
        fixed=settings.fixed,
        restart=runner.restart,
        check=args.check,
        created=created,
        imports=[*notes],
    )
    args.overrides.append(f"hydra.sweep.dir={quoted(str(settings.folder))}")
    if args.check:
        args.overrides.append("hydra/launcher=jobs")  # the launcher that runs jobs here
    sweep_run.problems = [
        *settings.problems(value, config, runner.ranks is None)
    ] or sweep_run.open()
    if not sweep_run.problems and not settings.grid:
        args.overrides += settings.search_overrides(config, value, sweep_run.done)
        if sweep_run.base:  # in a resumed search the launcher counts new jobs from 0 again
            args.overrides.append(f"hydra.sweep.subdir='{sweep_run.base}+${{hydra.job.num}}'")
    return sweep_run


def _job_options(words: list[str]) -> list[str]:
    """Return the options of a sweep's command line that each job needs, too."""
    flags = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
    sweep_only = ("hydra.sweep", "hydra.launcher", "hydra.run.", "hydra.mode", "hydra/")
    options, words = [], [*words]
    while words:
        word = words.pop(0)
        if word.partition("=")[0] in flags:
            options.append(word)
            if "=" not in word and words:
                options.append(words.pop(0))
        elif word.lstrip("+~").startswith("hydra.") and not word.startswith(sweep_only):
            options.append(word)
    return options
