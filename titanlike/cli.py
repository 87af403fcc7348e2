"""The command line: from overrides to a job on all ranks. With `hydra_overrides` and `hydra_plugins/`,
the only room that knows Hydra.

1. `--help` is answered from the schema's own words.
2. Where torchrun or srun started all ranks, the others than rank 0 follow it (`launch.follow`).
3. The whole command line is checked; every mistake is shown at once (exit code 2). `--check` ends here.
4. Hydra composes: once, or once a job of a sweep (`-m`).
5. Each job is launched, and its end is written to run_dir/result.json (`lead`).
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
from titanlike.job.run import End, Lead, Report, refuse, senseless
from titanlike.launch.environment import is_restart
from titanlike.launch.external import StartedRanks, record_for_torchrun
from titanlike.launch.failures import JobFailed
from titanlike.launch.restart_state import Kept
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
        kept = Kept.of_one_process()
        return _drive(Lead(function, folder, None, kept, is_restart()), result_dir)
    ranks = StartedRanks()
    if ranks.rank > 0:
        return ranks.follow()
    code: int | str | None = 1
    try:
        code = _drive(Lead(function, folder, ranks, ranks.kept, is_restart()), result_dir)
        return code
    finally:
        ranks.dismiss(code if isinstance(code, int) else int(code is not None))


def _drive(lead: Lead, result_dir: str | None) -> int | str | None:
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
    context, task = None, Task(lead)
    if not (args.cfg or args.info or args.hydra_help or args.shell_completion):
        earlier = _kept_folder(lead.kept)
        args.overrides += earlier
        lead = task.lead = Lead(
            lead.function, lead.folder, lead.ranks, lead.kept, lead.restart or bool(earlier)
        )
        findings = hydra_overrides.examine(args)
        try:
            problems = _problems(args, findings, lead)
            if findings.multirun and not problems:
                context, problems = _open_sweep(args, raw, findings, lead)
        except JobFailed as failed:
            print(failed, file=sys.stderr)
            record_for_torchrun(failed)
            _leave_result(result_dir, args, "failed", failed.error)
            return 1
        if problems:
            _leave_result(result_dir, args, "invalid", str(ConfigError(problems)))
            return refuse(problems)
        if args.check and (context is None or not context.grid):
            print("no mistake found; nothing was started (--check)")
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
        code = refuse(error.problems)
    except Exception as error:
        if not _told_by_library(error):
            raise
        text = " ".join(str(error).split())
        if context is not None and context.planned:  # a search of which no trial ended well
            print(f"the search ends: {text}", file=sys.stderr)
            code = 1
        else:
            code = refuse([Problem("config", "", text)])
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
        Report(Path(result_dir), args.overrides, 1).write(status, error=error)


def _told_by_library(error: Exception) -> bool:
    """Whether an error is what Hydra or Optuna tells a user, and not a fault of this program."""
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    by_hydra = type(error).__module__.startswith(("hydra", "omegaconf"))
    return by_hydra or raised_in.startswith("optuna")


class Task:
    """What Hydra calls with a composed config: of a run, or in this process of a sweep's job."""

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self.context: Context | None = None  # of a sweep
        self.end: End | None = None  # of a run
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
            self.lead.kept.keep("hydra.run.dir", str(run_dir))
            self.lead.kept.keep("started", str(time.time()))
            self.end = self.lead.run(plain, run_dir, overrides)
            return self.end.value
        overrides = self.context.planned_here(overrides, hydra.job.num, run_dir)
        name = self.context.group, self.context.name_of(overrides)
        if os.getpid() != self._pid:  # a launcher like submitit brought it to another machine
            end = _elsewhere(self.lead, plain, run_dir, overrides, name)
        else:
            end = self.lead.run(plain, run_dir, overrides, name)
        if end.ends_sweep:
            raise SystemExit(end.code or 75)
        if end.code in (0, 75):
            return end.value
        raise JobFailed(end.error, end.error)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "lead": Lead(self.lead.function, self.lead.folder)}


def _elsewhere(
    lead: Lead,
    plain: dict[str, object],
    run_dir: Path,
    overrides: list[str],
    name: tuple[str, str],
) -> End:
    """Run a job in a process that is no driver, alone or as one of the ranks that srun started."""
    adopt_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return lead.run(plain, run_dir, overrides, name)
    ranks = StartedRanks()
    if ranks.rank > 0:
        return End(ranks.follow())
    end = End(1)
    try:
        end = Lead(lead.function, lead.folder, ranks).run(plain, run_dir, overrides, name)
        return end
    finally:
        ranks.dismiss(end.code)


def _kept_folder(kept: Kept) -> list[str]:
    """The overrides by which a restart writes where the first start did."""
    paths = {key: kept.get(key) for key in ("hydra.run.dir", "hydra.sweep.dir")}
    return [f"{key}={quoted(path)}" for key, path in paths.items() if path is not None]


def _problems(args: argparse.Namespace, findings: CheckedOverrides, lead: Lead) -> list[Problem]:
    """Every mistake in the command line; a sweep's jobs are checked for sense one by one, later."""
    from titanlike.config.validate import sweep_problems
    from titanlike.job import elastic
    from titanlike.job.check import leaving_nothing, secrets_in_command
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
            with leaving_nothing(Path(config.run_dir)):
                known = known + senseless(config, None, known)
        return known
    if (Path(config.run_dir) / PLAN).exists():
        fix = f"run_dir={config.run_dir}/NAME"
        return [*known, Problem("run_dir", config.run_dir, "holds a sweep", fix)]
    if lead.restart:
        from titanlike.checkpoint.restart import going_on

        config, _ = going_on(config)
    started = int(os.environ.get("WORLD_SIZE", "1"))  # or to be started, where this is a --check
    ranks = elastic.ranks_there(config, started if started > 1 else None, lead.kept)
    with leaving_nothing(Path(config.run_dir)) if args.check else nullcontext():
        config, unfit = elastic.fit(config, ranks)
        return known + (unfit or senseless(config, ranks, known))


def _open_sweep(
    args: argparse.Namespace, raw: list[str], findings: CheckedOverrides, lead: Lead
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
        inner=lead.folder,
        grid=shape.grid,
        fixed=shape.fixed,
        restart=lead.restart,
        check=args.check,
    )
    lead.kept.keep("hydra.sweep.dir", str(shape.folder))
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
