"""The command line: from overrides to a job on all ranks. With `hydra_overrides`, the only room that knows Hydra.

1. `--help` is answered from the schema's own words.
2. Where torchrun or srun started all ranks, the others than rank 0 follow it (`launch.follow`).
3. The whole command line is checked; every mistake is shown at once (exit code 2).
4. Hydra composes: once, or once a job of a sweep (`-m`).
5. Each job is launched, and its end is written to run_dir/result.json.

Exit codes:
    0    done
    1    a job failed
    2    a mistake in the config; nothing was started
    75   stopped early, by a signal or by max_time, and saved: the same command goes on.
         Where torchrun would take that for a failure and start the ranks again (--max-restarts), 0
    130  Ctrl-C ended it at once; 143 SIGTERM, 138 SIGUSR1, 129 SIGHUP did
A sweep goes on after max_time, for its job has had its time, and ends after a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.parse import parse, to_plain
from titanlike.config.schema import Config
from titanlike.launch.environment import is_restart, will_restart
from titanlike.launch.failures import Failure, JobFailed, describe, root_cause
from titanlike.launch.follow import StartedRanks, adopt_slurm, record_for_torchrun
from titanlike.launch.job import Job
from titanlike.launch.kept import Kept
from titanlike.launch.local import run_local
from titanlike.launch.signals import Interrupted, die_with_parent, exit_now, interruptible
from titanlike.launch.stop import TIME_IS_UP, Stop, name_of_wish

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig


def main(job: str = "titanlike.training:train", folder: str = "") -> None:
    """Run `job`, a function `(config, worker) -> dict | None`, as the command line says.

    Of what it returns on rank 0, "value" is what a sweep compares and "exit_code" how this
    process ends (0 where there is none). `folder`: a tool's own place inside run_dir, so that it
    may be given a run's command line without touching the run's files.
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
            code = _run(job, folder)
    except Interrupted as interrupted:
        print(f"\n{interrupted}", file=sys.stderr)
        exit_now(interrupted.exit_code)
    sys.exit(code)


def conf_dir() -> Path:
    """The shipped config folder: inside the package when installed, else at the repository's root."""
    package = Path(__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"neither {package}/conf nor {package.parent}/conf exists")


def _run(function: str, folder: str) -> int | str | None:
    """Steps 2 to 5; the exit code."""
    adopt_slurm()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid(), signal.SIGTERM)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _drive(function, folder, None, Kept.of_one_process())
    ranks = StartedRanks()
    if ranks.rank > 0:
        return ranks.follow()
    code: int | str | None = 1
    try:
        code = _drive(function, folder, ranks, ranks.kept)
        return code
    finally:
        ranks.dismiss(code if isinstance(code, int) else int(code is not None))


def _drive(function: str, folder: str, ranks: StartedRanks | None, kept: Kept) -> int | str | None:
    from hydra._internal.utils import _run_hydra, get_args_parser

    from titanlike import hydra_overrides

    parser = get_args_parser()
    args = parser.parse_args()
    hydra_overrides.prepare(args, conf_dir(), _plugin_confs())
    asks_hydra = args.cfg or args.info or args.hydra_help or args.shell_completion
    world_size = ranks.world_size if ranks else None
    earlier = _kept_folder(kept)
    restart = is_restart() or bool(earlier)
    if not asks_hydra:
        args.overrides += earlier
        try:
            problems = _problems(args, world_size, restart)
        except JobFailed as failed:
            print(failed, file=sys.stderr)
            record_for_torchrun(failed)
            return 1
        if problems:
            return _refuse(problems)

    def task(composed: DictConfig) -> float | None:
        return _run_job(composed, function, folder, ranks, kept, restart)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra passes errors on; showing them is done here
    try:
        _run_hydra(args, parser, task, args.config_path, args.config_name)
    except SystemExit as end:
        return end.code
    except JobFailed:
        return 1  # shown when it happened
    except ConfigError as error:
        return _refuse(error.problems)
    except Exception as error:
        if not type(error).__module__.startswith(("hydra", "omegaconf")):
            raise
        return _refuse([Problem("config", "", " ".join(str(error).split()))])
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
    return 0


def _kept_folder(kept: Kept) -> list[str]:
    """The overrides by which a restart writes where the first start did."""
    paths = {key: kept.get(key) for key in ("hydra.run.dir", "hydra.sweep.dir")}
    return [f"{key}='{_escaped(path)}'" for key, path in paths.items() if path is not None]


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace("'", "\\'")


def _problems(args: argparse.Namespace, world_size: int | None, restart: bool) -> list[Problem]:
    """Every mistake in the command line; a sweep's jobs are checked for sense one by one, later."""
    from titanlike import hydra_overrides
    from titanlike.check import secrets_in_command

    findings = hydra_overrides.examine(args)
    if secrets := secrets_in_command(args.overrides, findings.config):
        return secrets
    if findings.multirun or findings.config is None:
        return findings.problems
    config = findings.config
    if restart:
        from titanlike.restart import going_on

        config, _ = going_on(config)
    return findings.problems + _senseless(config, world_size, findings.problems)


def _senseless(config: Config, world_size: int | None, known: list[Problem]) -> list[Problem]:
    """What is well-formed but cannot work, apart from what follows from `known` problems."""
    from titanlike.check import problems as check

    try:
        found = check(config, world_size)
    except Exception as error:
        if not known:  # by a function of the user's own, which a check calls
            failure = describe(0, error)
            text = f"{failure.error}\n{failure.frames}".rstrip()
            raise JobFailed(text, failure.error) from error
        return []  # defaults stand in for what could not be read, and need not fit together
    wrong = {problem.key.lstrip("+~") for problem in known}
    told = {str(problem): problem for problem in found if problem.key not in wrong}
    return list(told.values())


