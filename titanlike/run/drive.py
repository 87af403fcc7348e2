"""Drives a command: checks its overrides, lets Hydra compose each job's config, and runs the jobs.

1. `drive` parses the command line with Hydra's parser and completes it.
2. Everything is checked before Hydra runs; all errors are shown at once. `--check` ends here.
3. Hydra composes the config, once, or once for each job of a sweep (`-m`), and calls `Task`.
4. `Task` runs the job (`job.JobRunner`), which leaves run_dir/result.json.
5. A sweep ends with a table of its jobs (`SweepRun.close`).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import re
import sys
import time
import traceback
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from titanlike.core.config import files
from titanlike.core.config.credentials import redact
from titanlike.core.config.errors import ConfigError, Problem, printable, quoted
from titanlike.core.config.overrides import from_hydra
from titanlike.core.launch.environment import adopt_slurm
from titanlike.core.launch.failures import JobFailed, record_for_torchrun
from titanlike.core.metrics.run_files import Status
from titanlike.run import job
from titanlike.run.argv import complete_args, one_line, parse_argv, parser
from titanlike.run.overrides import CheckedOverrides, check_overrides, config_loader, parsed

if TYPE_CHECKING:
    from titanlike.run.sweep import SweepRun

ExitCode = int | str | None  # as sys.exit takes it
_OF_STORAGE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}


def drive(runner: job.JobRunner, result_dir: str | None) -> ExitCode:
    """Run the command line's job or sweep; return the exit code. result_dir: as in `cli.start_job`."""
    args = parse_argv(sys.argv[1:])
    modes = [flag for flag in ("run", "multirun", "cfg", "info") if getattr(args, flag)]
    if len(modes) > 1:
        print(f"only one of --{', --'.join(modes)} can be given", file=sys.stderr)
        return 2
    complete_args(args)
    if args.shell_completion and (line := os.environ.get("COMP_LINE")):
        # Hydra would read the subcommand as an override
        line = re.sub(r"^(\s*\S*titanlike\s+)[a-z][a-z-]*\s+", r"\1", line)
        os.environ["COMP_LINE"] = line
    task = Task(runner)
    if args.cfg or args.info:
        if problems := check_overrides(args).problems:
            return job.print_problems(problems)
    elif not (args.hydra_help or args.shell_completion):
        code = _prepare(args, task, result_dir)
        if code is not None:
            return code
    return _run(args, task, result_dir)


class Task:
    """What Hydra calls with each composed config, of a run or a sweep's job in this process."""

    def __init__(self, runner: job.JobRunner) -> None:
        self.runner = runner
        self.sweep_run: SweepRun | None = None  # only for a sweep
        self.checked: CheckedOverrides | None = None  # only for a command that launches something
        self.end: job.JobEnd | None = None  # only for a single run
        self.error: Exception | None = None  # Hydra would print its own line above its text
        self._pid = os.getpid()

    def __call__(self, composed: DictConfig) -> float | None:
        """Run the job; return its value for a sweeper. Raises JobFailed if a sweep's job failed."""
        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        overrides = [from_hydra(text) for text in hydra.overrides.task]
        if self.sweep_run is None:
            assert self.checked is not None and self.checked.config is not None
            self.runner.restart_state.set_default("hydra.run.dir", str(run_dir))
            self.runner.restart_state.set_default("started", str(time.time()))
            try:
                self.end = self.runner.run(self.checked.config, [], run_dir, overrides)
            except Exception as error:
                self.error = error
            return self.end.value if self.end else None
        _, config, problems = parsed(composed)
        number = int(run_dir.name)
        self.sweep_run.add(number, overrides)
        overrides, group = self.sweep_run.jobs[number], self.sweep_run.group
        name = group, self.sweep_run.job_name(number) or group
        self.sweep_run.say(f"\njob {self.sweep_run.label(number)}")
        # a launcher such as submitit pickles this object to another machine
        elsewhere = os.getpid() != self._pid
        run = partial(_run_elsewhere, self.runner) if elsewhere else self.runner.run
        end = run(config, problems, run_dir, overrides, name)
        if end.ends_sweep:
            raise SystemExit(end.code or 75)
        if end.code in (0, 75):
            return end.value
        raise JobFailed(end.error, end.error)

    def __getstate__(self) -> dict[str, object]:
        runner = job.JobRunner(self.runner.function, self.runner.folder)
        return {**self.__dict__, "runner": runner, "checked": None}


