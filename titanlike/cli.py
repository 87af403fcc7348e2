"""The command line: from overrides to a job on all ranks. With `hydra_overrides` and `hydra_plugins/`,
the only room that knows Hydra.

1. `--help` is answered from the schema's own words.
2. Where torchrun or srun started all ranks, the others than rank 0 follow it (`launch.follow`).
3. The whole command line is checked; every mistake is shown at once (exit code 2). `--check` ends here.
4. Hydra composes: once, or once a job of a sweep (`-m`).
5. Each job is launched, and its end is written to run_dir/result.json (`JobRunner`).
6. A sweep ends with a table of its jobs (`sweeps.ending`).

Exit codes:
    0    done
    1    a job failed
    2    a mistake in the config; nothing was started
    75   stopped early, by a signal or by max_time, and saved: the same command goes on.
         Where torchrun would take that for a failure and start the ranks again (--max-restarts), 0
    130  Ctrl-C ended it at once; 143 SIGTERM, 138 SIGUSR1, 129 SIGHUP did
A sweep goes on after a job that fails, is invalid or has had its max_time, and ends with 1 if any
failed; it ends after a signal, with 75 where the jobs that ran have stopped with a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.config.errors import ConfigError, Problem, quoted
from titanlike.config.folder import conf_dir
from titanlike.config.overrides import from_hydra
from titanlike.job.report import ResultReporter, print_problems
from titanlike.job.run import JobEnd, JobRunner, config_problems
from titanlike.launch.environment import is_restart
from titanlike.launch.external import ExternalRanks, record_for_torchrun
from titanlike.launch.failures import JobFailed
from titanlike.launch.restart_state import RestartState
from titanlike.launch.signals import Interrupted, die_with_parent, exit_now, interruptible
from titanlike.launch.slurm import adopt_slurm

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig

    from titanlike.command.hydra_overrides import CheckedOverrides
    from titanlike.metrics.result import Status
    from titanlike.sweeps.context import Context


def main(
    job: str = "titanlike.training.train:train", folder: str = "", result_dir: str | None = None
) -> None:
    """Run `job`, a function `(config, worker) -> dict | None`, as the command line says.

    Of what it returns on rank 0, "value" is what a sweep compares and "exit_code" how this
    process ends (0 where there is none). `folder`: a tool's own place inside run_dir, so that it
    may be given a run's command line without touching the run's files. `result_dir`: of a sweep's
    job, where it leaves result.json also when it is refused.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the user's own models
    if {"-h", "--help"} & set(sys.argv[1:]):
        if int(os.environ.get("RANK", "0")) == 0:
            from titanlike.config.help import help_text

            try:
                print(help_text([conf_dir()]), flush=True)
            except BrokenPipeError:  # `--help | head`; nothing is to be flushed at exit, either
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    code: int | str | None = 1
    try:
        with interruptible():
            code = _run(job, folder, result_dir)
    except Interrupted as interrupted:
        print(f"\n{interrupted}", file=sys.stderr)
        exit_now(interrupted.exit_code)
    sys.exit(code)


def _run(function: str, folder: str, result_dir: str | None) -> int | str | None:
    """Steps 2 to 6; the exit code."""
    adopt_slurm()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid(), signal.SIGTERM)
    coming = "--check" in sys.argv[1:] and "RANK" not in os.environ  # WORLD_SIZE ranks, later
    if coming or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        restart_state = RestartState.load()
        restart_state.count_start()
        return _drive(JobRunner(function, folder, None, restart_state, is_restart()), result_dir)
    ranks = ExternalRanks()
    if ranks.rank > 0:
        return ranks.follow()
    code: int | str | None = 1
    try:
        code = _drive(
            JobRunner(function, folder, ranks, ranks.restart_state, is_restart()), result_dir
        )
        return code
    finally:
        ranks.release(code if isinstance(code, int) else int(code is not None))


