"""What a forward takes and returns: tensors in tuples, dicts, dataclasses, in any nesting.

torch's pytree knows tuples, lists, dicts, named tuples and what is registered with it (transformers
registers its outputs); a dataclass that nobody registered is taken apart here, field by field.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree


def tree_flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a structure, and the function that makes it of other leaves."""
    outer, spec = pytree.tree_flatten(value)
    leaves: list[Any] = []
    parts: list[tuple[int, Callable[[Sequence[Any]], Any] | None]] = []
    for leaf in outer:
        if not is_plain_dataclass(leaf):
            leaves.append(leaf)
            parts.append((1, None))
            continue
        inner, rebuild = tree_flatten(fields(leaf))
        leaves += inner
        parts.append((len(inner), _setter(leaf, rebuild)))

    def build(new: Sequence[Any]) -> Any:
        made, at = [], 0
        for size, make in parts:
            made.append(new[at] if make is None else make(new[at : at + size]))
            at += size
        return pytree.tree_unflatten(made, spec)

    return leaves, build


def tree_map(value: Any, function: Callable[[Any], Any]) -> Any:
    """The structure with each leaf replaced by `function(leaf)`."""
    leaves, build = tree_flatten(value)
    return build([function(leaf) for leaf in leaves])


def is_plain_dataclass(value: Any) -> bool:
    """Whether it is an instance of a dataclass that pytree does not know, and no leaf."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return not getattr(value, "is_leaf_of_structures", False)


def fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass's instance."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _setter(value: Any, rebuild: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    def make(leaves: Sequence[Any]) -> Any:
        made = copy.copy(value)
        for name, field in rebuild(leaves).items():
            object.__setattr__(made, name, field)  # it may be frozen
        return made

    return make


def describe(value: Any) -> str:
    """A structure in words: "a dict of 'hidden' [2, 8, 4], 'aux' [1]"; leaves have a `shape`."""
    if hasattr(value, "shape"):
        return f"a tensor {list(value.shape)}"
    named = (
        dict(value)
        if isinstance(value, dict)
        else fields(value)
        if is_plain_dataclass(value)
        else None
    )
    if named is not None:
        parts = [f"{name!r}{_shape(part)}" for name, part in named.items()]
        return f"a {type(value).__name__} of {', '.join(parts)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _shape(part: Any) -> str:
    return f" {list(part.shape)}" if hasattr(part, "shape") else ""