def _run_elsewhere(runner: job.JobRunner, *arguments: Any) -> job.JobEnd:
    """Call `runner.run` in a process that did not call `drive`, alone or as srun's rank."""
    adopt_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return runner.run(*arguments)
    from titanlike.core.launch.torchrun import TorchrunRanks

    ranks = TorchrunRanks()
    if ranks.rank > 0:
        return job.JobEnd(ranks.run_follower())
    end = job.JobEnd(1)
    try:
        end = job.JobRunner(runner.function, runner.folder, ranks).run(*arguments)
        return end
    finally:
        ranks.shutdown(end.code)


def _prepare(args: Namespace, task: Task, result_dir: str | None) -> ExitCode:
    """Check everything and open the sweep. Return the exit code if the command ends here."""
    state = task.runner.restart_state
    paths = {key: state.get(key) for key in ("hydra.run.dir", "hydra.sweep.dir")}
    # a restart writes into the folders of the first launch
    first_folder = [f"{key}={quoted(path)}" for key, path in paths.items() if path is not None]
    args.overrides += first_folder
    runner = task.runner = replace(task.runner, restart=task.runner.restart or bool(first_folder))
    checked = check_overrides(args)
    runner = task.runner = replace(runner, environment=checked.environment)
    for line in checked.notes if not runner.checked else ():  # before user code is imported
        print(printable(redact(line)), flush=True)
    config, none = checked.config, checked.problems or checked.multirun or runner.checked
    if config is not None and not none and sys.stdout.isatty():  # what follows takes seconds
        count, device = config.world_size, config.device
        where = "" if device == "auto" else f" on {device}"
        print(f"{count} rank{'s' * (count > 1)}{where}, importing torch ...", flush=True)
    try:
        problems = _problems(args, checked, runner)
        if checked.multirun and not problems:
            assert checked.config is not None and checked.composed is not None
            task.sweep_run = sweep_run = checked.sweep
            assert sweep_run is not None
            sweep_run.notes += checked.notes
            if checked.new_folder and not args.check:
                sweep_run.folder = files.make_new_folder(sweep_run.folder)
            # saved before the sweep's files, which a restart must find
            state.set_default("hydra.sweep.dir", str(sweep_run.folder))
            from titanlike.run.sweep import open_sweep

            sweeper = checked.composed.hydra.sweeper
            problems = open_sweep(sweep_run, args, checked.config, runner, sweeper)
    except JobFailed as failed:
        print(failed, file=sys.stderr)
        record_for_torchrun(failed)
        _write_result(result_dir, args, "failed", failed.error)
        return 1
    if problems:
        problems = [problem.hiding(checked.environment) for problem in problems]
        _write_result(result_dir, args, "invalid", str(ConfigError(problems)))
        return job.print_problems(problems)
    if args.check and (task.sweep_run is None or not task.sweep_run.grid):
        print("config OK; nothing was started (--check)")
        return 0
    task.checked = checked
    if task.sweep_run is None and checked.new_folder:
        assert checked.composed is not None
        checked.composed.hydra.run.dir = str(files.make_new_folder(checked.new_folder))
    return None


