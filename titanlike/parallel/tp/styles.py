"""Divide a model among tensor-parallel ranks, as a plan says.

Parameters of divided layers become this rank's part, and hooks around forwards exchange activations.
Between divided layers each rank has either whole activations [B, T, D], or a part of the sequence
[B, T / tp, D] (`TensorRanks.sequence`). A divided layer is entered by `copy_in` or `gather_in` and left
by `sum_out` or `scatter_out`, see `collectives.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.distributed.placement import BIAS_LATER, GATHERS, STYLE, Part, Placement, When
from titanlike.parallel.tp.collectives import (
    TensorRanks,
    copy_in,
    gather_in,
    gather_whole,
    scatter_out,
    sum_out,
    take_part,
)
from titanlike.parallel.tp.plan import DIVIDING, Entry
from titanlike.torch_private.known_code import own_code

FEATURES = -1


def divide(
    model: nn.Module, modules: dict[str, Entry], ranks: TensorRanks, *, whole_logits: bool
) -> dict[str, Placement]:
    """Divide a model on meta in place; the placement of each parameter, by its first name.

    modules: see `plan.named`; whole_logits: the loss needs all of the vocabulary. A model may have a
    method `tp_divided()`, which is called last. Raises ConfigError for what cannot be divided, with a
    `tp` that can.
    """
    if problems := _problems(model, modules, ranks.size):
        fits = next(n for n in range(ranks.size - 1, 0, -1) if not _problems(model, modules, n))
        reason, *more = problems
        if more:
            reason += f" (nor {len(more)} more of the plan)"
        raise ConfigError([Problem("tp", ranks.size, reason, f"tp={fits}")])
    divider = _Divider(model, modules, ranks, whole_logits)
    for name, entry in modules.items():
        divider.divide(name, entry)
    if (divided := getattr(model, "tp_divided", None)) is not None:
        divided()  # it sets the sizes that its forwards read
    return divider.placements()


class _Divider:
    def __init__(
        self, model: nn.Module, modules: dict[str, Entry], ranks: TensorRanks, whole_logits: bool
    ) -> None:
        self._model, self._modules, self._ranks = model, modules, ranks
        self._whole_logits = whole_logits
        self._cut: dict[int, tuple[nn.Parameter, nn.Parameter, Placement]] = {}  # whole, part
        self._partial: dict[int, When] = {}  # of parameters that are not cut

    def divide(self, name: str, entry: Entry) -> None:
        module, ranks, style = self._model.get_submodule(name), self._ranks, entry.style
        mark(module, entry)
        gathered = self._in_gathered(name)
        if style == "vocab" and isinstance(module, nn.Embedding):
            self._vocabulary(module)
        elif style in ("colwise", "colwise_kv", "colwise_gather", "packed_colwise", "vocab"):
            self._columns(module, entry)
            if not gathered:
                vars(module)[GATHERS] = ranks
                _before(module, partial(_enter, ranks))
            if style == "colwise_gather":
                rows: Any = module.tp_rows
                _after(module, partial(_gather_features, ranks, rows, not gathered))
            elif style == "vocab" and self._whole_logits:  # which are the loss's: all tokens, too
                rows = module.tp_rows
                _after(module, partial(_gather_features, ranks, rows, False))
        elif style in ("rowwise", "rowwise_split"):
            if style == "rowwise_split":
                _before(module, partial(_split_features, ranks, not gathered))
            self._rows(module)
        elif style == "gather":
            _before(module, partial(_enter, ranks))
        elif style == "split":
            _after(module, partial(_split_sequence, ranks))
        elif style in ("sequence", "replicate_sum"):
            when: When = "sequence" if style == "sequence" else "always"
            self._partial |= {id(p): when for p in module.parameters()}

    def placements(self) -> dict[str, Placement]:
        of_parts = {id(part): placement for _, part, placement in self._cut.values()}
        found, problems = {}, []
        for name, parameter in self._model.named_parameters():
            when: When = self._partial.get(id(parameter), "never")
            own = of_parts.get(id(parameter), Placement(None, self._ranks.size, when))
            found[name] = own
            if id(parameter) in self._cut:
                reason = f"{name} is tied to a weight that is divided"
                fix = "an entry for both: an embedding and a head are vocab"
                problems.append(Problem("model.tp_plan", "", reason, fix))
        if problems:
            raise ConfigError(problems)
        return found

    def _in_gathered(self, name: str) -> bool:
        above = name.split(".")[:-1]
        paths = (".".join(above[:count]) for count in range(1, len(above) + 1))
        return any(
            path in self._modules and self._modules[path].style == "gather" for path in paths
        )

    def _take(self, module: nn.Module, name: str, part: Part, copies: int = 1) -> None:
        """Replace a parameter by this rank's part of it; a tied one by the same."""
        whole = module._parameters[name]
        assert whole is not None
        if id(whole) not in self._cut:
            local = whole.new_empty(part.local_shape)
            placement = Placement(part, copies, "always" if copies > 1 else "never")
            parameter = nn.Parameter(local, whole.requires_grad)
            self._cut[id(whole)] = whole, parameter, placement
        _, parameter, placement = self._cut[id(whole)]
        if placement.part != part:
            fix = "the same style for both: an embedding and a head are vocab"
            reason = "a weight is tied to another that is divided in another way"
            raise ConfigError([Problem("model.tp_plan", "", reason, fix)])
        module._parameters[name] = parameter

    def _columns(self, module: nn.Module, entry: Entry) -> None:
        """Divide output features."""
        dims, weight = _feature_dims(module), _weight(module)
        assert dims is not None
        dim, _ = dims
        rows: Any = weight.shape[dim]
        ranges, copies = _ranges(entry, rows, self._ranks)
        module.tp_rows = rows
        bias = getattr(module, "bias", None)
        self._take(module, "weight", Part(weight.shape, dim, ranges), copies)
        if bias is not None:
            self._take(module, "bias", Part(bias.shape, 0, ranges), copies)
        _set_features(module, out=sum(stop - start for start, stop in ranges))

    def _rows(self, module: nn.Module) -> None:
        """Divide input features."""
        dims, weight = _feature_dims(module), _weight(module)
        assert dims is not None
        _, dim = dims
        held = self._ranks.part(weight.shape[dim])
        part = Part(weight.shape, dim, ((held.start, held.stop),))
        self._take(module, "weight", part)
        _set_features(module, into=held.stop - held.start)
        bias = getattr(module, "bias", None)
        if bias is not None:  # added to the sum, once
            self._partial[id(bias)] = "sequence"
            vars(module)[BIAS_LATER] = True
            module.forward = MethodType(_without_bias, module)
        _after(module, partial(_leave, self._ranks))

    def _vocabulary(self, module: nn.Embedding) -> None:
        held = self._ranks.part(module.num_embeddings)
        part = Part(module.weight.shape, 0, ((held.start, held.stop),))
        self._take(module, "weight", part)
        padding = module.padding_idx
        if padding is not None:
            inside = held.start <= padding < held.stop
            module.padding_idx = padding - held.start if inside else None
        module.num_embeddings = held.stop - held.start
        patched: Any = module
        patched.forward = partial(_look_up, module.forward, held, part.shape[0], self._ranks)


