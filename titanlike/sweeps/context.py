"""A sweep as all its parts see it: its directory, its plan, what its jobs are called, how it ends."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from titanlike.config.credentials import redact_override
from titanlike.config.errors import Problem
from titanlike.config.schema import Sweep
from titanlike.config.validate import part_of
from titanlike.metrics.result import read_result
from titanlike.sweeps.plan import Job, Plan, add_jobs, read_plan, write_plan


@dataclass
class Context:
    """A sweep. Plain data, so that a launcher may take it to another machine."""

    folder: Path  # absolute
    settings: Sweep
    value: str  # what the jobs are compared by
    program: list[str]  # train.py, or -m titanlike
    options: list[str]  # of the command line that each job needs, too: --config-dir ...
    command: list[str]  # the sweep's own command line, after the program
    inner: str  # a tool's own place in a job's folder, or ""
    grid: bool  # whether all jobs are known from the start (a search adds them as it goes)
    fixed: frozenset[str]  # keys that are the same in all jobs
    restart: bool  # whether this command was started before
    check: bool = False  # only look for mistakes
    base: int = 0  # of a search that goes on: the first new job's number
    done: int = 0  # and how many jobs were done before
    wrong: int = 0  # jobs with mistakes that --check has found
    ran: set[int] = field(default_factory=set)  # numbers of jobs that this command has run
    planned: dict[str, Job] = field(default_factory=dict)  # jobs by their folders

    @property
    def group(self) -> str:
        """The sweep's name in W&B: its folder's, with the date where it is a mere time."""
        name, parent = self.folder.name, self.folder.parent.name
        return name if any(map(str.isalpha, name)) else f"{parent}/{name}"

    def open(self) -> list[Problem]:
        """Begin the plan in the sweep's directory, or find what is wrong with going on there."""
        if self.check:
            return []
        goes_on = self.settings.resume or self.settings.share is not None or self.restart
        try:
            plan = read_plan(self.folder)
        except ValueError as error:
            return [Problem("run_dir", str(self.folder), str(error), "run_dir=outputs/NAME")]
        if plan is not None and plan.jobs and not goes_on:
            reason = f"holds a sweep of {len(plan.jobs)} jobs already"
            fix = "sweep.resume=true to run what is not done, or another run_dir"
            return [Problem("run_dir", str(self.folder), reason, fix)]
        if plan is not None and plan.jobs and not self.grid:
            self.base = plan.jobs[-1].number + 1
            self.done = sum(map(self._done, plan.jobs))
        if plan is None:
            of_this_start = ("sweep.resume=", "sweep.share=")
            words = [word for word in self.command if not word.startswith(of_this_start)]
            command = ["python", *self.program, *words]
            if not any(word.startswith(("run_dir=", "hydra.sweep.dir=")) for word in command):
                command.append(f"run_dir={self.folder}")
            write_plan(self.folder, Plan(shlex.join(command), self.value, self.inner))
        return []

    def swept(self, overrides: Iterable[str]) -> list[str]:
        """Those of a job's overrides that the sweep varies."""
        return [text for text in overrides if key_of(text) not in self.fixed]

    def name_of(self, overrides: Iterable[str]) -> str:
        """What a job is called: the overrides that the sweep varies."""
        return ",".join(self.swept(of_job(overrides)))

    def folder_of(self, job: Job) -> Path:
        """Where a job writes its result.json and metrics.jsonl."""
        return self.folder / job.folder / self.inner

    def add(self, jobs: list[Job]) -> None:
        """Put jobs into the plan."""
        if not self.check:
            add_jobs(self.folder, jobs)

    def todo(
        self, combinations: list[list[str]], left_out: Mapping[tuple[str, ...], str] | None = None
    ) -> list[Job]:
        """The jobs of a grid that this command is to run; all of them are put into the plan.

        A job keeps its number and folder when the sweep is run again, also with more values.
        left_out: combinations that are not to be started, and why.
        """
        plan = None if self.check else read_plan(self.folder)
        known = {tuple(job.overrides): job for job in plan.jobs} if plan else {}
        number = max((job.number for job in known.values()), default=-1) + 1
        jobs, new = [], []
        for combination in combinations:
            overrides, why = of_job(combination), (left_out or {}).get(tuple(combination))
            key = tuple(map(redact_override, overrides))
            if key not in known:
                known[key] = Job(number, str(number), overrides, self.swept(overrides), why)
                new.append(known[key])
                number += 1
            elif known[key].skipped != why:
                known[key] = replace(known[key], skipped=why)
                new.append(known[key])
            if why is None and known[key] not in jobs:  # values that are given twice
                jobs.append(known[key])
        self.add(new)
        goes_on = self.settings.resume or self.settings.share is not None or self.restart
        if self.settings.share is not None and (part := part_of(self.settings.share)):
            jobs = [job for job in jobs if job.number % part[1] == part[0]]
        self.planned = {job.folder: job for job in jobs}
        left = [job for job in jobs if not (goes_on and self._done(job))]
        done = f", {len(jobs) - len(left)} of them done before" if len(left) < len(jobs) else ""
        if not self.check:
            self.say(f"a sweep of {_count(len(jobs))}{done}, in {self.folder}")
        return left

    def job_of(self, overrides: list[str], number: int) -> Job:
        """The job with these overrides: of the grid, or a new one that a search has thought of."""
        for text in overrides:
            key, _, folder = text.partition("=")
            if key == "hydra.sweep.subdir" and folder in self.planned:
                return self.planned[folder]
        own = of_job(overrides)
        job = self.planned[str(number)] = Job(number, str(number), own, self.swept(own))
        self.add([job])
        return job

    def planned_here(self, overrides: list[str], number: int, run_dir: Path) -> list[str]:
        """A job's own overrides, also of a job that another launcher than ours begins."""
        own = of_job(overrides)
        folder = str(run_dir.relative_to(self.folder)) if run_dir != self.folder else "."
        if folder not in self.planned:
            self.add([Job(self.base + number, folder, own, self.swept(own))])
        return own

    def _done(self, job: Job) -> bool:
        """Whether a job needs not be run again. One that max_time ended has had its time."""
        try:
            result = read_result(self.folder_of(job)) or {}
        except ValueError:
            return False
        stopped_by_time = result.get("status") == "stopped" and "max_time" in result["error"]
        return result.get("status") == "completed" or stopped_by_time

    def close(self, code: int | str | None) -> int | str | None:
        """Show how the sweep stands, and write its table; the exit code, where so far it was `code`."""
        from titanlike.metrics.console import LOG_WIDTH
        from titanlike.sweeps.tool import report

        if self.check:
            if not code and not self.wrong:
                self.say("no mistake found; nothing was started (--check)")
            return 2 if self.wrong else code
        if code and not ((plan := read_plan(self.folder)) and plan.jobs):
            return code  # it has not begun
        self.say("")
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else LOG_WIDTH
        waited = self.settings.submit is None or self.settings.wait is not None
        table = report(self.folder, self.say, width, ended=self.ran if waited else ())
        if code:
            return code
        rows = [row for row in table.rows if row.job.number in self.ran or not self.ran]
        statuses = {row.status for row in rows if not row.done}
        if statuses & {"failed", "invalid", "killed"}:
            return 1
        return 75 if statuses & {"stopped", "interrupted"} else 0

    def say(self, line: str) -> None:
        """Tell the user, between the jobs' own lines."""
        print(line, flush=True)

    def complain(self, line: str) -> None:
        """Tell the user of something that went wrong."""
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)


def of_job(overrides: Iterable[str]) -> list[str]:
    """A job's own overrides as a user would write them: without those of the sweep and of Hydra."""
    words = [text[2:] if text.startswith("++model.") else text for text in overrides]
    ours = ("sweep.", "run_dir=", "hydra.", "hydra/")
    return [text for text in words if not text.lstrip("+~").startswith(ours)]


def key_of(override: str) -> str:
    """What an override sets."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _count(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"
