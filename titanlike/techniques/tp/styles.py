"""Shards a model over tensor-parallel ranks by a plan.

Parameters of sharded layers become this rank's shard, and hooks around forwards run collectives.
Between sharded layers each rank has full activations [B, T, D], or its shard of the sequence [B, T
/ tp, D] (`TensorRanks.sequence`). Each collective has another as its gradient (arXiv 1909.08053,
section 3; with sequence parallelism, 2205.05198, section 4.2.2):

    forward         backward
    identity        all-reduce        full activations enter a sharded layer
    all-reduce      identity          partial sums leave it
    all-gather      reduce-scatter    shards of the sequence enter it
    reduce-scatter  all-gather        partial sums leave it, as shards of the sequence
    all-gather      split             shards become full activations, the same on each rank
    split           all-gather        the reverse
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.distributed.collectives import autograd_collective
from titanlike.core.distributed.placement import (
    BIAS_LATER,
    DIVIDED,
    GATHERS,
    ONLY_LAYERS,
    STYLE,
    Part,
    Placement,
    When,
    in_float8,
)
from titanlike.core.torch_private.known_code import own_code
from titanlike.techniques.tp.gathered import gather_for, share
from titanlike.techniques.tp.hf_plan import set_local_sizes, sets_sizes
from titanlike.techniques.tp.plan import DIVIDING, Entry, gathered_above
from titanlike.techniques.tp.ranks import TensorRanks


def shard_model(
    model: nn.Module, modules: Mapping[str, Entry], ranks: TensorRanks, *, whole_logits: bool
) -> dict[str, Placement]:
    """Shard a model on meta in place; return the placement of each parameter, by its first name.

    modules: see `plan.match_modules`; whole_logits: the loss needs the full vocabulary. A model's method
    `tp_divided()` is called last. Raises ConfigError for what cannot be sharded, with a `tp` that
    can.
    """
    if problems := _problems(model, modules, ranks.size):
        fits = next(n for n in range(ranks.size - 1, 0, -1) if not _problems(model, modules, n))
        reason, *more = problems
        if more:
            reason += f" (nor {len(more)} more of the plan)"
        raise ConfigError([Problem("tp", ranks.size, reason, f"tp={fits}")])
    sharder = _Sharder(model, modules, ranks, whole_logits)
    for name, entry in modules.items():
        sharder.shard(name, entry)
    if sets_sizes(model):
        set_local_sizes(model)
    if (sharded := getattr(model, "tp_divided", None)) is not None:
        sharded()  # it sets the sizes that its forwards read
    return sharder.placements()


class _Sharder:
    def __init__(
        self, model: nn.Module, modules: Mapping[str, Entry], ranks: TensorRanks, whole_logits: bool
    ) -> None:
        self._model, self._modules, self._ranks = model, modules, ranks
        self._whole_logits = whole_logits
        # by id of the full parameter: it, this rank's shard of it, and the shard's placement
        self._sharded: dict[int, tuple[nn.Parameter, nn.Parameter, Placement]] = {}
        self._partial: dict[int, When] = {}  # by id of an unsharded parameter: `Placement.partial`
        self._takers: dict[str, list[str]] = {}  # module that gathers -> linear layers in it

    def shard(self, name: str, entry: Entry) -> None:
        module, ranks, style = self._model.get_submodule(name), self._ranks, entry.style
        mark(module, entry)
        gathered = gathered_above(name, self._modules)
        if style == "vocab" and isinstance(module, nn.Embedding):
            self._vocabulary(module)
        elif style in ("colwise", "colwise_kv", "colwise_gather", "packed_colwise", "vocab"):
            rows = self._columns(module, entry)
            if not gathered:
                vars(module)[GATHERS] = ranks
                vars(module)[ONLY_LAYERS] = True
                self._gather(name, module)
            self._take_gathered(name, module)
            if style == "colwise_gather":
                _after(module, partial(_gather_features, ranks, rows, not gathered))
            elif style == "vocab" and self._whole_logits:  # for the loss, with all tokens, too
                _after(module, partial(_gather_features, ranks, rows, False))
        elif style in ("rowwise", "rowwise_split"):
            if style == "rowwise_split":
                _before(module, partial(_split_features, ranks, not gathered))
            self._rows(module)
        elif style == "rows":
            for last, whole in list(module.named_parameters(recurse=False)):
                self._take(module, last, Part(whole.shape, 0, (ranks.part(len(whole)),)))
        elif style == "gather":
            self._gather(name, module)
        elif style == "split":
            _after(module, lambda _, x: _split_tokens(ranks, x))
        elif style in ("sequence", "replicate_sum"):
            when: When = "sequence" if style == "sequence" else "always"
            self._partial |= {id(p): when for p in module.parameters()}

    def _gather(self, name: str, module: nn.Module) -> None:
        _before(module, partial(_enter, self._ranks, self._takers.setdefault(name, [])))

    def _take_gathered(self, name: str, module: nn.Module) -> None:
        """Let a linear layer take the input that it, or a module around it, gathers."""
        if type(module).forward is nn.Linear.forward or in_float8(module):
            path = max((p for p in self._takers if f"{name}.".startswith(f"{p}.")), key=len)
            takers = self._takers[path]
            share(module, len(takers), self._ranks)
            takers.append(name.removeprefix(path).removeprefix("."))

    def placements(self) -> dict[str, Placement]:
        """Each parameter's placement, by its first name. Raises ConfigError if a module still has
        the full weight that another, tied to it, has a shard of."""
        by_shard = {id(shard): placement for _, shard, placement in self._sharded.values()}
        placements, problems = {}, []
        for name, parameter in self._model.named_parameters():
            partial_gradient: When = self._partial.get(id(parameter), "never")
            replicated = Placement(None, self._ranks.size, partial_gradient)
            placements[name] = by_shard.get(id(parameter), replicated)
            if id(parameter) in self._sharded:
                reason = f"{name} is tied to a weight that is divided"
                fix = "an entry for both: an embedding and a head are vocab"
                problems.append(Problem("model.tp_plan", "", reason, fix))
        if problems:
            raise ConfigError(problems)
        return placements

    def _take(self, module: nn.Module, name: str, part: Part, copies: int = 1) -> None:
        """Replace a parameter by this rank's shard; tied ones share it."""
        whole = module._parameters[name]
        assert whole is not None
        if id(whole) not in self._sharded:
            placement = Placement(part, copies, "always" if copies > 1 else "never")
            parameter = nn.Parameter(whole.new_empty(part.local_shape), whole.requires_grad)
            self._sharded[id(whole)] = whole, parameter, placement
        _, parameter, placement = self._sharded[id(whole)]
        if placement.part != part:
            fix = "the same style for both: an embedding and a head are vocab"
            reason = "a weight is tied to another that is divided in another way"
            raise ConfigError([Problem("model.tp_plan", "", reason, fix)])
        module._parameters[name] = parameter

    def _columns(self, module: Any, entry: Entry) -> int:
        """Shard output features; return their full number."""
        dim, _ = _feature_dims(module)
        rows = module.tp_rows = module.weight.shape[dim]
        ranges, copies = _ranges(entry, rows, self._ranks)
        self._take(module, "weight", Part(module.weight.shape, dim, ranges), copies)
        vars(module)[DIVIDED] = (self._ranks, None) if dim == 0 else (None, self._ranks)
        if (bias := getattr(module, "bias", None)) is not None:
            self._take(module, "bias", Part(bias.shape, 0, ranges), copies)
        _set_features(module, ("out_features", "nf"), sum(stop - start for start, stop in ranges))
        return rows

    def _rows(self, module: Any) -> None:
        """Shard input features."""
        _, dim = _feature_dims(module)
        start, stop = self._ranks.part(module.weight.shape[dim])
        self._take(module, "weight", Part(module.weight.shape, dim, ((start, stop),)))
        vars(module)[DIVIDED] = (self._ranks, None) if dim == 0 else (None, self._ranks)
        _set_features(module, ("in_features", "nx"), stop - start)
        if (bias := getattr(module, "bias", None)) is not None:  # added to the sum, once
            self._partial[id(bias)] = "sequence"
            vars(module)[BIAS_LATER] = True
            if not in_float8(module):
                module.forward = MethodType(_without_bias, module)
        _after(module, partial(_leave, self._ranks))

    def _vocabulary(self, module: nn.Embedding) -> None:
        size = module.num_embeddings
        start, stop = self._ranks.part(size)
        self._take(module, "weight", Part(module.weight.shape, 0, ((start, stop),)))
        if (padding := module.padding_idx) is not None:
            module.padding_idx = padding - start if start <= padding < stop else None
        module.num_embeddings = stop - start
        patched: Any = module
        patched.forward = partial(_look_up, module.forward, start, stop, size, self._ranks)