def mark(module: nn.Module, entry: Entry) -> None:
    """Let a module say how it is divided: modules with equal marks compute alike."""
    vars(module)[STYLE] = entry.style, entry.argument


# --- sizes ---------------------------------------------------------------------------------------


def _problems(model: nn.Module, modules: dict[str, Entry], size: int) -> list[str]:
    """What `size` ranks cannot share, a line for each entry of the plan."""
    found: dict[str, str] = {}
    for name, entry in modules.items():
        module, style = model.get_submodule(name), entry.style
        if entry.pattern in found or style not in (*DIVIDING, "vocab"):
            continue
        kind = _known_class(module)
        # those of transformers (Gemma's) scale what they look up: `_look_up` calls their forward
        if kind is nn.Embedding and type(module).__module__.startswith("transformers."):
            kind = type(module)
        if kind and (own := own_code(module, kind)):
            at = f"model.tp_plan.{entry.pattern}"
            reason = f"{name} has {own}, which no rank computes for a part of its weight"
            raise ConfigError([Problem(at, style, reason, f"{at}=replicate, or tp=1")])
        if style == "vocab" and isinstance(module, nn.Embedding):
            if text := _size_problem(entry, module.num_embeddings, size):
                found[entry.pattern] = f"{name} has {text}"
            continue
        dims = _feature_dims(module)
        if dims is None:
            at, kind = f"model.tp_plan.{entry.pattern}", type(module).__name__
            reason = f"this style is for linear layers, and {name} is of class {kind}"
            fix = "vocab" if isinstance(module, nn.Embedding) else "replicate"
            raise ConfigError([Problem(at, style, reason, f"{at}={fix}")])
        into = style in ("rowwise", "rowwise_split")
        features = _weight(module).shape[dims[1] if into else dims[0]]
        if text := _size_problem(entry, features, size):
            found[entry.pattern] = f"{name} has {text}"
    return [*found.values()]