def _problems(args: Namespace, checked: CheckedOverrides, runner: job.JobRunner) -> list[Problem]:
    """Return every problem of the command; a sweep's jobs are checked later, one by one."""
    from titanlike.core.checkpoint.discovery import resumed_config
    from titanlike.run import checks

    typed = [*args.overrides, *(f"{words.key}={words.value}" for words in args.invalid_overrides)]
    if secrets := checks.secret_problems(checked.config, typed):
        return secrets
    config, known = checked.config, checked.problems
    if config is None:
        return known
    if checked.multirun:
        # a search's jobs are unknown: check the first values
        if args.check and checked.sweep is not None and not checked.sweep.grid:
            known = known + job.config_problems(config, None, known)
        return known
    if os.path.exists(Path(config.run_dir) / job.SWEEP_FILE):  # False if the name is too long
        fix = f"run_dir={config.run_dir}/NAME"
        return [*known, Problem("run_dir", config.run_dir, "holds a sweep", fix)]
    if runner.restart:
        config, _ = resumed_config(config)
    started = int(os.environ.get("WORLD_SIZE", "1"))  # with --check, ranks to be launched
    ranks = checks.available_ranks(started if started > 1 else None, runner.restart_state)
    start_workers = partial(runner.start_workers, config)
    assert checked.composed is not None
    hydra = checked.composed.hydra
    # these change what workers inherit from this process
    may_start = not (hydra.job.env_set or hydra.job.chdir or hydra.callbacks)
    if runner.checked and not known:
        if may_start:
            start_workers()
        return []
    when_valid = start_workers if may_start and not (known or args.check) else None
    found = job.config_problems(config, ranks, known, when_valid)
    return known + [checked.with_fix(problem) for problem in found]


def _write_result(result_dir: str | None, args: Namespace, status: Status, error: str) -> None:
    if result_dir is not None:
        job.ResultReporter(Path(result_dir), args.overrides, 1).write(status, error=error)


def _run(args: Namespace, task: Task, result_dir: str | None) -> ExitCode:
    """Let Hydra compose the configs and call `task`; return the exit code."""
    sweep_run = task.sweep_run
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, which are printed here
    code: ExitCode = 0
    try:
        shown = io.StringIO()  # captured, since a config may contain secrets
        with contextlib.redirect_stdout(shown) if args.cfg else contextlib.nullcontext():
            _call_hydra(args, task, task.checked)
        if task.error is not None:
            raise task.error
        print(redact(shown.getvalue()), end="")
        code = task.end.code if task.end is not None else 0
    except SystemExit as end:
        code = end.code
    except JobFailed:
        code = 1  # already reported
    except ConfigError as error:
        code = job.print_problems(error.problems)
    except Exception as error:
        unwritten = isinstance(error, OSError) and error.errno in _OF_STORAGE
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_in = type(error).__module__, str(frames[-1].f_globals.get("__name__"))
        # an error of Hydra or Optuna about the user's input, not of this program
        if not unwritten and not any(re.match(r"(hydra|omegaconf|optuna)\b", n) for n in raised_in):
            raise
        problem = Problem("config", "", one_line(error)).hiding(task.runner.environment)
        code = 1
        _write_result(result_dir, args, "failed", str(problem))
        if unwritten:
            print(f"a file of the run could not be written: {problem.reason}", file=sys.stderr)
        elif sweep_run is not None and sweep_run.jobs and not sweep_run.grid:  # every trial failed
            print(f"the search ends: {problem.reason}", file=sys.stderr)
        else:
            code = job.print_problems([problem])
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if sweep_run is not None:
            code = sweep_run.close(code)
    return code


def _call_hydra(args: Namespace, task: Task, checked: CheckedOverrides | None) -> None:
    """Let Hydra run a composed job (its folder, logging and callbacks), compose the jobs of a
    sweep, or, if `checked` is None, print the information that its flags ask for."""
    loader = config_loader(args) if checked is None else checked.loader
    assert loader is not None
    hydra, name, overrides = Hydra("titanlike", loader), args.config_name, args.overrides
    GlobalHydra.instance().initialize(hydra)
    try:
        if args.hydra_help:
            hydra.hydra_help(config_name=name, args_parser=parser(), args=args)
        elif args.cfg:
            hydra.show_cfg(name, overrides, args.cfg, args.package, args.resolve)
        elif args.shell_completion:
            hydra.shell_completion(name, overrides)
        elif args.info:
            hydra.show_info(args.info, name, overrides)
        elif task.sweep_run is not None:
            mode = ["hydra.mode=MULTIRUN"] if args.multirun else []
            hydra.multirun(name, task, [*overrides, *mode])
        else:
            assert checked is not None and checked.composed is not None
            composed = checked.composed
            # copied: Hydra may load it several times (hydra.verbose), and removes parts
            copied = partial(copy.deepcopy, composed)
            loader.load_configuration = lambda **_: copied()  # type: ignore[method-assign]
            hydra.run(name, task, overrides)
    finally:
        GlobalHydra.instance().clear()
