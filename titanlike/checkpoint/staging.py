"""Copies of a save's tensors on the CPU, made while training goes on, for the modes async_pinned and
async_process.

1. `begin`, in training: what may change at any time (buffers, random generators) is copied at once.
   Parameters and optimizer state change in an optimizer's step alone: they are copied meanwhile, by
   the GPU on a stream of its own, or by the saving thread.
2. `before_update`, in training: the next optimizer step waits for the copy; on a GPU the stream does,
   and the CPU goes on.
3. `finish`, in the saving thread: the copy is complete.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from titanlike.device.accelerator import pin, unpin

_ALIGNMENT = 64  # bytes
Key = TypeVar("Key", bound=Hashable)


class Copy(Generic[Key]):
    """A copy of some tensors, in progress or complete. `tensors` are valid after `finish`."""

    def __init__(
        self,
        sources: Mapping[Key, Tensor],
        memory: HostMemory,
        is_late: Callable[[Key], bool],
    ) -> None:
        """is_late: whether a tensor is changed by nothing but an optimizer's step."""
        self.tensors = memory.tensors_like(sources)
        self._late: list[tuple[Tensor, Tensor]] = []  # to be copied by the saving thread
        self._copied = threading.Event()
        self._gpu_copied: torch.Event | None = None
        sources = {key: tensor.detach() for key, tensor in sources.items()}
        on_gpu = [tensor.device for tensor in sources.values() if not tensor.is_cpu]
        stream = torch.Stream(on_gpu[0]) if on_gpu else None
        early = {
            key: tensor if is_late(key) or tensor.is_cpu else tensor.clone()
            for key, tensor in sources.items()
        }
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream())
        with stream or nullcontext():
            for key, source in early.items():
                target = self.tensors[key]
                if not source.is_cpu:
                    target.copy_(source, non_blocking=True)
                    if stream is not None and source is not sources[key]:
                        source.record_stream(stream)
                elif is_late(key):
                    self._late.append((target, source))
                else:
                    target.copy_(source)
        if stream is not None:
            self._gpu_copied = stream.record_event()

    def before_update(self) -> None:
        """To be called in training before any parameter changes."""
        if self._late:
            self._copied.wait()
        if self._gpu_copied is not None:
            torch.accelerator.current_stream().wait_event(self._gpu_copied)

    def finish(self) -> None:
        """Copy what is left, and wait for the GPU."""
        try:
            for target, source in self._late:
                target.copy_(source)
        finally:
            self._copied.set()  # a failure is the save's, and training goes on
        if self._gpu_copied is not None:
            self._gpu_copied.synchronize()


class HostMemory:
    """Memory that tensors are copied to: kept between saves, pinned with a GPU, shared on request.

    One mapping for all tensors of a save, which grows when it is too small; the tensors of the save before
    are then invalid. Shared memory has no name (memfd), so that nothing is left when the process is killed.
    """

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
        copies = {}
        for (key, tensor), begin in zip(tensors.items(), begins, strict=True):
            if tensor.numel():  # each with a storage of its own
                place: dict[str, Any] = {"count": tensor.numel(), "offset": begin}
                values = torch.frombuffer(self._mapping, dtype=tensor.dtype, **place)
                copies[key] = values.view(tensor.shape)
            else:
                copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return copies

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
