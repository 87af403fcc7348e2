"""How tensor parallelism divides a model, decided before anything is allocated."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config, TraceSplit
from titanlike.device.accelerator import own_backend
from titanlike.device.choose import first_device
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.transform import Transform
from titanlike.graph.equal_units import call_key
from titanlike.graph.model_graph import fields_of
from titanlike.optim.loss import takes_divided_logits
from titanlike.parallel.tp.check import Comparison
from titanlike.parallel.tp.collectives import TensorRanks
from titanlike.parallel.tp.divided_run import Mistake, PlanError
from titanlike.parallel.tp.plan import DIVIDING, Entry, tensor_plan, written_plan
from titanlike.parallel.tp.random_numbers import Draws
from titanlike.parallel.tp.styles import divide
from titanlike.parallel.tp.tensor_parallel import TensorDraft, TensorParallel

if TYPE_CHECKING:
    from titanlike.parallel.tp.tensor_parallel import TensorDraft


def tensor_parallel(
    config: Config,
    model: nn.Module,
    mesh: Mesh | None,
    batch: dict[str, Tensor],
    checked: Transform | None = None,
) -> TensorParallel:
    """Divide a model on meta in place, as its first tensor-parallel rank has it.

    mesh: None in the launcher; batch: of one sequence, on meta, see `example_batch`; checked: what was
    made for the same model and batch before, whose checks hold for as many ranks. Raises ConfigError,
    also where the divided model would compute other results.
    """
    before = checked.draft if isinstance(checked, TensorParallel) else None
    tensor = _divided(config, model, batch, before)
    ranks = tensor.like if mesh is None else TensorRanks(mesh.tp, mesh.tp_rank)
    return TensorParallel(config, tensor, ranks)


def _divided(
    config: Config, model: nn.Module, batch: dict[str, Tensor], checked: TensorDraft | None
) -> TensorDraft:
    if isinstance(config.split, TraceSplit):
        reason = "a graph that is traced has no exchanges between tensor-parallel ranks"
        raise ConfigError([Problem("split", "trace", reason, "split=points")])
    like = TensorRanks(config.tp, 0)
    if checked is not None and (checked.like.size, checked.context) == (config.tp, config.cp):
        tensor = replace(checked, like=like)
        tensor.divide(model.train(), like)
        tensor.prepare(like, fields_of(batch))
        return tensor
    modules = tensor_plan(config, model)
    styles = {entry.style for entry in modules.values()}
    whole = not takes_divided_logits(config.loss)
    heads = [model.get_submodule(name) for name, entry in modules.items() if entry.style == "vocab"]
    vocabulary = next((m.out_features for m in heads if isinstance(m, nn.Linear)), None)
    model.train()
    # each in a forward of its own copy: a model may keep what it computes, as a rotary table
    undivided, *probes = (copy.deepcopy(model) for _ in range(3))
    microbatch = {name: _two_of(x, model) for name, x in batch.items() if name != "targets"}
    comparison = Comparison(undivided, modules, call_key)
    comparison.before(microbatch)
    placements = divide(model, modules, like, whole_logits=whole)
    tensor = TensorDraft(
        modules,
        config.tp_sequence and "sequence" in styles,
        whole,
        None if whole else vocabulary,
        placements,
        like,
        context=config.cp,
    )
    tensor.prepare(like, fields_of(batch))
    return _checked(config, tensor, comparison, probes, microbatch)


def _two_of(field: Tensor, model: nn.Module) -> Tensor:
    """A field of a batch of two sequences, of one of it, in the dtype of the model."""
    two = field.repeat_interleave(2, 0)
    return two.to(next(model.parameters()).dtype) if two.is_floating_point() else two


def _checked(
    config: Config,
    tensor: TensorDraft,
    comparison: Comparison,
    probes: list[nn.Module],
    microbatch: dict[str, Tensor],
) -> TensorDraft:
    """With what the divided model's modules draw. Raises ConfigError where it would compute other
    numbers than the whole one.

    probes: two copies of the undivided model.
    """
    users = written_plan(config) is not None
    written = users or callable(getattr(probes[0], "tp_plan", None))
    left_out = unnamed(probes[0], tensor.modules) if written else []

    def draws(probe: nn.Module, sequence: bool) -> Draws:
        ranks = TensorRanks(config.tp, 0)
        tensor.divide(probe, ranks)
        ranks.sequence = sequence
        divided = tensor.vocabulary is not None
        return comparison.after(probe, microbatch, tensor.placements, ranks, divided)

    try:
        drawn = draws(probes[0], tensor.like.sequence)
    except PlanError as error:
        if config.tp_check:
            raise plan_error(config, tensor.modules, error.mistakes + left_out) from None
        told = plan_error(config, tensor.modules, error.mistakes).problems[0]
        return replace(tensor, unchecked=f"{told.reason} (tp_check=false)")
    if left_out:
        right = "replicate_sum" if comparison.unchecked else "replicate"
        left_out = [replace(one, style=right) for one in left_out]
        raise plan_error(config, tensor.modules, left_out)
    drawn_whole, wrong = drawn, ""
    if tensor.like.sequence:  # batches of other lengths may not be
        try:
            drawn_whole = draws(probes[1], False)
        except PlanError as error:
            wrong = plan_error(config, tensor.modules, error.mistakes).problems[0].reason
    if mistakes := mixed_draws(drawn):
        raise plan_error(config, tensor.modules, mistakes)
    if not wrong and (mistakes := mixed_draws(drawn_whole)):
        wrong = f"{mistakes[0].module} {mistakes[0].reason}"
    found = replace(tensor, draws=drawn, draws_whole=drawn_whole, wrong_whole=wrong)
    return replace(found, unchecked=comparison.unchecked)


def async_problems(config: Config) -> list[Problem]:
    """What `tp_async` lacks."""
    nvidia = own_backend(first_device(config.device)) == "nccl" and torch.version.hip is None
    missing = [
        (config.tp > 1, "there is nothing to overlap with tp=1", "tp=2"),
        (config.compile, "torch.compile does it, in compiled blocks", "compile=true"),
        (config.tp_sequence, "it overlaps all-gather and reduce-scatter alone", "tp_sequence=true"),
        (nvidia, "it needs the symmetric memory of NVIDIA GPUs", "tp_async=false"),
    ]
    return [Problem("tp_async", True, why, fix) for there, why, fix in missing if not there]


# --- what is wrong with a plan, in words with what to write -------------------------------------

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
