"""What is known of a sweep before Hydra runs, and what its sweeper is told."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from titanlike.config.credentials import REDACTED
from titanlike.config.errors import Problem, quoted
from titanlike.config.program import program
from titanlike.config.schema import Config
from titanlike.driver.sweep import SweepRun
from titanlike.metrics.summary import OBJECTIVES


@dataclass(frozen=True)
class SweepSettings:
    """A sweep as its command line describes it."""

    folder: Path  # its directory, absolute
    sweeper: DictConfig  # hydra.sweeper
    given: frozenset[str]  # keys of all overrides
    fixed: frozenset[str]  # keys with the same value in all jobs

    @property
    def grid(self) -> bool:
        """Whether all jobs are known from the start; else a search adds them."""
        return str(self.sweeper.get("_target_")).startswith("hydra_plugins.titanlike_sweeps.")

    def search_overrides(self, config: Config, value: str, done: int) -> list[str]:
        """Overrides for a search (Optuna's), for keys that the user has not set.

        It optimizes `value`, survives failed jobs, repeats itself for the same command, and is
        stored on disk: resumed, it has `done` fewer trials left.
        """
        defaults = {
            "direction": _best_direction(value),
            "max_failure_rate": "1.0",
            "n_jobs": str(config.sweep.parallel or 1),
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

    def problems(self, value: str, resume: bool) -> Iterator[Problem]:
        """Settings of a search that contradict `value` or cannot be resumed."""
        key, best = "hydra.sweeper.direction", _best_direction(value)
        direction = self.sweeper.get("direction")
        if key in self.given and getattr(direction, "name", direction) != best:
            reason = f"the best {value} is the {'highest' if OBJECTIVES[value] else 'lowest'} one"
            yield Problem(key, direction, reason, f"{key}={best}")
        key = "hydra.sweeper.storage"
        if resume and key in self.given and not self.sweeper.get("storage"):
            reason = "a search without storage cannot be resumed"
            yield Problem(key, "null", reason, "sweep.resume=false, and another run_dir")


def open_sweep(
    args: argparse.Namespace,
    config: Config,
    settings: SweepSettings,
    inner: str,
    restart: bool,
    created: list[Path],
) -> tuple[SweepRun, list[Problem]]:
    """Start or resume a sweep; appends to args.overrides what its sweeper has to know.

    inner: a job's subfolder of its run directory, or "". restart: whether this command was started
    before. created: folders that exist for this sweep, removed again if no job is valid.
    """
    words = sys.argv[1:]
    sweep_run = SweepRun(
        folder=settings.folder,
        settings=config.sweep,
        value=config.value or ("val_loss" if config.validation.every else "loss"),
        program=program(),
        options=_job_options(words),
        command=words,
        inner=inner,
        grid=settings.grid,
        fixed=settings.fixed,
        restart=restart,
        check=args.check,
        created=created,
    )
    args.overrides.append(f"hydra.sweep.dir={quoted(str(settings.folder))}")
    if args.check:
        args.overrides.append("hydra/launcher=jobs")  # others would start the jobs
    problems = [
        *_missing_secrets(config.sweep.submit),
        *settings.problems(sweep_run.value, config.sweep.resume),
    ] or sweep_run.open()
    if not problems and not settings.grid:
        args.overrides += settings.search_overrides(config, sweep_run.value, sweep_run.done)
        if sweep_run.base:  # a resumed search adds jobs, whose launcher counts from 0 again
            args.overrides.append(f"hydra.sweep.subdir='{sweep_run.base}+${{hydra.job.num}}'")
    return sweep_run, problems


def _missing_secrets(submit: str | None) -> Iterator[Problem]:
    """*** in a submit command: it was copied from what a sweep has printed or written."""
    if submit is not None and REDACTED in submit:
        missing = re.findall(rf"(?:[^\s'\"]+\s+)?[^\s'\"]*{re.escape(REDACTED)}", submit)
        reason = f"secrets are not written down; give them again: {', '.join(missing)}"
        yield Problem("sweep.submit", submit, reason)


def _best_direction(value: str) -> str:
    return "maximize" if OBJECTIVES[value] else "minimize"


def _job_options(words: list[str]) -> list[str]:
    """The words of a sweep's command line that each job gets besides its overrides."""
    flags = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
    of_sweep = ("hydra.sweep", "hydra.launcher", "hydra.run.", "hydra.mode", "hydra/")
    options, words = [], [*words]
    while words:
        word = words.pop(0)
        if word.partition("=")[0] in flags:
            options.append(word)
            if "=" not in word and words:
                options.append(words.pop(0))
        elif word.lstrip("+~").startswith("hydra.") and not word.startswith(of_sweep):
            options.append(word)
    return options
