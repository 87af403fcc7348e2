"""Copies of a save's tensors on the CPU, made while training goes on.

1. `begin`, in training: what may change at any time (buffers, random generators) is copied at once.
   Parameters and optimizer state change in an optimizer's step alone: they are copied meanwhile, by
   the GPU on a stream of its own, or by the saving thread.
2. `before_update`, in training: the next optimizer step waits for the copy; on a GPU the stream does,
   and the CPU goes on.
3. `finish`, in the saving thread: the copy is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Generic

import torch
from torch import Tensor

from titanlike.checkpoint.host_memory import HostMemory, Key


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


def copies(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Complete copies in memory of their own."""
    return {
        key: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for key, tensor in tensors.items()
    }
