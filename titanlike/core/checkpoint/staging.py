"""A rank's part of a save: a copy of its tensors in host memory, and the files written from it.

The mode async_pinned copies while training continues:
1. `Copy`, in training: tensors that may change at any time (buffers, random generators) are copied
   at once. Parameters and optimizer state change only in an optimizer step, so they are copied
   concurrently, by the GPU on a side stream, or by the saving thread.
2. `before_update`, in training: the next optimizer step waits for the copy; on a GPU only the
   stream waits.
3. `finish`, in the saving thread: the copy is complete.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from titanlike.core.checkpoint.format import (
    WORDS,
    Piece,
    SavedTensor,
    WrittenFile,
    checksum,
    header_of,
)
from titanlike.core.checkpoint.storage import Storage
from titanlike.core.config.files import sync_to_disk
from titanlike.core.device.accelerator import pin, set_device, unpin
from titanlike.core.torch_private.accelerator import started

_ALIGNMENT = 64  # bytes to which each tensor is aligned
_OTHERS = 2**24  # bytes: generators, states of readers

# --- the copy -------------------------------------------------------------------------------------


class Copy:
    """A copy of some tensors, in progress or complete. `tensors` are valid after `finish`."""

    def __init__(
        self, sources: Mapping[Any, Tensor], memory: HostMemory, is_late: Callable[[Any], bool]
    ) -> None:
        """is_late: whether a tensor changes only in an optimizer step: it may be copied later."""
        self.tensors = memory.tensors_like(sources)
        self._late: list[tuple[Tensor, Tensor]] = []  # (target, source) for the saving thread
        self._copied = threading.Event()
        self._gpu_copied: torch.Event | None = None
        sources = {key: tensor.detach() for key, tensor in sources.items()}
        on_gpu = {
            key: tensor if is_late(key) else tensor.clone()
            for key, tensor in sources.items()
            if not tensor.is_cpu
        }
        if on_gpu:
            stream = torch.Stream(next(iter(on_gpu.values())).device)
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                for key, source in on_gpu.items():
                    self.tensors[key].copy_(source, non_blocking=True)
                    if source is not sources[key]:
                        source.record_stream(stream)
            self._gpu_copied = stream.record_event()
        for key, source in sources.items():
            if source.is_cpu and is_late(key):
                self._late.append((self.tensors[key], source))
            elif source.is_cpu:
                self.tensors[key].copy_(source)

    def before_update(self) -> None:
        """Wait for the copy; called in training before any parameter changes."""
        if self._late:
            self._copied.wait()
        if self._gpu_copied is not None:
            torch.accelerator.current_stream().wait_event(self._gpu_copied)

    def finish(self) -> None:
        """Copy the remaining tensors, and wait for the GPU."""
        try:
            for target, source in self._late:
                target.copy_(source)
        finally:
            self._copied.set()  # also after an error, which fails the save but not training
        if self._gpu_copied is not None:
            self._gpu_copied.synchronize()


class HostMemory:
    """Host memory that tensors are copied to: reused by later saves, pinned if there is a GPU.

    One mapping holds all tensors of a save and grows when it is too small, which invalidates the
    previous save's tensors.
    """

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._size = self._address = 0
        self._pinned = False
        self._reserving = threading.Thread()

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Map and pin memory for a save of these tensors, and for a little more, while training goes
        on: pinning takes seconds."""
        device, size = started(), sum(map(_aligned, tensors)) + _OTHERS

        def map_and_pin() -> None:
            if device is not None:  # a new thread's is the first one
                set_device(device)
            self._map(size)

        self._reserving = threading.Thread(target=map_and_pin, daemon=True, name="pin memory")
        self._reserving.start()

    def _map(self, size: int) -> None:
        self._mapping, self._size = mmap.mmap(-1, size), size
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        self._pinned = pin(self._address, size)  # if this fails, copies are slower

    def tensors_like(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return uninitialized contiguous CPU tensors of the same shapes and dtypes."""
        begins, end = [], 0
        for tensor in tensors.values():
            begins.append(end)
            end += _aligned(tensor)
        self._join()
        if end > self._size:
            self.close()
            self._map(end)
        copies = {}
        for (key, tensor), offset in zip(tensors.items(), begins, strict=True):
            copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            if count := tensor.numel():  # each has a storage object of its own
                place: dict[str, Any] = {"count": count, "offset": offset}
                flat = torch.frombuffer(self._mapping, dtype=tensor.dtype, **place)
                copies[key] = flat.view(tensor.shape)
        return copies

    def _join(self) -> None:
        if self._reserving.ident is not None:
            self._reserving.join()

    def close(self) -> None:
        """Release the memory; parts that tensors still use are freed with them."""
        self._join()
        if self._pinned:
            unpin(self._address)
        self._mapping, self._size, self._pinned = None, 0, False


def _aligned(tensor: Tensor) -> int:
    """Bytes in which a tensor begins and ends aligned."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


# --- the files ------------------------------------------------------------------------------------


def write_pieces(
    folder: Storage, rank: int, pieces: Iterable[tuple[SavedTensor, tuple[int, ...], Tensor]]
) -> list[WrittenFile]:
    """Write a rank's files, each durable on return. Raises OSError.

    pieces: (the full tensor, offsets in it, block); a second one of the same tensor goes to a
    second file, since a safetensors file has a name once.
    """
    files: list[list[tuple[SavedTensor, Piece, Tensor]]] = [[]]
    seen: dict[str, int] = {}
    for saved, offsets, block in pieces:
        number = seen[saved.name] = seen.get(saved.name, -1) + 1
        if number == len(files):
            files.append([])
        piece = Piece(saved.name, offsets, tuple(block.shape), saved.item_size)
        files[number].append((saved, piece, block))
    names = [f"rank-{rank:05d}{f'-{n}' if n else ''}.safetensors" for n in range(len(files))]
    return [
        _write_file(folder, name, file) for name, file in zip(names, files, strict=True) if file
    ]


def _write_file(
    folder: Storage, name: str, pieces: list[tuple[SavedTensor, Piece, Tensor]]
) -> WrittenFile:
    # as safetensors itself: so that the values of any dtype are aligned
    pieces = sorted(pieces, key=lambda each: -each[1].item_size)
    header = header_of((piece, WORDS[saved.dtype]) for saved, piece, _ in pieces)
    at, entries, tensors = len(header), list[Any](), dict[str, list[Any]]()
    with folder.create(name) as raw:
        raw.write(header)
        for saved, piece, block in pieces:
            block = block.detach().resolve_conj().resolve_neg().cpu().contiguous()
            values = block.view(-1).view(torch.uint8).numpy().data
            sums, begin = "", at - len(header)
            for part in piece.parts():
                data = values[part.begin : part.begin + part.bytes]
                sums += xxhash.xxh3_64_hexdigest(data)
                raw.write(data)
                folder.moved.count += 1
            entries.append((saved.name, begin, piece.offsets, piece.sizes, sums))
            if not any(piece.offsets):  # one rank has the first piece of a tensor
                tensors[saved.name] = [WORDS[saved.dtype], saved.shape]
            at += piece.bytes
        raw.flush()
        if folder.local:
            sync_to_disk(raw.fileno())
    head = len(header), checksum(header)
    return WrittenFile(name, at, head, tensors, json.dumps(entries, separators=(",", ":")))
