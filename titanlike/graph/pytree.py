"""torch's pytree functions, for dataclasses that nobody registered as well.

torch's pytree flattens tuples, lists, dicts, named tuples and registered classes (transformers
registers its outputs). Here the fields of any other dataclass are flattened too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from titanlike.torch_private.tensors import tree_flatten as torch_tree_flatten
from titanlike.torch_private.tensors import tree_unflatten


def tree_flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves, and a function that rebuilds the structure from other leaves."""
    outer, spec = torch_tree_flatten(value)
    leaves: list[Any] = []
    # (leaves, value, how to rebuild its fields)
    parts: list[tuple[int, Any, Callable[..., Any] | None]] = []
    for leaf in outer:
        inner, rebuild = [leaf], None
        if is_plain_dataclass(leaf):
            inner, rebuild = tree_flatten(dataclass_fields(leaf))
        leaves += inner
        parts.append((len(inner), leaf, rebuild))

    def build(new: Sequence[Any]) -> Any:
        outer, at = [], 0
        for size, leaf, rebuild in parts:
            given, at = new[at : at + size], at + size
            outer.append(given[0] if rebuild is None else _copy_with(leaf, rebuild(given)))
        return tree_unflatten(outer, spec)

    return leaves, build


def tree_map(value: Any, function: Callable[[Any], Any]) -> Any:
    """The structure with `function(leaf)` in place of each leaf."""
    leaves, build = tree_flatten(value)
    return build([function(leaf) for leaf in leaves])


def is_plain_dataclass(value: Any) -> bool:
    """Whether it is an instance of a dataclass, and the class does not declare itself a leaf."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return not getattr(value, "is_pytree_leaf", False)


def dataclass_fields(value: Any) -> dict[str, Any]:
    """Name -> value of an instance's fields, not recursive."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _copy_with(value: Any, fields: dict[str, Any]) -> Any:
    copied = copy.copy(value)
    for name, field in fields.items():
        object.__setattr__(copied, name, field)  # the dataclass may be frozen
    return copied


def describe(value: Any) -> str:
    """A structure in words: "a dict of 'hidden' [2, 8, 4], 'aux' [1]"."""
    if hasattr(value, "shape"):
        return f"a tensor {list(value.shape)}"
    # a transformers ModelOutput is both; as a dict it has the fields that are set
    plain = is_plain_dataclass(value) and not isinstance(value, dict)
    named = dataclass_fields(value) if plain else value
    if isinstance(named, dict):
        shapes = {k: f" {list(v.shape)}" if hasattr(v, "shape") else "" for k, v in named.items()}
        parts = [f"{name!r}{shape}" for name, shape in shapes.items()]
        return f"a {type(value).__name__} of {', '.join(parts)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
