"""Reads a checkpoint into tensors of a run: each chunk once, and checked before it is used."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from titanlike.checkpoint.integrity import (
    MARKER,
    METADATA,
    DamagedCheckpoint,
    UnsafeCheckpoint,
    read_manifest,
    reading,
)
from titanlike.checkpoint.metadata import CheckpointHeader, Chunk, read_header
from titanlike.checkpoint.storage import Storage, UnreadableFile
from titanlike.torch_private.distributed_checkpoint import Blocks
from titanlike.torch_private.dtensor import local, local_slices

Slices = tuple[slice, ...]
# of several errors on the ranks the first of the first of these kinds is raised
_KINDS = UnreadableFile, DamagedCheckpoint, UnsafeCheckpoint, OSError


def read_header_on_all_ranks(
    folder: Storage, group: dist.ProcessGroup, key: str
) -> CheckpointHeader:
    """The small files of a committed checkpoint, found right. Collective.

    key: what the user may write to name another. On all ranks raises what one did: UnreadableFile,
    DamagedCheckpoint, UnsafeCheckpoint.
    """
    header, error, rank = None, None, dist.get_rank(group)
    try:
        if rank > 0 and not folder.exists(MARKER):
            raise ValueError(
                f"rank {rank} does not see {folder}, from which rank 0 loads; "
                f"write a {key} on a file system that all machines share"
            )
        header = read_header(folder, read_manifest(folder), rank, dist.get_world_size(group))
    except (UnreadableFile, DamagedCheckpoint, UnsafeCheckpoint) as failure:
        error = failure
    raise_on_all_ranks(error, group)
    assert header is not None
    return header


def read(
    header: CheckpointHeader,
    tensors: Mapping[str, Tensor | Blocks],
    group: dist.ProcessGroup | None,
    unread: str = "",
) -> None:
    """Read the entries of the same names into `tensors`. Collective where `group` is given.

    unread: a prefix of entries that no rank loads, to be checked all the same. On all ranks raises what
    the first rank did whose reading failed: UnreadableFile, DamagedCheckpoint, OSError. Then `tensors`
    have parts of the checkpoint, none of them damaged.
    """
    error: Exception | None = None
    try:
        targets = _targets(header, tensors)
        if unread and header.checksums is not None:
            others = [
                chunk
                for name, tensor in header.tensors.items()
                if name.startswith(unread)
                for chunk in tensor.chunks
            ]
            for chunk in others[dist.get_rank(group) :: dist.get_world_size(group)]:
                targets.setdefault(chunk.file or "", {}).setdefault((chunk.begin, chunk.length), [])
        for file in targets:
            _read_file(header, file, targets[file])
    except (UnreadableFile, DamagedCheckpoint) as failure:
        error = failure
    except Exception as failure:  # also what torch.load raises
        error = OSError(f"checkpoint {header.folder} could not be read: {error_line(failure)}")
    raise_on_all_ranks(error, group)


# file -> (begin, length) of a chunk -> tensors to be filled, and where in the chunk their values are
_Targets = dict[str, dict[tuple[int, int], list[tuple[Tensor, Slices]]]]


def _targets(header: CheckpointHeader, tensors: Mapping[str, Tensor | Blocks]) -> _Targets:
    targets: _Targets = {}
    for name, tensor in tensors.items():
        for at, block in _blocks(tensor).items():
            for chunk in header.tensors[name].chunks:
                if (common := _overlap(at, block, chunk)) is None:
                    continue
                if chunk.file is None or not chunk.plain:
                    raise DamagedCheckpoint(
                        header.folder, METADATA, f"does not say where {name} is"
                    )
                here, there = common
                places = targets.setdefault(chunk.file, {})
                places.setdefault((chunk.begin, chunk.length), []).append((block[here], there))
    return targets


def _blocks(tensor: Tensor | Blocks) -> dict[tuple[int, ...], Tensor]:
    """What this rank has of a tensor, by its offsets in the whole."""
    if isinstance(tensor, Blocks):
        return {tuple(at): block for at, block in tensor.blocks.items()}
    return {tuple(held.start for held in local_slices(tensor)): local(tensor.detach())}


def _overlap(at: tuple[int, ...], block: Tensor, chunk: Chunk) -> tuple[Slices, Slices] | None:
    """What a block and a saved chunk have in common: its places in the block and in the chunk."""
    here, there = [], []
    for start, size, offset, saved in zip(at, block.shape, chunk.offsets, chunk.sizes, strict=True):
        if start >= offset + saved or offset >= start + size:
            return None
        low, high = max(start, offset), min(start + size, offset + saved)
        here.append(slice(low - start, high - start))
        there.append(slice(low - offset, high - offset))
    return tuple(here), tuple(there)


@torch.no_grad()
def _read_file(
    header: CheckpointHeader, file: str, places: dict[tuple[int, int], list[tuple[Tensor, Slices]]]
) -> None:
    folder = header.folder
    with reading(folder, file), folder.reader(file) as read_bytes:
        for (begin, length), targets in sorted(places.items(), key=lambda place: place[0]):
            data = read_bytes(begin, length)
            if header.checksums is not None:
                digest = xxhash.xxh3_128_digest(data)
                header.checksums.check(file, begin, len(data), digest)
            if not targets:
                continue
            saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            for target, there in targets:
                values = saved[there]
                if values.shape != target.shape:
                    reason = f"has other shapes than {file} at byte {begin}"
                    raise DamagedCheckpoint(folder, METADATA, reason)
                target.copy_(values)


def raise_on_all_ranks(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise the error of any rank on all of them. Collective where `group` is given."""
    errors = [error]
    if group is not None:
        errors *= dist.get_world_size(group)
        dist.all_gather_object(errors, error, group=group)
    for kind in _KINDS:
        for failure in errors:
            if isinstance(failure, kind):
                raise failure


def error_line(error: BaseException) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
