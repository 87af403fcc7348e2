"""Models by name: how one is found, built on meta, checked, and where its first values come from.

To add a family: a file in `models/`, a line in `MODELS`, a YAML in `conf/model/`. A model from
outside needs none of these: `model.name` is its import path.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from titanlike.config.errors import ConfigError, Problem, nearest
from titanlike.config.imports import import_object
from titanlike.config.parse import convert
from titanlike.config.schema import Config, Custom
from titanlike.data.checks import vocab_size
from titanlike.parallel.initialize import (
    ConstructedWeights,
    InitialWeights,
    SeededWeights,
    parameters_on_meta,
    seeded,
)

MODELS = {
    "llama": "titanlike.models.llama.Llama",
    "gpt2": "titanlike.models.gpt2.Gpt2",
    "hf": "titanlike.models.hf.hf",
}


def resolve_model(config: Config) -> Custom:
    """The model's name and arguments, with what is left to the data filled in."""
    args = dict(config.model.args)
    if args.get("vocab_size", 0) is None:
        args["vocab_size"] = vocab_size(config)
    if args.get("max_seq_len", 0) is None:
        args["max_seq_len"] = config.seq_len
    return Custom(config.model.name, args)


def build_model(model: Custom, device: str = "meta") -> nn.Module:
    """The whole model on a device, from a name and arguments that are resolved.

    Raises ConfigError with every problem of its keys.
    """
    if model.name == "???":
        fix = "model=own model.name=package.module.Class"
        raise ConfigError([Problem("model.name", "???", "a model of your own has a name", fix)])
    path = MODELS.get(model.name, model.name)
    try:
        family = import_object(path)
    except ValueError as error:
        near = nearest(model.name, MODELS)
        fix = f"model.name={near}" if near else f"model.name={' or '.join(MODELS)}"
        raise ConfigError([Problem("model.name", model.name, str(error), fix)]) from None
    known = inspect.signature(family).parameters
    if unknown := _unknown(model, known):
        rest = {key: value for key, value in model.args.items() if key in known}
        try:  # what else is wrong, in one go
            build_model(Custom(model.name, rest), device)
        except ConfigError as error:
            unknown += [problem for problem in error.problems if problem.key != "model"]
        raise ConfigError(unknown)
    try:
        inspect.signature(family).bind(**model.args)
    except TypeError as error:
        fix = f"its keys: {', '.join(known)}"
        raise ConfigError([Problem("model", model.name, str(error), fix)]) from None
    hints = typing.get_type_hints(family.__init__ if inspect.isclass(family) else family)
    wrong: list[Problem] = []
    for key, value in model.args.items():
        if hints.get(key) in (int, float, bool, str):
            convert(hints[key], value, f"model.{key}", wrong)
    if wrong:
        raise ConfigError(wrong)
    try:
        with torch.device(device):
            built = family(**model.args)
    except ValueError as error:
        found = [Problem.parse("model", str(text)) for text in error.args]
        named = [replace(p, key=f"model.{p.key}") if p.key in known else p for p in found]
        raise ConfigError(named) from None
    except ConfigError:
        raise
    except Exception as error:  # whatever a constructor raises
        reason = f"building it raised {type(error).__name__}: {error}"
        raise ConfigError([Problem("model", model.name, reason, "other sizes")]) from error
    if not isinstance(built, nn.Module):
        reason = f"it returned a {type(built).__name__} and no torch.nn.Module"
        raise ConfigError(
            [Problem("model.name", model.name, reason, "a module, or what makes one")]
        )
    for parameter in built.parameters():  # master weights, whatever the constructor thinks
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return built


def _unknown(model: Custom, known: Mapping[str, inspect.Parameter]) -> list[Problem]:
    """Keys that the constructor does not take."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return []
    problems = []
    for key in model.args.keys() - known.keys():
        near = nearest(key, known)
        own = f"a key of {model.name}: {', '.join(known)}"
        fix = f"model.{near}={model.args[key]}" if near else own
        reason = f"{model.name} has no such argument"
        problems.append(Problem(f"model.{key}", model.args[key], reason, fix))
    return problems


def initial_weights_of(model: Custom, seed: int) -> InitialWeights:
    """Initial values of a model by name, see `titanlike.parallel.initialize`."""
    meta = build_model(model)
    if hasattr(meta, "starting_values"):
        return meta.starting_values(seed)
    initial = getattr(meta, "initial", None)
    buffers = next(meta.buffers(), None) is not None
    if initial is not None and not buffers:
        return SeededWeights(initial, seed, {})
    with seeded(seed):
        if initial is None:
            return ConstructedWeights(build_model(model, "cpu"))
        with parameters_on_meta():
            real = build_model(model, "cpu")
    return SeededWeights(initial, seed, dict(real.named_buffers(remove_duplicate=False)))


def model_problems(model: nn.Module, config: Config) -> list[Problem]:
    """What is wrong with a model that could be built: its sizes against the data's."""
    problems: list[Problem] = []

    def wrong(key: str, value: Any, reason: str, fix: str) -> None:
        problems.append(Problem(key, value, reason, fix))

    if hasattr(model, "initial"):
        problems += _initial_problems(config, model)
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars and (config.dp > 1 or config.precision.name == "bf16" or config.fsdp.cpu_offload):
        reason = f"its parameter {scalars[0]} has no dimension, which FSDP cannot shard"
        wrong("model.name", config.model.name, reason, "a parameter of shape [1]")
    loose = _loose_tensor(model)
    if loose is not None:
        reason = f"its attribute {loose} is a tensor and no buffer, which would stay on meta"
        fix = f"self.register_buffer('{loose.rpartition('.')[2]}', ..., persistent=False)"
        wrong("model.name", config.model.name, reason, fix)
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
    return problems


def _loose_tensor(model: nn.Module) -> str | None:
    """A plain tensor that a module keeps, which no stage would find on its device."""
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value) not in known:
                return f"{name}.{attribute}".lstrip(".")
    return None


def _initial_problems(config: Config, model: nn.Module) -> list[Problem]:
    for name, _ in model.named_parameters():
        answer = model.initial(name)
        pair = isinstance(answer, tuple) and len(answer) == 2
        if not pair or not all(isinstance(number, (int, float)) for number in answer):
            reason = f"its initial({name!r}) returned {answer!r}"
            fix = "return (mean, standard deviation) of the normal distribution it starts from"
            return [Problem("model.name", config.model.name, reason, fix)]
    return []
