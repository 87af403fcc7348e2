"""Checks before launch whether a sharded model computes what the full one does, and names the fix.

The forward runs on meta twice: full, and sharded as on the first tensor-parallel rank. Layers in
the plan are correct by construction. For each operation outside of them, the second trace finds
which dimensions are sharded and whether the result is the rank's part of the full result
(`operators.py`), and for each unsharded parameter whether its gradient is a partial sum.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor, nn

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import Placement
from titanlike.core.torch_private.compiler import as_if_compiling
from titanlike.core.torch_private.tensors import tensors_in
from titanlike.techniques.tp.operators import ShardingError
from titanlike.techniques.tp.plan import DIVIDING, Entry, entries_above, written_plan
from titanlike.techniques.tp.ranks import TensorRanks
from titanlike.techniques.tp.sharded_trace import RESULT, Need, ShardedTrace
from titanlike.techniques.tp.styles import mark
from titanlike.techniques.tp.traces import ReferenceTrace, first_line, shapes_of

Draws = Mapping[str, set[bool]]  # see `ShardedTrace.draws`


class ForwardCheck:
    """Compares the forward of the sharded model with that of the full model."""

    def __init__(
        self, model: nn.Module, modules: Mapping[str, Entry], batch: dict[str, Tensor]
    ) -> None:
        """model: full; batch: one microbatch on meta, in the model's dtypes."""
        self._modules, self._batch = modules, batch
        self.unchecked = ""  # why the full forward cannot be traced
        for name, entry in modules.items():
            mark(model.get_submodule(name), entry)
        self._compiling = False
        try:
            self._record(model)
        except Exception:  # whatever a forward raises
            self._compiling = True
            try:
                with as_if_compiling():
                    self._record(model)
            except Exception as error:
                self.unchecked = first_line(error) or repr(error)

    def _record(self, model: nn.Module) -> None:
        trace = ReferenceTrace(model, self._modules)
        self._outputs = shapes_of(tensors_in(trace.run(partial(_run, model, self._batch))))
        self._steps = trace.steps

    def mistakes(
        self,
        model: nn.Module,
        placements: Mapping[str, Placement],
        ranks: TensorRanks,
        vocabulary: bool,
    ) -> tuple[list[ShardingError], Draws, frozenset[str]]:
        """(mistakes in the sharded model, modules that draw random numbers in training, those that
        gather their input for layers of the plan alone).

        model: a sharded copy; vocabulary: the loss takes sharded logits.
        """
        if self.unchecked:
            return [], {}, frozenset()
        trace = ShardedTrace(model, self._modules, self._steps, placements)
        try:
            with as_if_compiling() if self._compiling else contextlib.nullcontext():
                outputs = trace.run_checked(partial(_run, model, self._batch), self._outputs)
            for tensor, whole in outputs:
                layout = trace.layout(tensor, whole)
                for shard in filter(None, layout[:-1] if vocabulary else layout):
                    raise ShardingError(f"returns {shard}", style="vocab")
        except ShardingError as error:
            return [error], {}, frozenset()
        trace.complete([tensor for tensor, _ in outputs])
        mistakes = _gradient_mistakes(model, trace.needs, placements, ranks)
        return mistakes, trace.draws, frozenset(trace.only_layers)


def _run(model: nn.Module, batch: dict[str, Tensor]) -> object:
    others = {name: tensor for name, tensor in batch.items() if name != "inputs"}
    return model(*([batch["inputs"]] if "inputs" in batch else []), **others)


# by need: (what a parameter meets, when its gradient is all-reduced, the style that does it)
_SUMS = {
    "features": ("a rank's part of heads or features", "always", "replicate_sum"),
    "tokens": ("a rank's part of the tokens", "sequence", "sequence"),
    "never": ("whole activations", "never", "replicate"),
}
_SUMMED = {"never": "not summed", "sequence": "summed in some batches", "always": "summed"}


def _gradient_mistakes(
    model: nn.Module,
    needs: Mapping[str, set[Need]],
    placements: Mapping[str, Placement],
    ranks: TensorRanks,
) -> list[ShardingError]:
    """Unsharded parameters whose gradients are all-reduced and should not be, or vice versa."""
    mistakes: dict[str, ShardingError] = {}
    for name, kinds in needs.items():
        if name not in placements and kinds - {"never"}:
            module = name.removeprefix(RESULT)
            reason = "gives whole activations, which meet a rank's part of others elsewhere"
            mistakes.setdefault(module, ShardingError(reason, style="gather", module=module))
    for name, parameter in model.named_parameters():
        placement, kinds = placements[name], needs[name]
        if placement.part is not None or not kinds or not parameter.requires_grad:
            continue
        module, _, last = name.rpartition(".")
        if "never" in kinds and len(kinds) > 1:
            reason = f"its {last} is used with whole activations and with a rank's part of others"
            mistakes.setdefault(module, ShardingError(reason, module=module))
            continue
        what, needed, style = next(_SUMS[kind] for kind in _SUMS if kind in kinds)
        summed = placement.partial
        summed = "never" if summed == "sequence" and not ranks.sequence else summed
        if summed != needed:
            reason = f"computes with {what}, and the gradient of its {last} is {_SUMMED[summed]}"
            mistake = ShardingError(f"{reason} over the ranks", style=style, module=module)
            mistakes.setdefault(module, mistake)
    return list(mistakes.values())


