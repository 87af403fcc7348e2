"""The Python interface, `titanlike.NAME`; see docs/library.md.

1. `compose` (`titanlike.config`) makes a config from overrides, checked as the command checks them.
2. `train` does what the command does. `plan` predicts what that will cost.
3. `build` makes a `TrainingRun` over the caller's process group, for a custom loop: its methods are
   the functions that the command's loop calls.
Functions and methods marked "collective" must be called by all ranks in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor

from titanlike.core.config import validate
from titanlike.core.config.errors import ConfigError, Problem, nearest, override_text, quoted
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.imports import named_code
from titanlike.core.config.parse import to_plain
from titanlike.core.config.program import set_caller
from titanlike.core.config.schema import Config
from titanlike.core.data import registry
from titanlike.core.data.kinds import DataError
from titanlike.core.data.sources import Data
from titanlike.core.device.accelerator import is_accelerator
from titanlike.core.device.choose import choose_device, start_device
from titanlike.core.distributed.mesh import join_group, open_mesh
from titanlike.core.distributed.places import compare_places
from titanlike.core.launch.environment import RestartState, adopt_slurm, is_restart
from titanlike.core.launch.failures import JobFailed
from titanlike.core.launch.rendezvous import barrier, in_words
from titanlike.core.launch.worker import Worker
from titanlike.core.models.registry import resolve_model
from titanlike.core.torch_private.process_groups import default_store
from titanlike.core.training import build as building
from titanlike.core.training.same_data import refuse_other_data
from titanlike.core.training.session import open_data_on_every_rank
from titanlike.run.argv import complete_args, parse_argv
from titanlike.run.job import TRAIN, JobRunner, config_problems
from titanlike.run.local import PrestartedWorkers
from titanlike.run.overrides import check_overrides
from titanlike.use.training_run import TrainingRun

if TYPE_CHECKING:
    from titanlike.planning.estimate import Estimate


class Callback(Protocol):
    """Hooks for a program that calls `train`; inherit and override some.

    They are called on every rank that has callbacks, with equal values except times and memory. An
    exception ends the run.
    """

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Called after a step. record: its row of metrics.jsonl."""
        return

    def on_validation(self, step: int, val_loss: float) -> None:
        """Called before a validated step's `on_step`; val_loss: nats per token, or the loss's unit."""
        return

    def on_save(self, step: int, path: str) -> None:
        """Called when a step's checkpoint is written, or begun by an asynchronous mode."""
        return


def compose(*overrides: str, check: bool = True, **values: Any) -> Config:
    """Return the config of overrides, as on the command line: `config("pp=2", "model=gpt2")`.

    values: overrides by keyword, `config(pp=2, optimizer={"lr": 1e-3})`; a class or function stands
    for its import path. check: also run the checks that need the model; False leaves them to
    `build`, for batches that are not `data`'s. `build` and `train` check the number of ranks.

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
        problems = validate.problems(config)
    if problems or config is None:
        raise ConfigError(problem.hiding(checked.environment) for problem in problems)
    return config


def plan(config: Config) -> Estimate:
    """Predict what a run will cost: memory, step time, bubble. Nothing is launched or allocated.

    In a notebook the result is shown as tables and a picture. Raises ConfigError.
    """
    _needs_config(config)
    from titanlike.planning.estimate import make_estimate
    from titanlike.planning.estimate_text import ShownEstimate

    estimate = make_estimate(config)
    return ShownEstimate(**{f.name: getattr(estimate, f.name) for f in fields(estimate)})


def train(config: Config, callbacks: Sequence[Callback] = ()) -> float | None:
    """Do what the command does: launch the ranks (or join torchrun's, whose processes all call
    this), resume, train, validate, save, write run_dir.

    callbacks: run in this process; not possible if it launches ranks, which are other processes.
    Returns the last validation loss, or loss; on rank 0, what `config.value` names. Raises
    ConfigError with all problems before anything is launched; JobFailed with the rank that failed.
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
    run_dir, hooks = Path(config.run_dir).absolute(), tuple(callbacks)
    if size == 1:
        state = RestartState()
        with PrestartedWorkers() as workers:
            runner = JobRunner(TRAIN, "", None, state, workers=lambda: workers, callbacks=hooks)
            end = runner.run(config, [], run_dir, [])
    else:
        from titanlike.core.launch.torchrun import TorchrunRanks

        ranks = TorchrunRanks(hooks)
        if ranks.rank > 0:
            if code := ranks.run_follower():
                text = f"the job ended with exit code {code}; rank 0 says why"
                raise JobFailed(text, text)
            return ranks.result.get("value")
        code = 1
        try:
            runner = JobRunner(TRAIN, "", ranks, ranks.restart_state, is_restart(), callbacks=hooks)
            end = runner.run(config, [], run_dir, [])
            code = end.code
        finally:
            ranks.shutdown(code)
    if end.code == 2:
        raise ConfigError(Problem.parse("config", line) for line in end.error.splitlines())
    if end.code not in (0, 75):  # 75: stopped, with a checkpoint, see result.json
        raise JobFailed(end.error, end.error)
    return end.value


# --- a custom loop -------------------------------------------------------------------------------


def open_data(config: Config) -> Data:
    """Open a config's training and validation data. Collective in a process group: one process per
    machine prepares them (tokenizes). Raises ConfigError."""
    _needs_config(config)
    return open_data_on_every_rank(config, _worker(config, ()), writes=False)