def _refuse(problems: list[Problem]) -> int:
    error = ConfigError(problems)
    count = "a mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    lines = "\n".join(f"  {problem}" for problem in error.problems)
    print(f"{count} in the config; nothing was started\n{lines}", file=sys.stderr)
    record_for_torchrun(error)
    return 2


def _run_job(
    composed: DictConfig,
    function: str,
    folder: str,
    ranks: StartedRanks | None,
    kept: Kept,
    restart: bool,
) -> float | None:
    """One job, from Hydra's composed config to result.json; the value that a sweeper compares.

    Ends a single run by SystemExit with the exit code. In a sweep, raises JobFailed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from titanlike.restart import going_on, going_on_after

    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir) / folder
    run_dir.mkdir(parents=True, exist_ok=True)
    overrides = list(hydra.overrides.task)
    sweep = hydra.mode == RunMode.MULTIRUN
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    config, problems = parse({**plain, "run_dir": str(run_dir)})
    world_size = ranks.world_size if ranks else None
    end = _Ending(run_dir, overrides, config.world_size)
    stop = Stop()
    if sweep:
        kept.keep("hydra.sweep.dir", str(Path(hydra.sweep.dir).absolute()))
    else:
        kept.keep("hydra.run.dir", str(hydra.runtime.output_dir))
        kept.keep("started", str(time.time()))
    with interruptible(end.interrupted, stop):
        try:
            if restart:
                config, _ = going_on(config)
            if sweep:
                problems += _senseless(config, world_size, problems)
            if problems:
                raise ConfigError(problems)
            _write_config(config, run_dir)
            started = None if sweep else kept.get("started")
            job = Job(function, config, run_dir, overrides, float(started or time.time()))
            if ranks:
                result = ranks.lead(job, stop, end.failed)
            else:  # a tool's job is not for being started again
                again = None if folder else partial(going_on_after, config)
                result = run_local(job, stop, end.failed, again)
        except Interrupted as interrupted:
            end.interrupted(interrupted)
            raise
        except ConfigError as error:
            end.write("failed", error=str(error))
            if not sweep:
                raise
            _refuse(error.problems)
            raise JobFailed(str(error), str(error)) from None
        except JobFailed as failed:
            end.write("failed", error=failed.error)
            print(f"\n{failed}", file=sys.stderr)
            record_for_torchrun(failed)
            if sweep and not failed.ends_sweep:
                raise
            raise SystemExit(1) from None
    stopped, code = result.get("stopped"), result.get("exit_code", 0)
    if stopped:
        why = f"stopped early by {stopped}, with a checkpoint; the same command goes on"
        end.write("stopped", value=result.get("value"), error=why)
        if stopped != name_of_wish(TIME_IS_UP) or not sweep:  # the user wants out of a sweep, too
            raise SystemExit(0 if will_restart() else code)
        return result.get("value")
    end.write("completed", value=result.get("value"))
    if code and not sweep:
        raise SystemExit(code)
    if code:
        raise JobFailed(f"exit code {code}", f"exit code {code}")
    return result.get("value")


class _Ending:
    """Writes result.json when a job ends, from whichever thread learns of it."""

    def __init__(self, run_dir: Path, overrides: list[str], world_size: int) -> None:
        self._world_size = world_size
        self._run_dir, self._overrides, self._start = run_dir, overrides, time.monotonic()
        (run_dir / "result.json").unlink(missing_ok=True)  # of an earlier run

    def write(self, status: Any, value: float | None = None, error: str | None = None) -> None:
        from titanlike.metrics.result import write_result

        try:
            write_result(
                self._run_dir,
                status=status,
                value=value,
                error=error,
                seconds=time.monotonic() - self._start,
                overrides=self._overrides,
            )
        except OSError as problem:  # a full disk must not hide what happened
            print(f"result.json could not be written: {problem}", file=sys.stderr)

    def interrupted(self, interrupted: Interrupted) -> None:
        """A signal; torchrun sends one, too, when another rank has failed."""
        cause = root_cause(self._run_dir)
        if cause is None or cause.transport:
            self.write("interrupted", error=str(interrupted))
        else:
            self.write("failed", error=f"rank {cause.rank} failed: {cause.error}")
            print(f"\n{cause.to_job_failed(self._run_dir, 2)}", file=sys.stderr)

    def failed(self, failure: Failure) -> None:
        """The job hangs, and this process is about to end itself."""
        cause = root_cause(self._run_dir) or failure
        told = cause.to_job_failed(self._run_dir, self._world_size)
        self.write("failed", error=told.error)
        print(f"\n{told}", file=sys.stderr, flush=True)


def _write_config(config: Config, run_dir: Path) -> None:
    """Leave run_dir/config.yaml, from which the run can be launched again."""
    import yaml
    from omegaconf import OmegaConf

    own = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    overrides = [item for item in own["defaults"] if str(item).startswith("{'override")]
    settings = yaml.safe_dump({"defaults": ["_self_", *overrides], "hydra": own["hydra"]})
    text = (
        "# The whole config of this run. Launch it again, with any key=value after it:\n"
        f"#   python train.py --config-path '{run_dir}'\n"
        f"{settings}\n{OmegaConf.to_yaml(to_plain(config))}"
    )
    unfinished = run_dir / "config.yaml.tmp"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(run_dir / "config.yaml")


def _plugin_confs() -> list[str]:
    """Config folders of installed packages with an entry point in the group titanlike.plugins."""
    modules = [entry.load() for entry in entry_points(group="titanlike.plugins")]
    return [str(module.CONF) for module in modules if hasattr(module, "CONF")]