def unnamed(model: nn.Module, modules: Mapping[str, Entry], style: str) -> list[ShardingError]:
    """Modules with parameters next to sharded ones, in the same module, that the plan omits; style:
    the entry they would need."""
    mistakes: dict[str, ShardingError] = {}
    for holder in {n.rpartition(".")[0] for n, entry in modules.items() if entry.style in _PARTS}:
        beside = [n for n, entry in modules.items() if n.rpartition(".")[0] == holder]
        others = " and ".join(name.rpartition(".")[2] for name in beside[:2])
        for name, module in _leaf_children(model.get_submodule(holder), holder):
            above = entries_above(name, modules)
            named = name in modules or any(entry.style in _WHOLE for entry in above)
            if named or next(module.parameters(recurse=False), None) is None:
                continue
            reason = (
                f"has parameters besides {others}, which are divided, and the plan has no entry"
            )
            mistakes[name] = ShardingError(reason, style=style, module=name)
    return list(mistakes.values())


def _leaf_children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """(path, child) of the children of a module, and of its lists, that have no children."""
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _leaf_children(child, inner)
        elif next(child.children(), None) is None:
            yield inner, child


def mixed_draws(draws: Draws) -> list[ShardingError]:
    """Modules that draw random numbers for full and for sharded activations in one forward."""
    reason = "draws random numbers both for whole activations and for a rank's part (dropout)"
    mixed = [name for name, parts in draws.items() if len(parts) > 1]
    return [ShardingError(reason, style="nn.Dropout", module=name) for name in mixed]


# --- error messages with fixes -------------------------------------------------------------------

_WHOLE = ("sequence", "replicate", "replicate_sum")  # styles of modules that are not sharded
# styles whose inputs or results are sharded
_PARTS = ("colwise", "colwise_kv", "packed_colwise", "rowwise")
_MOST = 4  # mistakes shown
_FIXES = {  # by needed style, where the fix is not an entry for the module
    "unknown": "tp_check=false, if `titanlike verify` then passes",
    "gather": "an entry `gather` for the module that takes them",
    "split": "tp_sequence=false, or an entry `vocab` or `split` for what makes it",
    "nn.Dropout": "an nn.Dropout module for each of these, or a probability of 0",
    "vocab": "the style vocab for the layer that makes it",
}


def plan_error(
    config: Config, modules: Mapping[str, Entry], mistakes: list[ShardingError]
) -> ConfigError:
    """One problem for all modules that match a pattern."""
    written, problems = written_plan(config.model) is not None, {}
    key, value = ("model.tp_plan", "") if written else ("tp", config.tp)
    for mistake in mistakes:
        if (pattern := _pattern(mistake.module)) not in problems:
            reason = f"its {mistake.module or 'forward'} {mistake.reason}"
            reason = reason if written else f"{config.model.name}: {reason}"
            problems[pattern] = Problem(key, value, reason, _fix(config, modules, mistake))
    return ConfigError(list(problems.values())[:_MOST])


def _fix(config: Config, modules: Mapping[str, Entry], mistake: ShardingError) -> str:
    shard, style = mistake.shard, mistake.style
    holders = {n.rpartition(".")[0] for n, entry in modules.items() if entry.style in DIVIDING}
    if style:
        if style in _WHOLE and mistake.module in ("", *holders):
            return f"that parameter in a module of its own, which the plan names: {style}"
        unsharded = style == "sequence" and not config.tp_sequence
        return _FIXES.get(style) or _override(mistake.module, "replicate" if unsharded else style)
    if shard is None and config.tp_sequence and mistake.module not in holders:
        return "tp_sequence=false"
    if shard is not None and shard.kind == "tokens":
        return "tp_sequence=false"
    if shard is None or not shard.source:
        return "tp=1, or a model whose forward takes sizes from the tensors that it is given"
    entry, source = modules[shard.source], shard.source
    if mistake.pieces > 1 and entry.style == "colwise" and entry.argument is None:
        return _override(source, f"{{packed_colwise: {mistake.pieces}}}")
    gather = _override(source, "colwise_gather")
    if entry.style == "vocab":
        return gather
    return f"sizes from tensors there, as in x.unflatten(-1, (-1, head_dim)), or {gather}"


def _pattern(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _override(module: str, style: str) -> str:
    """A line of `tp_plan`, for the model's YAML file."""
    return f"an entry `{_pattern(module)}: {style}` in its tp_plan"
