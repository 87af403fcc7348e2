"""Tensor parallelism of a run: how a model is divided, decided and checked on meta, and what is done in a step."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config, TraceSplit
from titanlike.device.accelerator import own_backend
from titanlike.device.choose import first_device
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.placement import Placement
from titanlike.distributed.transform import Recorded, Transform
from titanlike.graph.equal_units import call_key
from titanlike.graph.model_graph import fields_of
from titanlike.optim.loss import Loss, build_loss, takes_divided_logits
from titanlike.parallel.tp.check import Comparison
from titanlike.parallel.tp.collectives import DividedVocabulary, TensorRanks
from titanlike.parallel.tp.divided_run import Mistake, PlanError
from titanlike.parallel.tp.plan import DIVIDING, Entry, tensor_plan, written_plan
from titanlike.parallel.tp.random_numbers import Draws, RandomRegions, drawing_parts
from titanlike.parallel.tp.styles import divide
from titanlike.torch_private.compiler import overlap_in_compiled_blocks
from titanlike.torch_private.dtensor import local


@dataclass(frozen=True)
class TensorDraft:
    """How a model is divided; the same on every rank."""

    modules: Mapping[str, Entry]  # see `plan.named`
    sequence: bool  # activations between divided layers are divided along the sequence
    whole_logits: bool  # the loss needs all of the vocabulary
    vocabulary: int | None  # logits that are divided
    placements: Mapping[str, Placement]  # of each parameter, on the first rank
    like: TensorRanks  # with which the model on meta is recorded: the first rank has the most
    draws: Draws = field(default_factory=dict)  # modules that draw random numbers in training
    draws_whole: Draws = field(
        default_factory=dict
    )  # with whole activations between divided layers
    wrong_whole: str = ""  # why it would be wrong with these
    context: int = 1  # context-parallel ranks, which have parts of every sequence before
    unchecked: str = ""  # why the plan was not compared with the whole model's forward, if so

    def divide(self, model: nn.Module, ranks: TensorRanks) -> dict[str, Placement]:
        """Divide a model on meta in place; see `styles.divide`."""
        return divide(model, dict(self.modules), ranks, whole_logits=self.whole_logits)

    def why_not_compiled(self, block: str) -> str:
        drawn = "it draws random numbers for each tensor-parallel rank's part (dropout)"
        either = drawing_parts(self.draws, block) or drawing_parts(self.draws_whole, block)
        return drawn if either else ""

    def prepare(self, ranks: TensorRanks, fields: Mapping[str, Any]) -> None:
        """Before a forward on a batch of these fields (see `graph.model_graph.Field`)."""
        length = self.length(fields)
        ranks.sequence = self.sequence and length % (ranks.size * self.context) == 0
        if self.sequence and not ranks.sequence and self.wrong_whole:
            raise ValueError(
                f"tp={ranks.size}: {length} tokens, which are not a multiple, are computed with whole "
                f"activations between layers, and {self.wrong_whole}; write lengths that are a multiple"
            )

    def length(self, fields: Mapping[str, Any]) -> int:
        """Tokens of a sequence in a batch of these fields."""
        return next(iter(fields["inputs"].shape), 1)


class TensorParallel(Transform):
    def __init__(self, config: Config, draft: TensorDraft, ranks: TensorRanks) -> None:
        """ranks: of this process."""
        self._config, self.draft, self._ranks = config, draft, ranks
        self.first, self.ranks = draft.like, ranks
        self.placements, self.unchecked = draft.placements, ""
        if draft.unchecked:
            what = "the tensor-parallel plan against the whole model's forward, and dropout masks"
            self.unchecked = f"{what}: {draft.unchecked}"

    def loss(self, device: torch.device | None = None) -> Loss:
        size = self.draft.vocabulary
        vocabulary = None if size is None else DividedVocabulary(size, self._ranks)
        return build_loss(self._config.loss, device, vocabulary)

    def check(self, recorded: Recorded) -> None:
        check_draws(self._config, self.draft, [unit.name for unit in recorded.graph.units])

    def describe(self, plan: Any) -> Iterator[tuple[str, str]]:
        """Which layers are divided, and whether activations between them are."""
        config, tp = self._config, self._config.tp
        divided, repeated = (
            {name: p for name, p in self.placements.items() if p.part is not None and wanted(p)}
            for wanted in (lambda p: p.copies == 1, lambda p: p.copies > 1)
        )
        parts = [p.part for p in (divided | repeated).values()]
        share = sum(part.shape.numel() for part in parts if part is not None) / plan.whole_numel
        text = f"{share:.0%} of the parameters divided: {_modules(divided)}"
        if repeated:
            most = max(p.copies for p in repeated.values())
            text += f", and {_modules(repeated)} with each head on {most} ranks"
        length = self.draft.length(plan.fields)
        if not config.tp_sequence:
            activations = "whole (tp_sequence=false)"
        elif not self.draft.sequence:
            activations = "whole: the plan has no style sequence"
        elif plan.variable:
            activations = (
                f"divided along the sequence in batches whose length {tp} divides, else whole"
            )
        elif length % tp:
            fits = -(-length // tp) * tp
            activations = f"whole: {tp} does not divide {length} tokens (it would {fits})"
        else:
            activations = "divided along the sequence"
        yield "tensor parallel", f"{text}; activations between them {activations}"

    def open(self, mesh: Mesh, plan: Any) -> None:
        self._mesh, self._regions = mesh, RandomRegions(self._ranks, mesh.device)
        self._ranks.group = mesh.axes.get_group("tp")
        group = self._ranks.group if self._config.tp_async else None
        overlap_in_compiled_blocks(group)

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        placements.update(self.draft.divide(model, self._ranks))

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        self._regions.add(stage, self.draft.draws, self.draft.draws_whole)

    def on_states(self, states: Mapping[int, Any]) -> None:
        parameters = (item for state in states.values() for item in state.placed_parameters())
        of_model = self.placements.values()
        common = self._ranks, self._mesh, self._config.launch.timeout
        self._partial = PartialGradients(parameters, of_model, *common)

    def why_not_compiled(self, block: str) -> str:
        return self.draft.why_not_compiled(block)

    def prepare(self, fields: Mapping[str, Any]) -> None:
        for ranks in (self.draft.like, self._ranks):
            self.draft.prepare(ranks, fields)

    def after_backward(self) -> None:
        self._partial.sum()

    def logits(self, part: Tensor) -> Tensor:
        size, ranks = self.draft.vocabulary, self._ranks
        if size is None:
            return part
        each = -(-size // ranks.size)
        padded = F.pad(part.float(), (0, each - part.size(-1)))
        parts = [torch.empty_like(padded) for _ in range(ranks.size)]
        dist.all_gather(parts, padded.contiguous(), group=ranks.group)
        return torch.cat(parts, -1)[:, :size]


def _modules(parameters: Mapping[str, object]) -> str:
    """The last names of their modules: wq, wk"""
    return ", ".join(dict.fromkeys(name.split(".")[-2] for name in parameters if "." in name))


# --- gradients of parameters that several ranks hold: a norm's weight, repeated heads -------------
#
# Where the ranks computed with different tokens or heads, each has a part of the sum. It is made once
# a step, in one message for all of these parameters, and not in each backward.


class PartialGradients:
    """Of this rank's parameters."""

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Parameter, Placement]],
        placements: Iterable[Placement],
        ranks: TensorRanks,
        mesh: Mesh,
        timeout: float,
    ) -> None:
        """Collective over all ranks; placements: of all parameters of the model, by which each rank makes
        as many groups: torch counts them, to name the next one."""
        self._ranks = ranks
        found: dict[tuple[str, int], list[nn.Parameter]] = {}
        for parameter, placement in dict(parameters).items():
            if placement.partial != "never" and parameter.requires_grad:
                key = placement.partial, placement.copies
                found.setdefault(key, []).append(parameter)
        counts = {placement.copies for placement in placements if placement.partial != "never"}
        groups = {copies: _group(copies, ranks, mesh, timeout) for copies in sorted(counts)}
        self._of_group = [(when, ps, groups[copies]) for (when, copies), ps in found.items()]

    @torch.no_grad()
    def sum(self) -> None:
        """Collective over the tensor-parallel ranks; a gradient that is missing counts as zeros."""
        for when, parameters, group in self._of_group:
            if when == "sequence" and not self._ranks.sequence:
                continue
            by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local(parameter.grad)
                by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
            for gradients in by_kind.values():
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat, group=group)
                sizes = [gradient.numel() for gradient in gradients]
                for gradient, total in zip(gradients, flat.split(sizes), strict=True):
                    gradient.copy_(total.view_as(gradient))


def _group(copies: int, ranks: TensorRanks, mesh: Mesh, timeout: float) -> dist.ProcessGroup:
    """This rank and its neighbours that hold the same elements."""
    if copies == ranks.size:
        assert ranks.group is not None
        return ranks.group
    return dist.new_group(
        mesh.tensor_ranks(copies),
        timeout=timedelta(seconds=timeout),
        use_local_synchronization=True,
    )


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
