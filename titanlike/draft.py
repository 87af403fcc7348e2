"""What a config decides before anything is allocated: model, stages, order, sharding.

No process group and no memory: everything is on the meta device. The driver drafts a run to find
mistakes before a worker starts (`preflight`), and every rank drafts it again before it builds.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.data.checks import vocab_size
from titanlike.imports import load
from titanlike.pipeline.order import Order
from titanlike.pipeline.partition import SplitError, Unit, partition
from titanlike.pipeline.schedules import (
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


def build_model(config: Config) -> nn.Module:
    """The whole model on the meta device. Raises ConfigError with every problem of its keys."""
    name, args = config.model.name, dict(config.model.args)
    try:
        family = load(MODELS.get(name, name))
    except ValueError as error:
        fix = f"model.name={', '.join(MODELS)} or an import path"
        raise ConfigError([Problem("model.name", name, str(error), fix)]) from None
    known = inspect.signature(family).parameters
    if args.get("vocab_size", 0) is None:
        args["vocab_size"] = vocab_size(config)
    if args.get("max_seq_len", 0) is None:
        args["max_seq_len"] = config.seq_len
    try:
        with torch.device("meta"):
            model = family(**args)
    except ValueError as error:
        found = [Problem.parse("model", str(text)) for text in error.args]
        named = [replace(p, key=f"model.{p.key}") if p.key in known else p for p in found]
        raise ConfigError(named) from None
    except TypeError as error:
        fix = f"the keys of {name}: {', '.join(known)}"
        raise ConfigError([Problem("model", name, str(error), fix)]) from None
    return model


def draft(config: Config) -> Draft:
    """Decide stages, order and sharding. Raises ConfigError with every problem found."""
    model = build_model(config)
    problems = _model_problems(config, model)
    units = chain(model)
    stages: list[list[str]] = []
    try:
        stages = partition(units, config.split, stage_count(config.schedule, config.pp))
    except SplitError as error:
        problems.append(Problem(error.key, error.value, error.reason, error.fix))
    except ValueError as error:
        problems.append(Problem("schedule", config.schedule.name, str(error), ""))
    try:
        microbatches, why = _microbatches(config)
        order = build_order(config.schedule, config.pp, microbatches)
    except ValueError as error:
        problems.append(Problem.parse("schedule", str(error)))
    else:
        problems += _sharding_problems(config, order)
    if problems:
        raise ConfigError(problems)
    zero, why_zero = _zero(config, order.splits_backward)
    return Draft(
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
    try:
        draft(config)
    except ConfigError as error:
        return error.problems
    return []


def _microbatches(config: Config) -> tuple[int, str]:
    """How many, and why."""
    declared = declared_microbatches(config.schedule)
    if declared is not None:
        return declared, "asked for"
    return derive_microbatches(config.schedule, config.pp, config.batch_size // config.dp)


def _sharding_problems(config: Config, order: Order) -> list[Problem]:
    """What is known to give wrong gradients."""
    if order.splits_backward and config.fsdp.zero in (2, 3):
        reason = (
            f"schedule={config.schedule.name} splits the backward in two, and FSDP loses gradients "
            "when it reduces or reshards between the halves"
        )
        fix = "fsdp.zero=1, or a schedule with whole backwards such as interleaved1f1b"
        return [Problem("fsdp.zero", config.fsdp.zero, reason, fix)]
    return []


def _model_problems(config: Config, model: nn.Module) -> list[Problem]:
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
    longest = getattr(model, "max_seq_len", None)
    if longest is not None and longest < config.seq_len:
        wrong(
            "seq_len",
            config.seq_len,
            f"is longer than the model's max_seq_len={longest}",
            f"seq_len={longest} or model.max_seq_len={config.seq_len}",
        )
    needed, given = vocab_size(config), config.model.args.get("vocab_size")
    if given is not None and given < needed:
        wrong(
            "model.vocab_size",
            given,
            f"is smaller than the {needed} token ids of data={config.data.name}",
            "model.vocab_size=null (taken from the data)",
        )
    return problems


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