def mark(module: nn.Module, entry: Entry) -> None:
    """Record a module's style on it: modules with equal marks compute alike."""
    vars(module)[STYLE] = entry.style, entry.argument


# --- sizes ---------------------------------------------------------------------------------------


def _problems(model: nn.Module, modules: Mapping[str, Entry], size: int) -> list[str]:
    """What `size` ranks cannot share, a line for each entry of the plan."""
    problems: dict[str, str] = {}
    for name, entry in modules.items():
        module: Any = model.get_submodule(name)
        style, key = entry.style, f"model.tp_plan.{entry.pattern}"
        if entry.pattern in problems or style not in (*DIVIDING, "vocab"):
            continue
        kind = _known_class(module)
        embedding = isinstance(module, nn.Embedding)
        if kind is None or (embedding and style != "vocab"):
            fix, named = "vocab" if embedding else "replicate", type(module).__name__
            reason = f"this style is for linear layers, and {name} is of class {named}"
            raise ConfigError([Problem(key, style, reason, f"{key}={fix}")])
        # transformers' embeddings (Gemma's) may scale their results: `_look_up` calls their forward
        scaled = kind is nn.Embedding and type(module).__module__.startswith("transformers.")
        if scaled or in_float8(module):
            kind = type(module)
        if custom := own_code(module, kind):
            reason = f"{name} has {custom}, which no rank computes for a part of its weight"
            raise ConfigError([Problem(key, style, reason, f"{key}=replicate, or tp=1")])
        if embedding:
            features = module.num_embeddings
        else:
            features = module.weight.shape[_feature_dims(module)[style.startswith("rowwise")]]
        text = _size_problem(entry, features, size) or _block_problem(module, entry, features, size)
        if text:
            problems[entry.pattern] = f"{name} has {text}"
    return [*problems.values()]


