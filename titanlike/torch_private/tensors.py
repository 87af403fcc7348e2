"""Tensors: in nested structures (pytree), the memory that they use, one kernel for a list of
them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree

GetAttrKey, MappingKey = _pytree.GetAttrKey, _pytree.MappingKey
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_flatten_with_path, tree_leaves = _pytree.tree_flatten_with_path, _pytree.tree_leaves


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each of some plain tensors; waits for no device.

    Symptom without it: `torch.nn.utils.get_total_norm` returns the norm of all of them alone, and
    takes DTensors through their dispatch: 3.6 ms of host time for 291 shards, beside 0.3. Test:
    test_fences.py::test_torchs_norm_of_gradients_does_not_say_of_which
    """
    return list(torch._foreach_norm(list(tensors)))


def divide(tensors: Sequence[Tensor], by: Tensor) -> None:
    """Divide some plain tensors of one device by a scalar of that device, in place."""
    torch._foreach_div_(list(tensors), by)


def add_values(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add to tensors others of the same shapes and dtypes, in place."""
    torch._foreach_add_(list(to), list(values))


def copy_values(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors other values, in place, cast to their dtypes."""
    if to:
        torch._foreach_copy_(list(to), list(values))


def lerp(to: Sequence[Tensor], values: Sequence[Tensor], share: float | list[Tensor]) -> None:
    """Move tensors by a share towards others of the same shapes, in place; share: of all, or of
    each a scalar tensor."""
    torch._foreach_lerp_(list(to), list(values), share)


def storage_id(tensor: Tensor) -> int:
    """The same for tensors that are views of the same memory, while one of them lives; also on
    meta, where torch's public `data_ptr` is 0 for all."""
    return tensor.untyped_storage()._cdata
