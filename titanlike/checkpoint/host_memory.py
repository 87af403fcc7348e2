"""Memory that a save's tensors are copied to: kept between saves, pinned with a GPU, shared on request.

One mapping for all tensors of a save. Shared memory has no name (memfd), so that nothing is left when
the process is killed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from titanlike.device.accelerator import pin, unpin

_ALIGNMENT = 64  # bytes
Key = TypeVar("Key", bound=Hashable)


class HostMemory:
    """A mapping that grows when it is too small; the tensors of the save before are then invalid."""

    def __init__(self, *, shared: bool) -> None:
        """shared: another process can map it, by its file descriptor `fd`. Linux only."""
        self._shared = shared
        self.fd = -1
        self._mapping: mmap.mmap | None = None
        self._size = self._address = 0
        self._pinned = False

    def tensors_like(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Contiguous CPU tensors of the same shapes and dtypes, with any content."""
        begins, end = [], 0
        for tensor in tensors.values():
            begins.append(end)
            size = tensor.numel() * tensor.element_size()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._size:
            self._allocate(end)
        found = {}
        for (key, tensor), begin in zip(tensors.items(), begins, strict=True):
            if tensor.numel():  # each with a storage of its own
                place: dict[str, Any] = {"count": tensor.numel(), "offset": begin}
                piece = torch.frombuffer(self._mapping, dtype=tensor.dtype, **place)
                found[key] = piece.view(tensor.shape)
            else:
                found[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return found

    def offset(self, tensor: Tensor) -> int:
        """Where one of these tensors begins."""
        return tensor.data_ptr() - self._address if tensor.numel() else 0

    def close(self) -> None:
        """Release it; what remains of it goes with the tensors that are still there."""
        if self._pinned:
            unpin(self._address)
        self._mapping, self._size, self._pinned = None, 0, False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _allocate(self, size: int) -> None:
        self.close()
        if self._shared:
            self.fd = os.memfd_create("checkpoint")
            os.ftruncate(self.fd, size)
        self._mapping, self._size = mmap.mmap(self.fd, size), size
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        self._pinned = pin(self._address, size)  # else copies are right, and take longer