def _drive(runner: JobRunner, result_dir: str | None) -> int | str | None:
    from hydra._internal.utils import _run_hydra, get_args_parser

    from titanlike.command import hydra_overrides

    parser = get_args_parser()
    parser.add_argument("--check", action="store_true", help="find mistakes, start nothing")
    args, raw = parser.parse_intermixed_args(), sys.argv[1:]
    modes = [flag for flag in ("run", "multirun", "cfg", "info") if getattr(args, flag)]
    if len(modes) > 1:
        print(f"of --{', --'.join(modes)} only one can be given; write it alone", file=sys.stderr)
        return 2
    hydra_overrides.prepare(args, conf_dir(), _plugin_confs())
    context, task = None, Task(runner)
    if not (args.cfg or args.info or args.hydra_help or args.shell_completion):
        earlier = _first_run_dir(runner.restart_state)
        args.overrides += earlier
        runner = task.runner = JobRunner(
            runner.function,
            runner.folder,
            runner.ranks,
            runner.restart_state,
            runner.restart or bool(earlier),
        )
        findings = hydra_overrides.examine(args)
        try:
            problems = _problems(args, findings, runner)
            if findings.multirun and not problems:
                context, problems = _open_sweep(args, raw, findings, runner)
        except JobFailed as failed:
            print(failed, file=sys.stderr)
            record_for_torchrun(failed)
            _leave_result(result_dir, args, "failed", failed.error)
            return 1
        if problems:
            _leave_result(result_dir, args, "invalid", str(ConfigError(problems)))
            return print_problems(problems)
        if args.check and (context is None or not context.grid):
            print("config OK; nothing was started (--check)")
            return 0
        task.context = context

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra passes errors on; showing them is done here
    code: int | str | None = 0
    try:
        _run_hydra(args, parser, task, args.config_path, args.config_name)
        code = task.end.code if task.end is not None else 0
    except SystemExit as end:
        code = end.code
    except JobFailed:
        code = 1  # shown when it happened
    except ConfigError as error:
        code = print_problems(error.problems)
    except Exception as error:
        if not _told_by_library(error):
            raise
        text = " ".join(str(error).split())
        if context is not None and context.planned:  # a search of which no trial ended well
            print(f"the search ends: {text}", file=sys.stderr)
            code = 1
        else:
            code = print_problems([Problem("config", "", text)])
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if context is not None:
            code = context.close(code)
    return code


def _leave_result(
    result_dir: str | None, args: argparse.Namespace, status: Status, error: str
) -> None:
    """Leave result.json of a sweep's job that was refused before it had a run directory."""
    if result_dir is not None:
        ResultReporter(Path(result_dir), args.overrides, 1).write(status, error=error)


def _told_by_library(error: Exception) -> bool:
    """Whether an error is what Hydra or Optuna tells a user, and not a fault of this program."""
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    by_hydra = type(error).__module__.startswith(("hydra", "omegaconf"))
    return by_hydra or raised_in.startswith("optuna")


class Task:
    """What Hydra calls with a composed config: of a run, or in this process of a sweep's job."""

    def __init__(self, runner: JobRunner) -> None:
        self.runner = runner
        self.context: Context | None = None  # of a sweep
        self.end: JobEnd | None = None  # of a run
        self._pid = os.getpid()

    def __call__(self, composed: DictConfig) -> float | None:
        """The value that a sweeper compares. Raises JobFailed where a sweep's job failed."""
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        overrides = [from_hydra(text) for text in hydra.overrides.task]
        plain = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(plain, dict)
        if self.context is None:
            self.runner.restart_state.set_default("hydra.run.dir", str(run_dir))
            self.runner.restart_state.set_default("started", str(time.time()))
            self.end = self.runner.run(plain, run_dir, overrides)
            return self.end.value
        overrides = self.context.planned_here(overrides, hydra.job.num, run_dir)
        name = self.context.group, self.context.name_of(overrides)
        if os.getpid() != self._pid:  # a launcher like submitit brought it to another machine
            end = _elsewhere(self.runner, plain, run_dir, overrides, name)
        else:
            end = self.runner.run(plain, run_dir, overrides, name)
        if end.ends_sweep:
            raise SystemExit(end.code or 75)
        if end.code in (0, 75):
            return end.value
        raise JobFailed(end.error, end.error)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "runner": JobRunner(self.runner.function, self.runner.folder)}


def _elsewhere(
    runner: JobRunner,
    plain: dict[str, object],
    run_dir: Path,
    overrides: list[str],
    name: tuple[str, str],
) -> JobEnd:
    """Run a job in a process that is no driver, alone or as one of the ranks that srun started."""
    adopt_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return runner.run(plain, run_dir, overrides, name)
    ranks = ExternalRanks()
    if ranks.rank > 0:
        return JobEnd(ranks.follow())
    end = JobEnd(1)
    try:
        end = JobRunner(runner.function, runner.folder, ranks).run(plain, run_dir, overrides, name)
        return end
    finally:
        ranks.release(end.code)