def build(
    config: Config,
    data: Data | None = None,
    *,
    example: Mapping[str, Tensor] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainingRun:
    """Build the model and its stages over the caller's process group; without one, over torchrun's,
    or in this process alone. Collective.

    data: from `open_data`; None = opened here. example: a batch [B, ...] like those given to
    `step`, if they do not come from `data`; its values are not read. Weights are initialized: see
    `TrainingRun.load`. Raises ConfigError with all problems, before anything is allocated.
    """
    _needs_config(config)
    problems = [*_callback_problems(callbacks)]
    if "rollback" in (config.on_nonfinite, config.on_spike):
        key = "on_nonfinite" if config.on_nonfinite == "rollback" else "on_spike"
        reason = "a loop of your own has to go back by itself: call load()"
        problems.append(Problem(key, "rollback", reason, f"{key}=skip"))
    worker = _worker(config, callbacks)
    wrong = validate.problems(config, worker.world_size)
    if problems + wrong:
        raise ConfigError(problems + wrong)
    config = _agreed(config, worker)
    if example is not None:
        config, data = _fed(config, example)
    elif data is None:
        data = open_data_on_every_rank(config, worker, writes=False)
    alone = not dist.is_initialized()
    mesh = open_mesh(config, replace(worker, run_dir=Path(config.run_dir)))
    if unlike := compare_places(config, mesh.device, worker)[1]:
        warnings.warn(unlike, stacklevel=2)
    refuse_other_data(config, data, mesh, worker)
    run = building.build(config, mesh, data)
    return TrainingRun(config, worker, data, run, closes_group=alone)


# --- arguments and ranks -------------------------------------------------------------------------


def _words(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides of keyword arguments, one for each key of a section."""
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
    """Write a value in the syntax of overrides."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_text, value)) + "]"
    if hasattr(value, "__qualname__"):  # a class or function
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
    """Yield problems of what launched ranks, being other processes, cannot have from this one."""
    fix = f"start the script by torchrun --nproc-per-node {config.world_size}"
    if callbacks:
        reason = f"the {config.world_size} ranks are other processes, which do not have them"
        yield Problem("callbacks", "", reason, fix)
    reason = f"the {config.world_size} ranks are other processes, which do not import this one"
    for key, path in named_code(to_plain(config), {}):
        if path.startswith("__main__."):
            yield Problem(key, path, reason, f"put it into a module, or {fix}")


def _started() -> int | None:
    """Return the number of ranks of the caller's process group, or torchrun's; None = one."""
    if dist.is_initialized():
        return dist.get_world_size()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return size if size > 1 else None


def _worker(config: Config, callbacks: Sequence[Callback]) -> Worker:
    """Return this process as a rank, creating a process group if there are several ranks."""
    adopt_slurm()
    size, store = _started() or 1, None
    if size > 1:
        if not dist.is_initialized():
            local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
            device, _ = choose_device(config, int(os.environ.get("LOCAL_RANK", "0")), local)
            if is_accelerator(device):
                start_device(config.device, device)  # before groups are created, as in `open_mesh`
            join_group(config.launch, device, int(os.environ["RANK"]), size, local)
        store = default_store()
        number = store.add(f"titanlike/{dist.get_rank()}", 1)  # equal on all ranks
        store = dist.PrefixStore(f"titanlike/{number}", store)
    rank = dist.get_rank() if dist.is_initialized() else 0
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    hooks, run_dir = tuple(callbacks), Path(config.run_dir)
    return Worker(rank, size, local_rank, local_size, run_dir, store, [], callbacks=hooks)


def _agreed(config: Config, worker: Worker) -> Config:
    """Return the config with rank 0's run_dir, which may be named by time. Raises ConfigError if
    ranks have different values."""
    plain = to_plain(replace(config, run_dir=""))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    first = json.dumps([digest, str(Path(config.run_dir).absolute())]) if worker.rank == 0 else ""
    answers = barrier(worker, "config", config.launch.timeout, first, listens=True)
    expected, run_dir = json.loads(answers[0])
    # only ranks that differ send text, since every rank reads what all send
    differs = "differs" if digest != expected else ""
    answers = barrier(worker, "config/compared", config.launch.timeout, differs, listens=True)
    if answers:
        reason = f"rank {in_words(sorted(answers))} has other values than rank 0"
        raise ConfigError([Problem("config", "", reason, "the same overrides on all ranks")])
    return replace(config, run_dir=run_dir)


def _fed(config: Config, example: Mapping[str, Tensor]) -> tuple[Config, Data]:
    """Return a config and data for batches that the caller makes."""
    if missing := {"inputs", "targets"} - example.keys():
        reason = f"has no {' and no '.join(sorted(missing))}"
        raise ConfigError([Problem("example", "", reason, "a batch as step() takes it")])
    try:  # the data supply what the model does not define
        size = resolve_model(config, 0).args.get("vocab_size", 1)
        size = size or registry.vocab_size(config) or 1
    except DataError as error:
        raise ConfigError([error.problem]) from None
    config = replace(config, data=SyntheticData(vocab_size=size))
    sample, name = {name: value[:1] for name, value in example.items()}, "the caller's batches"
    data = replace(registry.open_data(config), example=sample, description=name, fingerprint=name)
    return config, data
