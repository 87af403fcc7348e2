"""The forward of a rank's sharded model on meta, in step with the full model's: over what each
tensor is divided, and which gradients are partial sums."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titanlike.core.distributed.placement import SHARES_GATHERED, Placement
from titanlike.core.graph.units import call_key
from titanlike.core.torch_private.tensors import storage_id, tensors_in
from titanlike.techniques.tp.operators import (
    Call,
    Kind,
    Layout,
    Operand,
    Shape,
    Shard,
    ShardingError,
    by_sizes,
    layouts_of,
    packed,
)
from titanlike.techniques.tp.plan import Entry, gathered_above
from titanlike.techniques.tp.traces import (
    Step,
    TracedForward,
    by_name,
    first_line,
    is_leaf,
    same_form,
    shapes_of,
    short_name,
    within,
)

_AHEAD = 24  # maximum number of the full model's operations that the sharded one may skip
_COLUMNS = ("colwise", "colwise_kv", "colwise_gather", "packed_colwise", "vocab")
_SUMMED = ("rowwise", "rowwise_split", "vocab", "colwise_gather")  # may return full results
_VIEWS = ("view", "_unsafe_view", "_reshape_alias", "reshape", "view_copy")
# may differ if a rank has fewer key than query heads; they change no values
_LEFT_OUT = (*_VIEWS, "expand", "unsqueeze", "squeeze", "slice", "clone", "alias", "permute")
RESULT = "the result of "
Need = Kind | Literal["never"]


@dataclass
class Tracked:
    """What is known of a tensor of the sharded model."""

    tensor: Tensor  # kept alive, so that its id stays unique
    layout: Layout | None  # None: inferred from its sizes, with `kind`
    kind: Kind = "constant"
    # unsharded parameters, and module results, whose gradients flow through it: see `needs`
    pending: frozenset[str] = frozenset()


class ShardedTrace(TracedForward):
    """The forward of the sharded model, in step with the full one's."""

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, Entry],
        steps: list[Step],
        placements: Mapping[str, Placement],
    ) -> None:
        """steps: the full model's."""
        super().__init__(model, modules)
        self._steps, self._at = steps, 0
        self._tracked: dict[int, Tracked] = {}
        self._views: dict[int, list[int]] = {}  # storage -> tensors on it
        # by parameter, and `RESULT` of a module: over what its gradient is a partial sum, "never" =
        # it is complete
        self.needs: dict[str, set[Need]] = {}
        # modules that draw random numbers -> for full tensors (False), shards (True) or both
        self.draws: dict[str, set[bool]] = {}
        self._gathered: dict[int, str] = {}  # storage of what a module has gathered -> the module
        # modules that gather their input for layers of the plan alone
        self.only_layers: set[str] = set()
        self._equal: dict[Hashable, str] = {}
        self.repeated: list[tuple[str, str]] = []  # block, an earlier equal one
        # layout and pending names of the running token-wise module's input
        self._given: tuple[Layout, frozenset[str]] = (), frozenset()
        for name, parameter in model.named_parameters():
            part, layout = placements[name].part, None
            if part is not None:
                shard = Shard("features", (part.shape[part.dim],))
                layout = tuple(shard if d == part.dim else None for d in range(len(part.shape)))
            self._track(Tracked(parameter, layout, pending=self._partial_of(name)))

    def run_checked(
        self, forward: Callable[[], Any], wholes: Sequence[Shape]
    ) -> list[tuple[Tensor, Shape]]:
        """The tensors that a forward returns, with their shapes in the full model. Raises
        ShardingError whatever the forward raises."""
        try:
            tensors = tensors_in(self.run(forward))
        except ShardingError as error:
            called = f"calls {self.called}: " if self.called else ""
            reason = called + error.reason
            raise ShardingError(
                reason, error.shard, error.pieces, error.style, module=self.path
            ) from None
        except Exception as error:
            reason = f"raises {type(error).__name__}: {first_line(error)}"
            raise ShardingError(reason, module=self.path) from error
        if len(tensors) != len(wholes):
            raise ShardingError(f"returns {len(tensors)} tensors, not {len(wholes)}")
        return [*zip(tensors, wholes, strict=True)]

    def complete(self, results: list[Tensor]) -> None:
        """Finish after the forward: its results go to the loss unchanged, and findings about a
        block apply to the blocks equal to it."""
        self._resolve(self._pending(results), {"never"})
        for name, like in self.repeated:
            for path in [path for path in self.draws if within(path, like)]:
                twin = name + path.removeprefix(like)
                self.draws.setdefault(twin, set()).update(self.draws[path])
            twins = [name + p.removeprefix(like) for p in self.only_layers if within(p, like)]
            self.only_layers.update(twins)
            for path in [path for path in self.needs if within(path, like)]:
                if (twin := name + path.removeprefix(like)) in self.needs:
                    self.needs[twin] |= self.needs[path]

    # --- tracked tensors -----------------------------------------------------------------------

    def _track(self, tracked: Tracked) -> None:
        self._tracked[id(tracked.tensor)] = tracked

    def _partial_of(self, name: str) -> frozenset[str]:
        """Begin to track a parameter's, or a module result's, gradient."""
        self.needs.setdefault(name, set())
        return frozenset([name])

    def _resolve(self, pending: frozenset[str], needs: set[Any]) -> None:
        """Record over what the gradients of `pending` are partial sums, or that they are not."""
        for name in pending:
            self.needs[name] |= needs

    def _of(self, tensor: Tensor) -> Tracked:
        return self._tracked.get(id(tensor)) or Tracked(tensor, None)

    def _pending(self, tensors: list[Tensor]) -> frozenset[str]:
        return frozenset[str]().union(*(self._of(tensor).pending for tensor in tensors))

    def _now(self, tensor: Tensor) -> Layout:
        return self._of(tensor).layout or ()

    def layout(self, tensor: Tensor, whole: Shape) -> Layout:
        """The layout of a tensor with this shape in the full model."""
        local, layout = tuple(tensor.shape), self._now(tensor)
        shapes = f"{list(local)} here, and {list(whole)} in the model"
        if len(local) != len(whole):
            raise ShardingError(f"a tensor of it is {shapes}")
        # such as a tensor made from a list
        if id(tensor) not in self._tracked and local != whole:
            raise ShardingError(f"it is given other numbers: {shapes}")
        if len(layout) == len(whole) and all(
            w == n if shard is None else sum(shard.pattern) * shard.repeat == w != n
            for w, n, shard in zip(whole, local, layout, strict=True)
        ):
            return layout
        kinds = (shard.kind for shard in layout if shard is not None)
        return by_sizes(whole, local, next(kinds, self._of(tensor).kind))

    # --- in step with the full model -----------------------------------------------------------

    def _find(self, kind: str, name: str, path: str) -> Step | None:
        """The same step of the full model, or None."""
        key = kind, _same(name), self._in_block(path)
        for index in range(self._at, min(self._at + _AHEAD, len(self._steps))):
            step = self._steps[index]
            if (step.kind, _same(step.name), step.path) == key:
                self._at = index + 1
                return step
            if step.kind != "operation" or short_name(step.name) not in _LEFT_OUT:
                break
        return None

    def _must_find(self, kind: str, name: str, path: str) -> Step:
        if (step := self._find(kind, name, path)) is not None:
            return step
        expected = self._steps[self._at] if self._at < len(self._steps) else None
        shown = (
            "nothing more" if expected is None else short_name(expected.name) or "a divided module"
        )
        raise ShardingError(f"the whole model computes {shown} there")

    def begin(self, name: str, given: list[Tensor]) -> None:
        """All-reduce gradients where tensors enter a sharded layer, and where they are sharded."""
        style, first = self._modules[name].style, given[:1]
        if SHARES_GATHERED not in vars(self._model.get_submodule(name)):
            self._takes(given)
        last = next((self._now(tensor)[-1:] for tensor in first), ())
        shard = last[0] if last else None
        if self._token_wise(name):
            if shard is not None:
                raise ShardingError(f"takes {shard}", shard)
            layout = self._now(given[0])
            pending = self._pending([*given, *self._model.get_submodule(name).parameters()])
            if kinds := _kinds(layout):
                self._resolve(pending, kinds)
            self._given = layout, frozenset() if kinds else pending
            return
        exchanges = style in ("vocab", "rowwise_split") or not is_leaf(style)  # runs a collective
        summed = gathered_above(name, self._modules)
        self._resolve(self._pending(first), {"features"} if summed and not exchanges else {"never"})
        if style == "rowwise" and shard is not None and not shard.plain:
            reason = f"takes {shard}, of {shard.matrices} matrices: a piece of each"
            raise ShardingError(reason, shard, shard.matrices)

    def gathered(self, name: str, given: list[Tensor]) -> None:
        step = self._must_find("begin", "", name)
        for tensor, whole in zip(given, step.shapes, strict=True):
            if id(tensor) not in self._tracked:
                self._exchanged(tensor, whole, "")
                self._gathered[storage_id(tensor)] = name
                self.only_layers.add(name)

    def _takes(self, given: list[Tensor]) -> None:
        """Note that something else than a layer takes what was gathered for layers."""
        self.only_layers -= {self._gathered.get(storage_id(tensor), "") for tensor in given}

    def end(self, name: str, results: list[Tensor]) -> None:
        step = self._must_find("end", "", name)
        for tensor, whole in zip(results, step.shapes, strict=True):
            if self._token_wise(name):
                layout, pending = self._given
                self._track(Tracked(tensor, layout or None, pending=pending))
            else:
                self._exchanged(tensor, whole, name)

    def _exchanged(self, tensor: Tensor, whole: Shape, name: str) -> None:
        """Track a tensor from a sharded module, or from a collective before one ("")."""
        entry = self._modules.get(name)
        layout: list[Shard | None] = [None] * len(whole)
        for dim, (w, n) in enumerate(zip(whole, tensor.shape, strict=True)):
            if n > w:
                reason = f"is given what is whole already: it makes {n} of {w} tokens"
                raise ShardingError(reason, style="split")
            if n == w:
                continue
            if entry is None or entry.style not in _COLUMNS or dim < len(whole) - 1:
                layout[dim] = Shard("tokens", (w,))
                continue
            layout[dim] = packed(Shard("features", entry.matrices(w), 1, name), w)
        summed = entry is not None and entry.style in _SUMMED and not any(layout)
        pending = self._partial_of(f"{RESULT}{name}") if summed else frozenset[str]()
        self._track(Tracked(tensor, tuple(layout), pending=pending))

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        given, name = tensors_in(args, kwargs), function._schema.name
        self._takes(given)
        pending = self._pending(given)
        find = self._find if short_name(name) in _LEFT_OUT else self._must_find
        if (step := find("operation", name, self.path)) is None:
            result = function(*args, **kwargs)
            # torch skips a slice of everything: here it takes less
            if short_name(name) == "slice" and result.shape != given[0].shape:
                raise ShardingError("it takes as many as the rank has of another tensor")
            shards = (shard for tensor in given for shard in self._now(tensor))
            kind: Kind = next((shard.kind for shard in shards if shard is not None), "constant")
            for tensor in tensors_in(result):
                self._track(Tracked(tensor, None, kind, pending))
            return result
        ordered = self.operands(given, step)
        operands = {id(tensor): x for tensor, x in zip(given, ordered, strict=True)}
        result = function(*args, **kwargs)
        results = tensors_in(result)
        pairs = list(zip(step.results, shapes_of(results), strict=False))
        if len(step.results) != len(results) or any(len(w) != len(n) for w, n in pairs):
            raise ShardingError("its results are others than in the whole model")
        named = by_name(function, args, kwargs, lambda tensor: operands[id(tensor)])
        pointwise = torch.Tag.pointwise in function.tags
        call = Call(name.replace("::", "."), named, step.given, ordered, pairs, pointwise)
        layouts = layouts_of(call)
        every = [shard for layout in (*(x.layout for x in ordered), *layouts) for shard in layout]
        self._note_draws(function, named, any(every))
        if kinds := _kinds(every):
            self._resolve(pending, kinds)
        copies_form = name.endswith("_like") or short_name(name).startswith("new_")
        if kinds or copies_form or short_name(name) == "detach":  # no gradient flows through it
            pending = frozenset()
        for tensor, layout in zip(results, layouts, strict=True):
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            through = pending if differentiable else frozenset[str]()
            if id(tensor) in operands:
                self._written(tensor, layout, through)
            self._track(Tracked(tensor, layout, pending=through))
            self._views.setdefault(storage_id(tensor), []).append(id(tensor))
        return result

    def operands(self, given: list[Tensor], step: Step) -> list[Operand]:
        """The tensor arguments of a call, with their shapes in the full model."""
        if len(given) != len(step.shapes):
            raise ShardingError("it is given other tensors than in the whole model")
        pairs = zip(given, step.shapes, strict=True)
        return [Operand(whole, tuple(x.shape), self.layout(x, whole)) for x, whole in pairs]

    def _written(self, tensor: Tensor, layout: Layout, pending: frozenset[str]) -> None:
        """After an in-place change, update all tensors on the same storage."""
        for other in self._views.get(storage_id(tensor), ()):
            tracked = self._tracked[other]
            if tracked.tensor is tensor:
                continue
            tracked.pending |= pending
            before = tracked.layout
            alike = before is not None and len(before) == len(layout)
            for dim, shard in enumerate(before or ()):
                if shard is not None and shard.kind == "constant" and not (alike and layout[dim]):
                    raise ShardingError(f"it writes to some elements of {shard}", shard)
            if before is not None and alike:
                pairs = zip(before, layout, strict=True)
                tracked.layout = tuple(old if new is None else new for old, new in pairs)

    def _note_draws(self, function: Any, given: Mapping[str, Any], sharded: bool) -> None:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return
        name, chance = short_name(function._schema.name), given.get("dropout_p", given.get("p"))
        disabled = not chance or given.get("train") is False and "dropout" in name
        if disabled and ("dropout" in name or name == "scaled_dot_product_attention"):
            return
        self.draws.setdefault(self.path, set()).add(sharded)

    def raised(self, error: Exception, given: list[Tensor]) -> Exception:
        if "meta" in str(error).lower():
            return error
        shards = [shard for tensor in given for shard in self._now(tensor) if shard is not None]
        shown = " and ".join(str(list(tensor.shape)) for tensor in given[:3])
        shown += f", which has {shards[0]}" if shown and shards else ""
        text = str(error).strip().splitlines()[0]
        first = shards[0] if shards else None
        unnamed = self._outer == "linear" and self.path not in self._modules
        style = "rowwise" if unnamed and first is not None and first.kind == "features" else ""
        text += f" (on {shown})" if shown else ""
        return ShardingError(f"it fails: {text}", first, style=style)

    def block(self, name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._must_find("block", "", self.path)
        if (key := call_key(module, args, kwargs)) is not None:
            key = key, tuple(self._of(tensor).layout for tensor in tensors_in(args, kwargs))
        if key in self._equal:
            self.repeated.append((name, self._equal[key]))
            return args[0]
        outside, self._steps, self._at = (self._steps, self._at), step.inside, 0
        self._blocks.append(name)
        result = forward(*args, **kwargs)
        self._blocks.pop()
        self._steps, self._at = outside
        alike = key is not None and same_form(result, args) and id(result) in self._tracked
        if alike and self._of(args[0]).layout == self._of(result).layout:
            self._equal[key] = name
        return result


def _kinds(layout: Sequence[Shard | None]) -> set[Kind]:
    return {shard.kind for shard in layout if shard is not None and shard.kind != "constant"}


def _same(name: str) -> str:
    """Normalize views, and the copies that strides require instead."""
    return "view" if short_name(name) in _VIEWS else name