def _size_problem(entry: Entry, features: int, size: int) -> str:
    argument = entry.argument
    if entry.style == "vocab":
        each = -(-features // size)
        return "" if each * (size - 1) < features else f"{features} rows, which leave a rank none"
    if entry.style == "packed_colwise":
        rows = _packed(argument, features)
        if sum(rows) != features:
            return f"{features} output features, and its packed matrices {sum(rows)}"
        bad = next((n for n in rows if n % (size * entry.head)), None)
        what = "rows" if entry.head == 1 else f"heads of {entry.head}"
        text = f"{(bad or 0) // entry.head} {what} in one matrix, which {size} ranks cannot share"
        return "" if bad is None else text
    if isinstance(argument, int):
        heads = features // argument
        if features % argument:
            return f"{features} output features, which are no heads of {argument}"
        repeated = entry.style == "colwise_kv" and size % heads == 0
        fits = heads % size == 0 or repeated
        return "" if fits else f"{heads} heads, which {size} ranks cannot share"
    return "" if features % size == 0 else f"{features} features, which {size} ranks cannot share"


def _packed(argument: Any, features: int) -> tuple[int, ...]:
    return argument if isinstance(argument, tuple) else (features // argument,) * argument


def _ranges(
    entry: Entry, features: int, ranks: TensorRanks
) -> tuple[tuple[tuple[int, int], ...], int]:
    """(this rank's ranges of output features, ranks that have the same)."""
    if entry.style == "packed_colwise":
        ranges, before = [], 0
        for rows in _packed(entry.argument, features):
            held = ranks.part(rows)
            ranges.append((before + held.start, before + held.stop))
            before += rows
        return tuple(ranges), 1
    if entry.style == "colwise_kv":
        assert isinstance(entry.argument, int)
        heads = features // entry.argument
        if heads < ranks.size:
            copies = ranks.size // heads
            start = ranks.rank // copies * entry.argument
            return ((start, start + entry.argument),), copies
    held = ranks.part(features)
    return ((held.start, held.stop),), 1


def _feature_dims(module: nn.Module) -> tuple[int, int] | None:
    """Dimensions of a linear layer's weight: (output, input) features; None for another module."""
    kind = _known_class(module)
    if kind in (None, nn.Embedding):
        return None
    return (0, 1) if kind is nn.Linear else (1, 0)


def _known_class(module: nn.Module) -> type[nn.Module] | None:
    """Of modules that can be divided: torch's, or transformers' linear layer of GPT-2, whose weight is
    transposed."""
    for kind in type(module).__mro__:
        theirs = kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D"
        if kind in (nn.Linear, nn.Embedding) or theirs:
            return kind
    return None


def _weight(module: nn.Module) -> Tensor:
    weight: Any = module.weight
    return weight


def _set_features(module: nn.Module, *, out: int | None = None, into: int | None = None) -> None:
    names = {"out_features": out, "in_features": into, "nf": out, "nx": into}
    for name, value in names.items():
        if value is not None and hasattr(module, name):
            setattr(module, name, value)


# --- around forwards -----------------------------------------------------------------------------


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change a module's first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        first = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, first: change(kwargs[first])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: nn.Module, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda module, _, output: change(module, output))


def _tokens(x: Tensor) -> int:
    """The dimension of the sequence, in [..., T, D]."""
    return x.dim() - 2


def _enter(ranks: TensorRanks, x: Tensor) -> Tensor:
    return gather_in(x, ranks, _tokens(x)) if ranks.sequence else copy_in(x, ranks)


def _leave(ranks: TensorRanks, module: nn.Module, x: Tensor) -> Tensor:
    x = scatter_out(x, ranks, _tokens(x)) if ranks.sequence else sum_out(x, ranks)
    bias = getattr(module, "bias", None)
    return x if bias is None else x + bias


def _gather_features(
    ranks: TensorRanks, features: int, divided: bool, module: nn.Module, x: Tensor
) -> Tensor:
    """divided: tokens are again, outside of the module."""
    each = -(-features // ranks.size)
    if each * ranks.size != features:
        x = F.pad(x, (0, each - x.shape[FEATURES]))
    x = gather_whole(x, ranks, x.dim() - 1)[..., :features]
    return take_part(x, ranks, _tokens(x)) if divided and ranks.sequence else x


def _split_features(ranks: TensorRanks, divided: bool, x: Tensor) -> Tensor:
    if divided and ranks.sequence:
        x = gather_in(x, ranks, _tokens(x))
        return x[..., ranks.part(x.shape[FEATURES])]
    return take_part(x, ranks, x.dim() - 1)


def _split_sequence(ranks: TensorRanks, module: nn.Module, x: Tensor) -> Tensor:
    return take_part(x, ranks, _tokens(x)) if ranks.sequence else x


def _look_up(
    forward: Callable[[Tensor], Tensor], held: slice, size: int, ranks: TensorRanks, ids: Tensor
) -> Tensor:
    """Rows of a part of the vocabulary; zeros for ids of other ranks, NaN for those of none."""
    elsewhere = (ids < held.start) | (ids >= held.stop)
    rows = forward((ids - held.start).masked_fill(elsewhere, 0))
    rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
    rows = rows.masked_fill(((ids < 0) | (ids >= size)).unsqueeze(-1), math.nan)
    return scatter_out(rows, ranks, _tokens(rows)) if ranks.sequence else sum_out(rows, ranks)


def _without_bias(module: nn.Module, x: Tensor) -> Tensor:
    """The forward of a linear layer whose bias is added behind a sum over ranks."""
    weight: Any = module.weight
    if _feature_dims(module) == (0, 1):
        return F.linear(x, weight)
    return torch.matmul(x, weight)
