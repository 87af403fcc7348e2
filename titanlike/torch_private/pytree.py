"""torch's pytree functions: nested tuples, lists, dicts and registered classes of leaves."""

from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

__all__ = [
    "GetAttrKey",
    "MappingKey",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_unflatten",
]
