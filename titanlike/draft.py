"""What a config decides before anything is allocated: model, stages, order, sharding.

No process group and no memory: everything is on the meta device. The driver drafts a run to find
mistakes before a worker starts (`preflight`), and every rank drafts it again before it builds.
"""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from titanlike.config.errors import ConfigError, Problem, nearest
from titanlike.config.parse import convert
from titanlike.config.schema import Config, Custom
from titanlike.data.checks import vocab_size
from titanlike.imports import load
from titanlike.parallel.device import choose_device
from titanlike.pipeline.order import Order
from titanlike.pipeline.partition import SplitError, Unit, partition
from titanlike.pipeline.schedules import (
    NoDivision,
    build_order,
    declared_microbatches,
    derive_microbatches,
    stage_count,
)
from titanlike.pipeline.stages import chain

MODELS = {"llama": "titanlike.models.llama.Llama", "gpt2": "titanlike.models.gpt2.Gpt2"}


@dataclass(frozen=True)
class Draft:
    """What is decided before anything is allocated."""

    model: Custom  # with all of its arguments
    order: Order
    microbatches: int
    why_microbatches: str
    zero: int
    why_zero: str
    units: dict[str, Unit]
    stages: list[list[str]]  # unit names of each stage
    sizes: dict[str, int]  # parameters of each unit
    flops_per_token: float | None

    def stage_parameters(self, stage: int) -> int:
        return sum(self.sizes[name] for name in self.stages[stage])

    @property
    def parameters(self) -> int:
        return sum(self.sizes.values())


def resolve_model(config: Config) -> Custom:
    """The model's name and arguments, with what is left to the data filled in."""
    args = dict(config.model.args)
    if args.get("vocab_size", 0) is None:
        args["vocab_size"] = vocab_size(config)
    if args.get("max_seq_len", 0) is None:
        args["max_seq_len"] = config.seq_len
    return Custom(config.model.name, args)


def build_model(model: Custom) -> nn.Module:
    """The whole model on the meta device, from a name and arguments that are resolved.

    Raises ConfigError with every problem of its keys.
    """
    path = MODELS.get(model.name, model.name)
    try:
        family = load(path)
    except ValueError as error:
        near = nearest(model.name, MODELS)
        fix = f"model.name={near}" if near else f"model.name={' or '.join(MODELS)}"
        raise ConfigError([Problem("model.name", model.name, str(error), fix)]) from None
    known = inspect.signature(family).parameters
    try:
        inspect.signature(family).bind(**model.args)
    except TypeError as error:
        raise ConfigError(_argument_problems(model, known, str(error))) from None
    hints = typing.get_type_hints(family.__init__ if inspect.isclass(family) else family)
    wrong: list[Problem] = []
    for key, value in model.args.items():
        if hints.get(key) in (int, float, bool, str):
            convert(hints[key], value, f"model.{key}", wrong)
    if wrong:
        raise ConfigError(wrong)
    try:
        with torch.device("meta"):
            return family(**model.args)
    except ValueError as error:
        found = [Problem.parse("model", str(text)) for text in error.args]
        named = [replace(p, key=f"model.{p.key}") if p.key in known else p for p in found]
        raise ConfigError(named) from None
    except (TypeError, RuntimeError, ArithmeticError) as error:
        reason = f"building it raised {type(error).__name__}: {error}"
        raise ConfigError([Problem("model", model.name, reason, "other sizes")]) from error


def _argument_problems(
    model: Custom, known: Mapping[str, inspect.Parameter], error: str
) -> list[Problem]:
    """Keys that the constructor does not take, or that it needs."""
    problems = []
    for key in model.args.keys() - known.keys():
        near = nearest(key, known)
        fix = f"model.{near}=..." if near else f"a key of {model.name}: {', '.join(known)}"
        reason = f"{model.name} has no such argument"
        problems.append(Problem(f"model.{key}", model.args[key], reason, fix))
    return problems or [Problem("model", model.name, error, f"its keys: {', '.join(known)}")]


def draft(config: Config) -> Draft:
    """Decide stages, order and sharding. Raises ConfigError with every problem found."""
    resolved = resolve_model(config)
    model = build_model(resolved)
    problems = _model_problems(config, resolved, model)
    units = chain(model)
    stages: list[list[str]] = []
    try:
        microbatches, why = _microbatches(config)
        order = build_order(config.schedule, config.pp, microbatches)
    except NoDivision as error:
        fix = "" if error.works is None else f"batch_size={error.works * config.dp}"
        problems.append(Problem("batch_size", config.batch_size, str(error), fix))
    except ValueError as error:
        problems.append(Problem.parse("schedule", str(error)))
    else:
        problems += _sharding_problems(config, order)
    try:
        stages = partition(units, config.split, stage_count(config.schedule, config.pp))
    except SplitError as error:
        fix = error.fix.removeprefix("write ")
        problems.append(Problem(error.key, error.value, error.reason, fix))
    except ValueError:
        assert problems, "a schedule without a number of stages has no order, either"
    if problems:
        raise ConfigError(problems)
    zero, why_zero = _zero(config, order.splits_backward)
    return Draft(
        model=resolved,
        order=order,
        microbatches=microbatches,
        why_microbatches=why,
        zero=zero,
        why_zero=why_zero,
        units={unit.name: unit for unit in units},
        stages=stages,
        sizes={
            unit.name: sum(p.numel() for p in model.get_submodule(unit.name).parameters())
            for unit in units
        },
        flops_per_token=getattr(model, "flops_per_token", lambda _: None)(config.seq_len),
    )


