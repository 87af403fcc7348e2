"""Which memory a tensor uses."""

from __future__ import annotations

from torch import Tensor


def storage_id(tensor: Tensor) -> int:
    """The same for tensors that are views of the same memory, while one of them lives; also on meta,
    where torch's public `data_ptr` is 0 for all."""
    return tensor.untyped_storage()._cdata
