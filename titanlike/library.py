"""titanlike from Python: what `titanlike.NAME` is, see docs/library.md.

1. `compose` (`titanlike.config`) makes a config of overrides, checked as the command checks them.
2. `train` does with it what the command does. `plan` says what that will cost.
3. `build` makes a `TrainingRun` over the caller's process group, for a loop of the caller's own:
   its methods are the functions that the command's loop calls.

All ranks call each function and method that says "collective", in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor

from titanlike.config import validate
from titanlike.config.errors import ConfigError, Problem, nearest, override_text, quoted
from titanlike.config.imports import named_code
from titanlike.config.parse import to_plain
from titanlike.config.program import set_caller
from titanlike.config.schema import Config, SyntheticData
from titanlike.data import registry
from titanlike.data.kinds import DataError
from titanlike.data.sources import Data
from titanlike.device.accelerator import is_accelerator
from titanlike.device.choose import choose_device, start_device
from titanlike.distributed.mesh import join_group, open_mesh
from titanlike.driver.argv import complete_args, parse_argv
from titanlike.driver.job import TRAIN, JobRunner, config_problems
from titanlike.driver.overrides import check_overrides
from titanlike.launch.environment import RestartState, adopt_slurm, is_restart
from titanlike.launch.failures import JobFailed
from titanlike.launch.local import PrestartedWorkers
from titanlike.launch.rendezvous import barrier, in_words
from titanlike.launch.worker import Worker
from titanlike.models.registry import resolve_model
from titanlike.torch_private.process_groups import default_store
from titanlike.training import build as building
from titanlike.training.session import open_data_on_every_rank
from titanlike.training.training_run import TrainingRun

if TYPE_CHECKING:
    from titanlike.planning.estimate import Estimate


class Callback(Protocol):
    """What a program is told while it trains; inherit it, and define what is wanted.

    Every rank with callbacks calls them, with the same values but for times and memory. What one
    raises ends the run.
    """

    def on_step(self, record: Mapping[str, Any]) -> None:
        """A step is done; record: its row of metrics.jsonl."""
        return

    def on_validation(self, step: int, val_loss: float) -> None:
        """The validation data were evaluated after a step, before `on_step` of it; val_loss: nats
        a token, or what the loss is."""
        return

    def on_save(self, step: int, path: str) -> None:
        """The checkpoint of a step was written; with an asynchronous `checkpoint.mode`, begun."""
        return


def compose(*overrides: str, check: bool = True, **values: Any) -> Config:
    """The config of overrides, as the command line has them: `config("pp=2", "model=gpt2")`.

    values: the same by keyword, `config(pp=2, optimizer={"lr": 1e-3})`; a class or function of the
    caller's stands for its import path. check: also find what takes the model to be found; False
    leaves that to `build`, for batches that are not those of `data`. Whether so many ranks are
    there, `build` and `train` find.
    Raises ConfigError with all problems; `error.problems` has each.
    """
    set_caller()
    if wrong := [word for word in overrides if not isinstance(word, str)]:
        fix = 'a text such as "pp=2", or a keyword: pp=2'
        kinds = ((word, f"is a {type(word).__name__}") for word in wrong)
        raise ConfigError(Problem("config", word, kind, fix) for word, kind in kinds)
    words = [*overrides, *_words(values)]
    args = parse_argv(words)
    complete_args(args)
    checked = check_overrides(args)
    problems, config = checked.problems, checked.config
    if checked.multirun:
        reason = "several values are a sweep, which the command runs"
        problems.append(Problem(" ".join(words), "", reason, "one value of each key"))
    if config is not None and check:
        problems = problems + config_problems(config, None, problems)
    elif config is not None and not problems:
        problems = validate.out_of_bounds(config) or validate.problems(config)
    if problems or config is None:
        raise ConfigError(problem.hiding(checked.environment) for problem in problems)
    return config


def plan(config: Config) -> Estimate:
    """What a run will cost: memory, time of a step, bubble. Nothing is started or allocated.

    A notebook shows it as tables and a picture. Raises ConfigError.
    """
    _needs_config(config)
    from titanlike.planning.estimate import make_estimate
    from titanlike.planning.estimate_text import ShownEstimate
    from titanlike.planning.known_hardware import planned_hardware

    named = config.hardware.name != "none"  # else what is likely here
    estimate = make_estimate(config, planned_hardware(config) if named else None)
    return ShownEstimate(**{f.name: getattr(estimate, f.name) for f in fields(estimate)})


def train(config: Config, callbacks: Sequence[Callback] = ()) -> float | None:
    """Do what the command does: launch the ranks (or join those of torchrun, whose processes all
    call this), resume, train, validate, save, write run_dir.

    callbacks: of this process; where it launches ranks, which are other processes, there can be
    none. Returns the last validation loss, or loss; on rank 0, what `config.value` names. Raises
    ConfigError with all problems, before anything is started; JobFailed with the rank that failed.
    """
    _needs_config(config)
    adopt_slurm()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    problems = [*_callback_problems(callbacks)]
    if dist.is_initialized():
        reason = "is made already, and train makes its own"
        fix = "call close() of the run that made it, or titanlike.build in place of train"
        problems.append(Problem("process group", "", reason, fix))
    if size == 1 and config.world_size > 1:
        problems += _other_processes(config, callbacks)
    ranks_started = size if size > 1 else None
    problems += config_problems(config, ranks_started, problems)
    if problems:
        raise ConfigError(problems)
    run_dir, told = Path(config.run_dir).absolute(), tuple(callbacks)
    if size == 1:
        state = RestartState()
        with PrestartedWorkers() as workers:
            runner = JobRunner(TRAIN, "", None, state, workers=lambda: workers, callbacks=told)
            end = runner.run(config, [], run_dir, [])
    else:
        from titanlike.launch.torchrun import TorchrunRanks

        ranks = TorchrunRanks(told)
        if ranks.rank > 0:
            if code := ranks.run_follower():
                text = f"the job ended with exit code {code}; rank 0 says why"
                raise JobFailed(text, text)
            return ranks.result.get("value")
        code = 1
        try:
            runner = JobRunner(TRAIN, "", ranks, ranks.restart_state, is_restart(), callbacks=told)
            end = runner.run(config, [], run_dir, [])
            code = end.code
        finally:
            ranks.shutdown(code)
    if end.code == 2:
        raise ConfigError(Problem.parse("config", line) for line in end.error.splitlines())
    if end.code not in (0, 75):  # 75: stopped, with a checkpoint, see result.json
        raise JobFailed(end.error, end.error)
    return end.value


# --- a loop of the caller's own ------------------------------------------------------------------


def open_data(config: Config) -> Data:
    """The training and validation data of a config. Collective in a process group: one process a
    machine prepares them (tokenizes). Raises ConfigError."""
    _needs_config(config)
    return open_data_on_every_rank(config, _worker(config, ()))


def build(
    config: Config,
    data: Data | None = None,
    *,
    example: Mapping[str, Tensor] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainingRun:
    """Build the model and its stages over the process group that the caller made; without one, over
    that of torchrun, or this process alone. Collective.

    data: what `open_data` returned; None opens it. example: a batch [B, ...] like those that will
    be given to `step`, where these are not of `data`; its values are not read. Weights are initial
    ones: see `TrainingRun.load`. Raises ConfigError with all problems, before anything is
    allocated.
    """
    _needs_config(config)
    problems = [*_callback_problems(callbacks)]
    if "rollback" in (config.on_nonfinite, config.on_spike):
        key = "on_nonfinite" if config.on_nonfinite == "rollback" else "on_spike"
        reason = "a loop of your own has to go back by itself: call load()"
        problems.append(Problem(key, "rollback", reason, f"{key}=skip"))
    worker = _worker(config, callbacks)
    if not (wrong := validate.out_of_bounds(config)):
        wrong = validate.problems(config, worker.world_size)
    if problems + wrong:
        raise ConfigError(problems + wrong)
    config = _agreed(config, worker)
    if example is not None:
        config, data = _fed(config, example)
    elif data is None:
        data = open_data_on_every_rank(config, worker)
    alone = not dist.is_initialized()
    mesh = open_mesh(config, replace(worker, run_dir=Path(config.run_dir)))
    run = building.build(config, mesh, data)
    return TrainingRun(config, worker, data, run, closes_group=alone)


# --- arguments, and this process among others ----------------------------------------------------


def _words(values: Mapping[str, Any]) -> Iterator[str]:
    """Overrides of keyword arguments: a section's own keys by themselves."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{key}.{name}={_text(one)}" for name, one in value.items())
        else:
            yield f"{key}={_text(value)}"