def preflight(config: Config) -> list[Problem]:
    """Every problem that takes the model to be found; allocates nothing."""
    problems = []
    try:
        # ranks on this machine: of torchrun or srun, or all of them where this is the driver
        started = int(os.environ.get("WORLD_SIZE", "1")) > 1
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else config.world_size
        choose_device(config.device, 0, ranks)
    except ValueError as error:
        problems.append(Problem.parse("device", str(error)))
    try:
        draft(config)
    except ConfigError as error:
        problems += error.problems
    return problems


def _microbatches(config: Config) -> tuple[int, str]:
    """How many, and why."""
    declared = declared_microbatches(config.schedule)
    if declared is not None:
        return declared, "asked for"
    return derive_microbatches(config.schedule, config.pp, config.batch_size // config.dp)


def _sharding_problems(config: Config, order: Order) -> list[Problem]:
    """What is known to give wrong gradients, and what would do nothing."""
    if order.splits_backward and config.fsdp.zero in (2, 3):
        reason = (
            f"schedule={config.schedule.name} splits the backward in two, and FSDP loses gradients "
            "when it reduces or reshards between the halves"
        )
        fix = "fsdp.zero=1, or a schedule with whole backwards such as interleaved1f1b"
        return [Problem("fsdp.zero", config.fsdp.zero, reason, fix)]
    if config.dp == config.replicate and config.fsdp.zero in (2, 3):
        reason = f"dp={config.dp} replicate={config.replicate} shards nothing"
        fix = f"fsdp.zero=auto, or dp={2 * config.replicate}"
        return [Problem("fsdp.zero", config.fsdp.zero, reason, fix)]
    return []


def _model_problems(config: Config, resolved: Custom, model: nn.Module) -> list[Problem]:
    problems: list[Problem] = []

    def wrong(key: str, value: Any, reason: str, fix: str) -> None:
        problems.append(Problem(key, value, reason, fix))

    if not hasattr(model, "initial"):
        wrong(
            "model.name",
            config.model.name,
            "has no method initial(name) -> (mean, std), which says how a parameter starts",
            "a model with that method (see titanlike/models/llama.py)",
        )
    else:
        problems += _initial_problems(config, model)
    longest = getattr(model, "max_seq_len", None)
    if longest is not None and longest < config.seq_len:
        wrong(
            "seq_len",
            config.seq_len,
            f"is longer than the model's max_seq_len={longest}",
            f"seq_len={longest} or model.max_seq_len={config.seq_len}",
        )
    if config.model.args.get("vocab_size") is not None:
        needed, given = vocab_size(config), config.model.args["vocab_size"]
        if given < needed:
            wrong(
                "model.vocab_size",
                given,
                f"is smaller than the {needed} token ids of data={config.data.name}",
                "model.vocab_size=null (taken from the data)",
            )
    buffers = [name for name, _ in model.named_buffers()]
    if buffers:
        wrong(
            "model.name",
            config.model.name,
            f"has the buffer {buffers[0]}, which is not initialized in a stage",
            "a model that computes it in its forward (see rotary_table in titanlike/models/llama.py)",
        )
    once = {name for name, _ in model.named_parameters()}
    twice = [n for n, _ in model.named_parameters(remove_duplicate=False) if n not in once]
    if twice:
        wrong(
            "model.name",
            config.model.name,
            f"uses one weight twice ({twice[0]}); two stages would train two copies of it",
            "a model without tied weights",
        )
    return problems


def _initial_problems(config: Config, model: nn.Module) -> list[Problem]:
    for name, _ in model.named_parameters():
        answer = model.initial(name)
        pair = isinstance(answer, tuple) and len(answer) == 2
        if not pair or not all(isinstance(number, (int, float)) for number in answer):
            reason = f"its initial({name!r}) returned {answer!r}"
            fix = "return (mean, standard deviation) of the normal distribution it starts from"
            return [Problem("model.name", config.model.name, reason, fix)]
    return []


def _zero(config: Config, splits_backward: bool) -> tuple[int, str]:
    """(1, 2 or 3, why) for `fsdp.zero`, see `titanlike.parallel.sharding`."""
    if config.fsdp.zero != "auto":
        return config.fsdp.zero, "asked for"
    if config.dp == config.replicate:
        return 1, "nothing is sharded"
    if splits_backward:
        return 1, "the schedule splits the backward"
    if config.pp == 1:
        return 3, "no pipeline: each block is gathered when it runs"
    return 2, "a pipeline: parameters stay gathered for a step, gradients do not"
