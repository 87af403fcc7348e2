"""The divided model's forward on meta, in step with that of the whole one (`seen_run.py`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titanlike.distributed.placement import Placement
from titanlike.parallel.tp.layout import (
    Call,
    Division,
    Kind,
    Layout,
    Operand,
    Shape,
    WrongCall,
    packed,
    part_of,
)
from titanlike.parallel.tp.operators import layouts_of
from titanlike.parallel.tp.plan import Entry
from titanlike.parallel.tp.seen_run import (
    CallKey,
    SeenRun,
    Step,
    is_leaf,
    same_form,
    shapes_of,
    tensors_in,
)
from titanlike.torch_private.tensors import storage_id

_AHEAD = 24  # operations of the whole model that the divided one may leave out, at most
_SUMMED = ("rowwise", "rowwise_split", "vocab", "colwise_gather")  # their results may be whole
_VIEWS = ("view", "_unsafe_view", "_reshape_alias", "reshape", "view_copy")
# differ where a rank has other heads of keys than of queries, and change no number
_LEFT_OUT = (*_VIEWS, "expand", "unsqueeze", "squeeze", "slice", "clone", "alias", "permute")
Need = Kind | Literal["never"]


@dataclass(frozen=True)
class Mistake:
    """Of a plan or model: where, why, and what is in the way."""

    module: str
    reason: str
    division: Division | None = None
    pieces: int = 0  # so many matrices are in the divided dimension
    style: str = ""  # that the module needs


class PlanError(Exception):
    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__(mistakes[0].reason)
        self.mistakes = mistakes


@dataclass
class _Known:
    """Of a tensor in the divided run."""

    tensor: Tensor  # so that its id stays its own
    layout: Layout | None  # None: what is divided is seen by its sizes, and is `kind`
    kind: Kind = "constant"
    waiting: int = (
        0  # whole tensors whose gradients flow through it, a bit each: see DividedRun._needs
    )


class DividedRun(SeenRun):
    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, Entry],
        key: CallKey,
        steps: list[Step],
        placements: Mapping[str, Placement],
    ) -> None:
        super().__init__(model, modules, key)
        self._steps, self._at = steps, 0
        self._known: dict[int, _Known] = {}
        self._views: dict[int, list[int]] = {}  # storage -> tensors that have it
        # of each parameter, and result of a module: what its gradient is a part of, "never" = it is
        # whole
        self._needs: list[tuple[str, set[Need]]] = []
        self.draws: dict[str, set[bool]] = {}
        self._equal: dict[Hashable, str] = {}
        self.repeated: list[tuple[str, str]] = []  # blocks, and equal ones before them
        self._token_wise: tuple[Layout, int] = (), 0  # what the module that runs is given
        for name, parameter in model.named_parameters():
            self._learn(parameter, _of_part(placements[name]), waiting=self._await(name))

    # --- what is known of tensors --------------------------------------------------------------

    def _learn(
        self, tensor: Tensor, layout: Layout | None, kind: Kind = "constant", waiting: int = 0
    ) -> None:
        self._known[id(tensor)] = _Known(tensor, layout, kind, waiting)

    def _await(self, name: str) -> int:
        self._needs.append((name, set()))
        return 1 << len(self._needs) - 1

    def _settle(self, waiting: int, needs: set[Any]) -> None:
        """The gradients of these are parts of sums over these, or whole."""
        while waiting:
            lowest = waiting & -waiting
            self._needs[lowest.bit_length() - 1][1].update(needs)
            waiting ^= lowest

    def _layout(self, tensor: Tensor, whole: Shape) -> Layout:
        local = tuple(tensor.shape)
        if len(local) != len(whole):
            raise WrongCall(f"a tensor of it is {list(local)} here, and {list(whole)} in the model")
        known = self._known.get(id(tensor))
        if (
            known is None and local != whole
        ):  # a list of numbers, say, of which torch makes a tensor
            raise WrongCall(
                f"it is given other numbers: {list(local)}, and {list(whole)} in the model"
            )
        if known is not None and known.layout is not None and len(known.layout) == len(whole):
            fits = all(
                w == n if one is None else sum(one.pattern) * one.repeat == w != n
                for w, n, one in zip(whole, local, known.layout, strict=True)
            )
            if fits:
                return known.layout
        kinds = [one.kind for one in self._now(tensor) if one is not None]
        kind = kinds[0] if kinds else "constant" if known is None else known.kind
        pairs = zip(whole, local, strict=True)
        return tuple(None if w == n else Division(kind, (w,)) for w, n in pairs)

    def _waiting(self, tensors: list[Tensor]) -> int:
        waiting = 0
        for tensor in tensors:
            known = self._known.get(id(tensor))
            waiting |= 0 if known is None else known.waiting
        return waiting

    # --- in step with the whole model ----------------------------------------------------------

    def _find(self, kind: str, name: str, path: str) -> Step | None:
        """The same step of the whole model; None where it has none."""
        path = self.relative(path)
        for at in range(self._at, min(self._at + _AHEAD, len(self._steps))):
            step = self._steps[at]
            if (step.kind, _same(step.name), step.path) == (kind, _same(name), path):
                self._at = at + 1
                return step
            if step.kind != "operation" or not _may_be_left_out(step.name):
                break
        return None

    def _lost(self) -> WrongCall:
        here = self._steps[self._at] if self._at < len(self._steps) else None
        name = "nothing more" if here is None else _short(here.name) or "a divided module"
        return WrongCall(f"the whole model computes {name} there")

    def begin(self, name: str, args: Any, kwargs: Any) -> None:
        """Gradients are summed where tensors enter a divided layer, and where they are divided."""
        if self.token_wise(name):
            self._enter_token_wise(name, tensors_in(args, kwargs))
            return
        style = self._modules[name].style
        own = style in ("vocab", "rowwise_split") or not is_leaf(style)  # exchange of its own
        needs = {"never"} if own or not self._gathered(name) else {"features"}
        given = tensors_in(args, kwargs)[:1]
        self._settle(self._waiting(given), needs)
        for division in [self._now(tensor)[-1:] for tensor in given] if style == "rowwise" else []:
            if division and division[0] is not None and not division[0].plain:
                pieces = division[0].repeat * len(division[0].pattern)
                reason = f"takes {part_of(division[0])}, of {pieces} matrices: a piece of each"
                raise WrongCall(reason, division[0], pieces)

    def _enter_token_wise(self, name: str, given: list[Tensor]) -> None:
        layout = self._now(given[0])
        if layout and (wrong := layout[-1]) is not None:
            raise WrongCall(f"takes {part_of(wrong)}", wrong)
        waiting = self._waiting([*given, *self._model.get_submodule(name).parameters()])
        if kinds := {one.kind for one in layout if one is not None and one.kind != "constant"}:
            self._settle(waiting, kinds)
            waiting = 0
        self._token_wise = layout, waiting

    def _gathered(self, name: str) -> bool:
        """Whether a module around it has exchanged what the module is given."""
        above = name.split(".")[:-1]
        around = (self._modules.get(".".join(above[:n])) for n in range(1, len(above) + 1))
        return any(entry is not None and entry.style == "gather" for entry in around)

    def changed(self, name: str, args: Any, kwargs: Any) -> None:
        if (step := self._find("begin", "", name)) is None:
            raise self._lost()
        for tensor, whole in zip(tensors_in(args, kwargs), step.shapes, strict=True):
            if id(tensor) not in self._known:
                self._exchanged(tensor, whole, "", 0)

    def end(self, name: str, result: Any) -> None:
        if (step := self._find("end", "", name)) is None:
            raise self._lost()
        if self.token_wise(name):
            layout, through = self._token_wise
            for tensor in tensors_in(result):
                self._learn(tensor, layout or None, waiting=through)
            return
        style = self._modules[name].style
        for tensor, whole in zip(tensors_in(result), step.shapes, strict=True):
            waiting = self._await(f"the result of {name}") if style in _SUMMED else 0
            self._exchanged(tensor, whole, name, waiting)

    def _exchanged(self, tensor: Tensor, whole: Shape, name: str, waiting: int) -> None:
        """A tensor that a divided module, or an exchange before one, has made."""
        layout: list[Division | None] = []
        entry = self._modules.get(name)
        for dim, (w, n) in enumerate(zip(whole, tensor.shape, strict=True)):
            if w == n:
                layout.append(None)
                continue
            if n > w:
                reason = f"is given what is whole already: it makes {n} of {w} tokens"
                raise WrongCall(reason, style="split")
            columns = dim == len(whole) - 1 and entry is not None and entry.style in _COLUMNS
            pattern = (w,)
            if columns and entry is not None and entry.style == "packed_colwise":
                count = entry.argument
                assert count is not None
                pattern = count if isinstance(count, tuple) else (w // count,) * count
            kind: Kind = "features" if columns else "tokens"
            layout.append(packed(Division(kind, pattern, 1, name if columns else ""), w))
        self._learn(tensor, tuple(layout), waiting=0 if any(layout) else waiting)

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in(args, kwargs)
        name, waiting = function._schema.name, self._waiting(given)
        step = self._find("operation", name, self.path)
        if step is None:
            if not _may_be_left_out(name):
                raise self._lost()
            result = function(*args, **kwargs)
            # torch leaves a slice of all that there is out: here it takes less
            if _short(name) == "slice" and result.shape != given[0].shape:
                raise WrongCall("it takes as many as the rank has of another tensor")
            kinds = [one.kind for tensor in given for one in self._now(tensor) if one is not None]
            for tensor in tensors_in(result):
                self._learn(tensor, None, next(iter(kinds), "constant"), waiting)
            return result
        if len(given) != len(step.shapes):
            raise WrongCall("it is given other tensors than in the whole model")
        operands = {
            id(tensor): Operand(whole, tuple(tensor.shape), self._layout(tensor, whole))
            for tensor, whole in zip(given, step.shapes, strict=True)
        }
        result = function(*args, **kwargs)
        results = tensors_in(result)
        pairs = list(zip(step.results, shapes_of(results), strict=False))
        if len(step.results) != len(results) or any(len(w) != len(n) for w, n in pairs):
            raise WrongCall("its results are others than in the whole model")
        named = self._named(
            function, args, kwargs, lambda v: operands[id(v)] if isinstance(v, Tensor) else v
        )
        ordered = [operands[id(tensor)] for tensor in given]
        pointwise = torch.Tag.pointwise in function.tags
        short = name.replace("::", ".")
        call = Call(short, named, step.given, ordered, pairs, pointwise)
        layouts = layouts_of(call)
        divisions = [one for x in ordered for one in x.layout] + [
            one for layout in layouts for one in layout
        ]
        self._note(function, named, any(one is not None for one in divisions))
        kinds = {one.kind for one in divisions if one is not None and one.kind != "constant"}
        if waiting and kinds:
            self._settle(waiting, kinds)
            waiting = 0
        if _short(name) in _NO_GRADIENT:
            waiting = 0
        for tensor, layout in zip(results, layouts, strict=True):
            own = waiting if tensor.is_floating_point() or tensor.is_complex() else 0
            if id(tensor) in operands:
                self._written(tensor, layout, own)
            self._learn(tensor, layout, waiting=own)
            self._views.setdefault(storage_id(tensor), []).append(id(tensor))
        return result

    def _written(self, tensor: Tensor, layout: Layout, waiting: int) -> None:
        """A tensor was changed in place: so were all that share its memory."""
        for other in self._views.get(storage_id(tensor), ()):
            known = self._known.get(other)
            if known is None or known.tensor is tensor:
                continue
            known.waiting |= waiting
            alike = known.layout is not None and len(known.layout) == len(layout)
            for dim, one in enumerate(known.layout or ()):
                constant = one is not None and one.kind == "constant"
                if one is not None and constant and not (alike and layout[dim] is not None):
                    raise WrongCall(f"it writes to some elements of {part_of(one)}", one)
            if known.layout is not None and alike:
                kinds = zip(known.layout, layout, strict=True)
                known.layout = tuple(own if new is None else new for own, new in kinds)

    def _now(self, tensor: Tensor) -> Layout:
        known = self._known.get(id(tensor))
        return () if known is None or known.layout is None else known.layout

    def _note(self, function: Any, given: Mapping[str, Any], divided: bool) -> None:
        """Remember a call that draws random numbers."""
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return
        chance = given.get("dropout_p", given.get("p"))
        if "dropout" in function._schema.name and (not chance or given.get("train") is False):
            return
        if _short(function._schema.name) == "scaled_dot_product_attention" and not chance:
            return
        self.draws.setdefault(self.path, set()).add(divided)

    def raised(self, error: Exception, args: Any, kwargs: Any) -> Exception:
        if "meta" in str(error).lower():
            return error
        tensors = tensors_in(args, kwargs)
        shown = " and ".join(str(list(tensor.shape)) for tensor in tensors[:3])
        divisions = [one for tensor in tensors for one in self._now(tensor) if one is not None]
        of = f", which has {part_of(divisions[0])}" if divisions else ""
        text = str(error).strip().splitlines()[0]
        wrong = f"{text} (on {shown}{of})" if shown else text
        first = divisions[0] if divisions else None
        unnamed = self._outer == "linear" and self.path not in self._modules
        style = "rowwise" if unnamed and first is not None and first.kind == "features" else ""
        return WrongCall(f"it fails: {wrong}", first, style=style)

    def block(self, name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if (step := self._find("block", "", self.path)) is None:
            raise self._lost()
        if (key := self._key(module, args, kwargs)) is not None:
            known = [self._known.get(id(tensor)) for tensor in tensors_in(args, kwargs)]
            key = key, tuple(None if one is None else one.layout for one in known)
        if key in self._equal:
            self.repeated.append((name, self._equal[key]))
            return args[0]
        outside, self._steps, self._at = (self._steps, self._at), step.inside, 0
        self._prefixes.append(name)
        result = forward(*args, **kwargs)
        self._prefixes.pop()
        self._steps, self._at = outside
        if key is not None and same_form(result, args):
            before, now = self._known.get(id(args[0])), self._known.get(id(result))
            if before is not None and now is not None and before.layout == now.layout:
                self._equal[key] = name
        return result

    # --- what was found ------------------------------------------------------------------------

    def finish(self, output: Any, wholes: tuple[Shape, ...], vocabulary: bool) -> None:
        """Raises PlanError where the model's result is a part that the loss does not expect."""
        for tensor, whole in zip(tensors_in(output), wholes, strict=True):
            self._settle(self._waiting([tensor]), {"never"})
            layout = self._layout(tensor, whole)
            for dim, one in enumerate(layout):
                logits = vocabulary and dim == len(layout) - 1
                if one is not None and not logits:
                    raise PlanError([Mistake("", f"returns {part_of(one)}", style="vocab")])
        for name, like in self.repeated:
            for path in [path for path in self.draws if f"{path}.".startswith(f"{like}.")]:
                same = name + path.removeprefix(like)
                self.draws.setdefault(same, set()).update(self.draws[path])

    def needs(self) -> dict[str, set[Need]]:
        """Of each parameter, and of results of modules by their words."""
        found = dict(self._needs)
        for name, like in self.repeated:
            for other in list(found):
                if other.startswith(f"{like}.") and name + other.removeprefix(like) in found:
                    found[name + other.removeprefix(like)] |= found[other]
        return found


_COLUMNS = ("colwise", "colwise_kv", "colwise_gather", "packed_colwise", "vocab")
_NO_GRADIENT = (
    "detach",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "rand_like",
    "randn_like",
)


def _of_part(placement: Placement) -> Layout | None:
    part = placement.part
    if part is None:
        return None
    rows = part.shape[part.dim]
    one = Division("features", (rows,))
    return tuple(one if dim == part.dim else None for dim in range(len(part.shape)))


def _short(name: str) -> str:
    return name.split("::")[-1]


def _same(name: str) -> str:
    """A view, or a copy where the strides allow no view: each run has those that it needs."""
    return "view" if _short(name) in _VIEWS else name


def _may_be_left_out(name: str) -> bool:
    return _short(name) in _LEFT_OUT