def _first_run_dir(restart_state: RestartState) -> list[str]:
    """The overrides by which a restart writes where the first start did."""
    paths = {key: restart_state.get(key) for key in ("hydra.run.dir", "hydra.sweep.dir")}
    return [f"{key}={quoted(path)}" for key, path in paths.items() if path is not None]


def _problems(
    args: argparse.Namespace, findings: CheckedOverrides, runner: JobRunner
) -> list[Problem]:
    """Every mistake in the command line; a sweep's jobs are checked for sense one by one, later."""
    from titanlike.config.validate import sweep_problems
    from titanlike.job import elastic
    from titanlike.job.check import removing_new_folders, secrets_in_command
    from titanlike.sweeps.plan import FILE as PLAN

    if secrets := secrets_in_command(args.overrides, findings.config):
        return secrets
    config, known = findings.config, findings.problems
    if config is None:
        return known
    if findings.multirun:
        known = known + list(sweep_problems(config))
        # of a search the jobs are not known: the first values stand for all
        if args.check and findings.sweep is not None and not findings.sweep.grid:
            with removing_new_folders(Path(config.run_dir)):
                known = known + config_problems(config, None, known)
        return known
    if (Path(config.run_dir) / PLAN).exists():
        fix = f"run_dir={config.run_dir}/NAME"
        return [*known, Problem("run_dir", config.run_dir, "holds a sweep", fix)]
    if runner.restart:
        from titanlike.checkpoint.restart import resumed_config

        config, _ = resumed_config(config)
    started = int(os.environ.get("WORLD_SIZE", "1"))  # or to be started, where this is a --check
    ranks = elastic.available_ranks(config, started if started > 1 else None, runner.restart_state)
    with removing_new_folders(Path(config.run_dir)) if args.check else nullcontext():
        config, unfit = elastic.fit_mesh(config, ranks)
        return known + (unfit or config_problems(config, ranks, known))


def _open_sweep(
    args: argparse.Namespace, raw: list[str], findings: CheckedOverrides, runner: JobRunner
) -> tuple[Context, list[Problem]]:
    """Begin a sweep: fix its directory, and what its sweeper is to know of the config."""
    from titanlike.sweeps.context import Context

    config, shape = findings.config, findings.sweep
    assert config is not None and shape is not None
    context = Context(
        folder=shape.folder,
        settings=config.sweep,
        value=config.value or ("val_loss" if config.validation.every else "loss"),
        program=_program(),
        options=_options(raw),
        command=raw,
        inner=runner.folder,
        grid=shape.grid,
        fixed=shape.fixed,
        restart=runner.restart,
        check=args.check,
    )
    runner.restart_state.set_default("hydra.sweep.dir", str(shape.folder))
    args.overrides.append(f"hydra.sweep.dir={quoted(str(shape.folder))}")
    if args.check:
        args.overrides.append("hydra/launcher=jobs")  # others would start them
    problems = [*shape.problems(context.value, config.sweep.resume)] or context.open()
    if not problems and not shape.grid:
        args.overrides += shape.settings(config, context.value, context.done)
        if context.base:  # jobs of a search are new ones, whatever numbers a launcher gives them
            args.overrides.append(f"hydra.sweep.subdir='{context.base}+${{hydra.job.num}}'")
    return context, problems


def _program() -> list[str]:
    """How the user has started this."""
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return ["python", "-m", path.parent.name]
    return ["python", sys.argv[0]] if path.suffix == ".py" else [sys.argv[0]]


def _options(words: list[str]) -> list[str]:
    """What of a sweep's command line each of its jobs is given, too, besides its overrides."""
    of_sweep = ("hydra.sweep", "hydra.launcher", "hydra.run.", "hydra.mode", "hydra/")
    options, words = [], [*words]
    while words:
        word = words.pop(0)
        if word.partition("=")[0] in ("--config-path", "-cp", "--config-name", "-cn") or (
            word.partition("=")[0] in ("--config-dir", "-cd")
        ):
            options.append(word)
            if "=" not in word and words:
                options.append(words.pop(0))
        elif word.lstrip("+~").startswith("hydra.") and not word.startswith(of_sweep):
            options.append(word)
    return options


def _plugin_confs() -> list[str]:
    """Config folders of installed packages with an entry point in the group titanlike.plugins."""
    modules = [entry.load() for entry in entry_points(group="titanlike.plugins")]
    return [str(module.CONF) for module in modules if hasattr(module, "CONF")]