def _needs_config(config: object) -> None:
    if not isinstance(config, Config):
        reason, fix = f"is a {type(config).__name__}", "what titanlike.config(...) returns"
        raise ConfigError([Problem("config", "", reason, fix)])


def _text(value: Any) -> str:
    """A value in the syntax of overrides."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_text, value)) + "]"
    if hasattr(value, "__qualname__"):  # a class, a function
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (str, Path)):
        plain = re.fullmatch(r"[\w./:@%+-]+", str(value))
        return str(value) if plain else quoted(str(value))
    return override_text(value)


def _callback_problems(callbacks: Sequence[object]) -> Iterator[Problem]:
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        name = type(callback).__name__
        has = [attribute for attribute in dir(callback) if attribute.startswith("on_")]
        for unknown in sorted({*has} - {*events}):
            reason = f"there is no such event; events: {', '.join(events)}"
            fix = nearest(unknown, events) or events[0]
            yield Problem("callbacks", f"{name}.{unknown}", reason, f"define {fix}")
        if not has:
            yield Problem("callbacks", name, "has no event", f"define {', '.join(events)}")


def _other_processes(config: Config, callbacks: Sequence[Callback]) -> Iterator[Problem]:
    """What the ranks that `train` launches cannot have of this process."""
    fix = f"start the script by torchrun --nproc-per-node {config.world_size}"
    if callbacks:
        reason = f"the {config.world_size} ranks are other processes, which do not have them"
        yield Problem("callbacks", "", reason, fix)
    reason = f"the {config.world_size} ranks are other processes, which do not import this one"
    for key, path in named_code(to_plain(config), {}):
        if path.startswith("__main__."):
            yield Problem(key, path, reason, f"put it into a module, or {fix}")


def _started() -> int | None:
    """Ranks that are there: of the caller's process group, or of torchrun; None = this process."""
    if dist.is_initialized():
        return dist.get_world_size()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return size if size > 1 else None


