"""What is wrong with a tensor-parallel plan, in words with what to write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.parallel.tp.divided_run import Mistake
from titanlike.parallel.tp.plan import DIVIDING, Entry, written_plan
from titanlike.parallel.tp.random_numbers import Draws

if TYPE_CHECKING:
    from titanlike.parallel.tp.tensor_parallel import TensorDraft

_WHOLE = ("sequence", "replicate", "replicate_sum")  # styles of modules that are not divided
# whose results, or what they are given, are parts
_PARTS = ("colwise", "colwise_kv", "packed_colwise", "rowwise")
_MOST = 4  # mistakes that are shown


def unnamed(model: nn.Module, modules: Mapping[str, Entry]) -> list[Mistake]:
    """Modules with parameters beside divided ones, in the same module, that a plan leaves out."""
    holders = {n.rpartition(".")[0] for n, entry in modules.items() if entry.style in _PARTS}
    found: dict[str, Mistake] = {}
    for holder in holders:
        beside = [n for n, entry in modules.items() if n.rpartition(".")[0] == holder]
        others = " and ".join(name.rpartition(".")[2] for name in beside[:2])
        for name, module in _leaves(model.get_submodule(holder), holder):
            if next(module.parameters(recurse=False), None) is None or _named(name, modules):
                continue
            reason = f"has parameters beside {others}, which are divided, and the plan has no entry"
            found[name] = Mistake(name, reason, style="replicate_sum")
    return list(found.values())


def mixed_draws(draws: Draws) -> list[Mistake]:
    """Modules that draw random numbers for whole activations and for parts in one forward."""
    reason = "draws random numbers both for whole activations and for a rank's part (dropout)"
    return [
        Mistake(name, reason, style="nn.Dropout") for name, parts in draws.items() if len(parts) > 1
    ]


def check_draws(config: Config, tensor: TensorDraft, units: Sequence[str]) -> None:
    """Raises ConfigError where the model draws random numbers for a rank's part between its units."""
    between = [
        name
        for name, parts in tensor.draws.items()
        if True in parts and not any(f"{name}.".startswith(f"{unit}.") for unit in units)
    ]
    if between:
        reason = "draws random numbers for a rank's part (dropout) between the modules of stages"
        mistake = Mistake(between[0], reason, style="nn.Dropout")
        raise plan_error(config, tensor.modules, [mistake])


def _leaves(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a module that hold no others; also those in its lists."""
    for name, child in module.named_children():
        own = f"{path}.{name}".lstrip(".")
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _leaves(child, own)
        elif next(child.children(), None) is None:
            yield own, child


def _named(name: str, modules: Mapping[str, Entry]) -> bool:
    parts = name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return name in modules or any(modules[n].style in _WHOLE for n in above if n in modules)


def plan_error(
    config: Config, modules: Mapping[str, Entry], mistakes: list[Mistake]
) -> ConfigError:
    """One problem for all modules of one pattern."""
    found: dict[str, Problem] = {}
    for mistake in mistakes:
        pattern = _pattern(mistake.module)
        if pattern not in found:
            found[pattern] = _problem(config, modules, mistake)
    return ConfigError(list(found.values())[:_MOST])


def _problem(config: Config, modules: Mapping[str, Entry], mistake: Mistake) -> Problem:
    module, key = mistake.module, "model.tp_plan"
    of_user = written_plan(config) is not None
    reason = f"its {module} {mistake.reason}" if module else f"its forward {mistake.reason}"
    if not of_user:
        reason = f"{config.model.name}: {reason}"
    return Problem(
        key if of_user else "tp",
        "" if of_user else config.tp,
        reason,
        _fix(config, modules, mistake),
    )


def _fix(config: Config, modules: Mapping[str, Entry], mistake: Mistake) -> str:
    division = mistake.division
    holders = {n.rpartition(".")[0] for n, entry in modules.items() if entry.style in DIVIDING}
    if mistake.style:
        style = mistake.style
        if style in ("sequence", "replicate", "replicate_sum") and mistake.module in ("", *holders):
            return f"that parameter in a module of its own, which the plan names: {style}"
        if style == "unknown":
            return "tp_check=false, if `titanlike verify` then passes"
        if style == "gather":
            return "an entry `gather` for the module that takes them"
        if style == "split":
            return "tp_sequence=false, or an entry `vocab` or `split` for what makes it"
        if style == "nn.Dropout":
            return "an nn.Dropout module for each of these, or a probability of 0"
        if style == "vocab":
            return "the style vocab for the layer that makes it"
        if style == "sequence" and not config.tp_sequence:
            style = "replicate"
        return _override(mistake.module, style)
    if division is None and config.tp_sequence and mistake.module not in holders:
        return "tp_sequence=false"
    if division is not None and division.kind == "tokens":
        return "tp_sequence=false"
    if division is None or not division.source:
        return "tp=1, or a model whose forward takes sizes from the tensors that it is given"
    entry, source = modules[division.source], division.source
    if mistake.pieces > 1 and entry.style == "colwise" and entry.argument is None:
        return _override(source, f"{{packed_colwise: {mistake.pieces}}}")
    if entry.style == "vocab":
        return _override(source, "colwise_gather")
    return (
        f"sizes from tensors there, as in x.unflatten(-1, (-1, head_dim)), or "
        f"{_override(source, 'colwise_gather')}"
    )


def _pattern(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _override(module: str, style: str) -> str:
    """As a line of `tp_plan`, in the model's YAML file."""
    return f"an entry `{_pattern(module)}: {style}` in its tp_plan"