def _size_problem(entry: Entry, features: int, size: int) -> str:
    argument = entry.argument
    if entry.style == "vocab":
        rows = -(-features // size)
        return "" if rows * (size - 1) < features else f"{features} rows, which leave a rank none"
    if entry.style == "packed_colwise":
        matrices = entry.matrices(features)
        if sum(matrices) != features:
            return f"{features} output features, and its packed matrices {sum(matrices)}"
        bad = next((rows for rows in matrices if rows % (size * entry.head)), None)
        what = "rows" if entry.head == 1 else f"heads of {entry.head}"
        text = f"{(bad or 0) // entry.head} {what} in one matrix, which {size} ranks cannot share"
        return "" if bad is None else text
    if isinstance(argument, int):
        heads = features // argument
        if features % argument:
            return f"{features} output features, which are no heads of {argument}"
        fits = heads % size == 0 or (entry.style == "colwise_kv" and size % heads == 0)
        return "" if fits else f"{heads} heads, which {size} ranks cannot share"
    return "" if features % size == 0 else f"{features} features, which {size} ranks cannot share"


def _block_problem(module: Any, entry: Entry, features: int, size: int) -> str:
    # consecutive features that share a scale with no others
    block = getattr(module.config, "block", 1) if in_float8(module) else 1
    ranks = (TensorRanks(size, rank) for rank in range(size))
    parts = chain.from_iterable(_ranges(entry, features, each)[0] for each in ranks)
    if not any(edge % block for part in parts for edge in part):
        return ""
    fits = -(-features // (size * block)) * size * block
    text = f"{features} features, and {features}/{size} = {features / size:g} is not a multiple of "
    text += f"{block}, which share a scale, as {fits}/{size} = {fits // size} is"
    return f"{text}; precision.skip leaves a layer in bf16"


def _ranges(
    entry: Entry, features: int, ranks: TensorRanks
) -> tuple[tuple[tuple[int, int], ...], int]:
    """(this rank's ranges of output features, the number of ranks that have the same)."""
    if entry.style == "colwise_kv":
        assert isinstance(entry.argument, int)
        heads = features // entry.argument
        if heads < ranks.size:
            copies = ranks.size // heads
            start = ranks.rank // copies * entry.argument
            return ((start, start + entry.argument),), copies
    ranges, before = [], 0
    for rows in entry.matrices(features):
        start, stop = ranks.part(rows)
        ranges.append((before + start, before + stop))
        before += rows
    return tuple(ranges), 1


def _feature_dims(linear: nn.Module) -> tuple[int, int]:
    """The dimensions (output, input) of a linear layer's weight."""
    return (0, 1) if _known_class(linear) is nn.Linear else (1, 0)


def _known_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of modules that can be sharded: torch's, or transformers' linear layer of GPT-2,
    whose weight is transposed."""
    for kind in type(module).__mro__:
        conv1d = kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D"
        if kind in (nn.Linear, nn.Embedding) or conv1d:
            return kind
    return None


def _set_features(module: nn.Module, names: tuple[str, ...], value: int) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, value)


# --- around forwards -----------------------------------------------------------------------------


def _before(module: nn.Module, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Change a module's first argument."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(module, args[0]), *args[1:]), kwargs
        first = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, first: change(module, kwargs[first])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: nn.Module, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda module, _, output: change(module, output))


def _tokens(x: Tensor) -> int:
    """The dimension of the sequence, in [..., T, D]."""
    return x.dim() - 2


def _enter(ranks: TensorRanks, layers: Sequence[str], module: nn.Module, x: Tensor) -> Tensor:
    """Prepare the input of a module's sharded layers; layers: names of its linear layers."""
    if ranks.sequence:
        return gather_for(ranks, module, [module.get_submodule(name) for name in layers], x)
    return autograd_collective(x, ranks, "identity", "all_reduce")


def _summed(ranks: TensorRanks, x: Tensor) -> Tensor:
    """The sum of all ranks' activations; with `ranks.sequence`, each rank's shard of it."""
    if ranks.sequence:
        return autograd_collective(x, ranks, "reduce_scatter", "all_gather", _tokens(x))
    return autograd_collective(x, ranks, "all_reduce", "identity")


def _leave(ranks: TensorRanks, module: nn.Module, x: Tensor) -> Tensor:
    x, bias = _summed(ranks, x), getattr(module, "bias", None)
    return x if bias is None else x + bias


def _split_tokens(ranks: TensorRanks, x: Tensor) -> Tensor:
    """This rank's shard of the tokens of full activations."""
    if not ranks.sequence:
        return x
    return autograd_collective(x, ranks, "split", "all_gather", _tokens(x))


def _gather_features(
    ranks: TensorRanks, features: int, divided: bool, module: nn.Module, x: Tensor
) -> Tensor:
    """divided: shard the tokens again, outside of the module."""
    rows = -(-features // ranks.size)
    if rows * ranks.size != features:
        x = F.pad(x, (0, rows - x.shape[-1]))
    x = autograd_collective(x, ranks, "all_gather", "split", x.dim() - 1)[..., :features]
    return _split_tokens(ranks, x) if divided else x


def _split_features(ranks: TensorRanks, divided: bool, module: nn.Module, x: Tensor) -> Tensor:
    if divided and ranks.sequence:
        return _enter(ranks, (), module, x)[..., slice(*ranks.part(x.shape[-1]))]
    return autograd_collective(x, ranks, "split", "all_gather", x.dim() - 1)


def _look_up(
    forward: Callable[[Tensor], Tensor],
    start: int,
    stop: int,
    size: int,
    ranks: TensorRanks,
    ids: Tensor,
) -> Tensor:
    """Rows of a vocabulary shard; zeros for other ranks' ids, NaN for invalid ones."""
    elsewhere = (ids < start) | (ids >= stop)
    rows = forward((ids - start).masked_fill(elsewhere, 0))
    rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
    rows = rows.masked_fill(((ids < 0) | (ids >= size)).unsqueeze(-1), math.nan)
    return _summed(ranks, rows)


def _without_bias(module: nn.Module, x: Tensor) -> Tensor:
    """The forward of a linear layer whose bias is added after the all-reduce."""
    weight: Any = module.weight
    if _feature_dims(module) == (0, 1):
        return F.linear(x, weight)
    return torch.matmul(x, weight)