def _worker(config: Config, callbacks: Sequence[Callback]) -> Worker:
    """This process as a rank. Of several without a process group, one is made."""
    adopt_slurm()
    size, store = _started() or 1, None
    if size > 1:
        if not dist.is_initialized():
            local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
            device, _ = choose_device(config, int(os.environ.get("LOCAL_RANK", "0")), local)
            if is_accelerator(device):
                start_device(config.device, device)  # as `open_mesh` does before its groups
            join_group(config.launch, device, int(os.environ["RANK"]), size, local)
        store = default_store()
        number = store.add(f"titanlike/{dist.get_rank()}", 1)  # the same on all ranks
        store = dist.PrefixStore(f"titanlike/{number}", store)
    rank = dist.get_rank() if dist.is_initialized() else 0
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    told, run_dir = tuple(callbacks), Path(config.run_dir)
    return Worker(rank, size, local_rank, local_size, run_dir, store, [], callbacks=told)


def _agreed(config: Config, worker: Worker) -> Config:
    """The config with the run_dir of rank 0, which may be named by the time. Raises ConfigError
    where another rank has other values."""
    plain = to_plain(replace(config, run_dir=""))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    first = json.dumps([digest, str(Path(config.run_dir).absolute())]) if worker.rank == 0 else ""
    told = barrier(worker, "config", config.launch.timeout, first, listens=True)
    expected, run_dir = json.loads(told[0])
    # those alone that differ say so: what all say is read by all
    differs = "differs" if digest != expected else ""
    told = barrier(worker, "config/compared", config.launch.timeout, differs, listens=True)
    if told:
        reason = f"rank {in_words(sorted(told))} has other values than rank 0"
        raise ConfigError([Problem("config", "", reason, "the same overrides on all ranks")])
    return replace(config, run_dir=run_dir)


def _fed(config: Config, example: Mapping[str, Tensor]) -> tuple[Config, Data]:
    """A config and data of batches that the caller makes."""
    if missing := {"inputs", "targets"} - example.keys():
        reason = f"has no {' and no '.join(sorted(missing))}"
        raise ConfigError([Problem("example", "", reason, "a batch as step() takes it")])
    try:  # data are asked for what the model does not say
        size = (
            resolve_model(config, 0).args.get("vocab_size", 1) or registry.vocab_size(config) or 1
        )
    except DataError as error:
        raise ConfigError([error.problem]) from None
    config = replace(config, data=SyntheticData(vocab_size=size))
    sample, name = {name: value[:1] for name, value in example.items()}, "the caller's batches"
    data = replace(registry.open_data(config), example=sample, description=name, fingerprint=name)
    return config, data
