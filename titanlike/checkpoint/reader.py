"""Reads a checkpoint's tensors, into a run's or by themselves, and checks what is read.

A chunk (a block of a tensor) is a record of torch.save: an uncompressed ZIP file in which the
values are contiguous. They are read directly into the tensor's memory where possible, some rows at
a time; the checksum is computed on the way, and compared before the last rows are used. Small
chunks, and those in object stores, are read as a whole.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from titanlike.checkpoint.discovery import resolve
from titanlike.checkpoint.integrity import (
    MODEL,
    OPTIMIZER,
    CheckpointHeader,
    Chunk,
    ChunkChecksums,
    Damage,
    SavedTensor,
    UnsafeCheckpoint,
    check_chunk,
    open_header,
    read_header,
    read_manifest,
    read_state,
    reading,
)
from titanlike.checkpoint.storage import (
    MARKER,
    METADATA,
    DamagedCheckpoint,
    ReadInto,
    Storage,
    UnreadableFile,
    error_line,
)
from titanlike.config.errors import ConfigError
from titanlike.config.parse import parse
from titanlike.config.received import Consent, named_outside
from titanlike.config.schema import Config, Custom
from titanlike.distributed.collectives import gather_objects, scatter_objects
from titanlike.models.registry import MODELS, resolve_model
from titanlike.torch_private.distributed_checkpoint import Blocks, describe_record
from titanlike.torch_private.dtensor import local, local_slices

MOST_BYTES = 2**24  # of rows in memory at a time
_READ = 2**20  # bytes read at a time
_SMALL = 2**16  # up to so many bytes a chunk is read as a whole
Slices = tuple[slice, ...]


# --- on all ranks ---------------------------------------------------------------------------------


@contextlib.contextmanager
def raise_on_all_ranks(
    group: dist.ProcessGroup | None, *kinds: type[Exception], text: str = ""
) -> Iterator[None]:
    """Run a block that fails on all ranks if it fails on any. Collective if `group` is given.

    kinds: errors that are raised unchanged; others become an OSError with `text` and their first
    line. Among several, the most specific kind is raised, and the lowest rank's.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure if isinstance(failure, kinds) else OSError(text + error_line(failure))
    errors = [error]
    if group is not None:
        failed = torch.tensor(int(error is not None))
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if failed:
            errors *= dist.get_world_size(group)
            dist.all_gather_object(errors, error, group=group)
    for kind in (UnreadableFile, DamagedCheckpoint, UnsafeCheckpoint, Exception):
        for failure in errors:
            if isinstance(failure, kind):
                raise failure from None


def read_header_on_all_ranks(
    folder: Storage, group: dist.ProcessGroup, key: str, stages: int
) -> CheckpointHeader:
    """Read and check the small files of a committed checkpoint. Collective.

    Only the first rank of each of the `stages` pipeline ranks reads the chunks' places, which for a
    save of thousands of ranks takes a minute and gigabytes; the others know names, dtypes and
    shapes until they `read`. key: the config key that chose the checkpoint. Raises on all ranks
    what any did: UnreadableFile, DamagedCheckpoint, UnsafeCheckpoint; ValueError if a rank does not
    see the checkpoint.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    begin = rank - rank % (ranks // stages)
    read_by = range(begin, begin + ranks // stages)
    with raise_on_all_ranks(group, UnreadableFile, ValueError):
        if rank > 0 and not folder.exists(MARKER):
            raise ValueError(
                f"rank {rank} does not see {folder}, from which rank 0 loads; "
                f"write a {key} on a file system that all machines share"
            )
        header = read_header(folder, read_manifest(folder), rank, ranks, read_by)
    known = {name: replace(tensor, chunks=[]) for name, tensor in header.tensors.items()}
    packed = scatter_objects([pickle.dumps(known)] * len(read_by), group, read_by)
    return header if rank == begin else replace(header, tensors=pickle.loads(packed))


def _with_chunks(
    header: CheckpointHeader, names: Iterable[str], group: dist.ProcessGroup
) -> CheckpointHeader:
    """Return the header with the chunks of these entries and their checksums. Collective."""
    assert header.read_by is not None
    requested = gather_objects({*names}, group, header.read_by)
    answers = []
    if dist.get_rank(group) == header.read_by.start:
        common = set.intersection(*requested)  # all but generators' states: packed once, as bytes
        packed = pickle.dumps(_part(header, common))
        answers = [(packed, _part(header, each - common)) for each in requested]
    packed, (tensors, sums) = scatter_objects(answers, group, header.read_by)
    shared, sums_of_all = pickle.loads(packed)
    checksums = None if header.checksums is None else sums_of_all | sums
    return replace(header, tensors=header.tensors | shared | tensors, checksums=checksums)


def _part(
    header: CheckpointHeader, names: Iterable[str]
) -> tuple[dict[str, SavedTensor], ChunkChecksums]:
    tensors = {name: header.tensors[name] for name in names}
    files = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
    return tensors, {f: sums for f, sums in (header.checksums or {}).items() if f in files}


def read(
    header: CheckpointHeader,
    tensors: Mapping[str, Tensor | Blocks],
    group: dist.ProcessGroup | None,
    unread: str = "",
) -> None:
    """Read entries into `tensors` by name. Collective if `group` is given.

    unread: a prefix of entries that no rank loads, but which are checked. Raises on all ranks what
    the first failing rank did: UnreadableFile, DamagedCheckpoint, OSError. Then `tensors` are
    partly loaded, possibly with damaged values, and must not be used.
    """
    text = f"checkpoint {header.folder} could not be read: "
    others: list[str] = []  # this rank's share of the entries that no rank loads
    if unread and header.checksums is not None:
        others = [name for name in header.tensors if name.startswith(unread)]
        others = others[dist.get_rank(group) :: dist.get_world_size(group)]
    if group is not None and header.read_by is not None and len(header.read_by) > 1:
        header = _with_chunks(header, (*tensors, *others), group)
    with raise_on_all_ranks(group, UnreadableFile, DamagedCheckpoint, text=text):
        targets = _targets(header, tensors)
        for saved in (header.tensors[name] for name in others):
            for chunk in saved.chunks:
                targets.setdefault(chunk.file or "", {}).setdefault((chunk, dtype_of(saved)), [])
        for file in targets:
            _read_file(header, file, targets[file])


_Blocks = list[tuple[tuple[int, ...], Tensor]]  # offsets in the full tensor, block
# (chunk in a file, its dtype) -> blocks that need some of its values
_Places = dict[tuple[Chunk, torch.dtype], _Blocks]


def _targets(
    header: CheckpointHeader, tensors: Mapping[str, Tensor | Blocks]
) -> dict[str, _Places]:
    """Return what is to be read, by file."""
    targets: dict[str, _Places] = {}
    for name, tensor in tensors.items():
        # this rank's blocks of the tensor, by their offsets
        if isinstance(tensor, Blocks):
            blocks = {tuple(offsets): block for offsets, block in tensor.blocks.items()}
        else:
            blocks = {tuple(s.start for s in local_slices(tensor)): local(tensor.detach())}
        for offsets, block in blocks.items():
            values = 0
            for chunk in header.tensors[name].chunks:
                if (common := _overlap(offsets, block, chunk)) is not None:
                    places = targets.setdefault(_file(header, name, chunk), {})
                    place = places.setdefault((chunk, dtype_of(header.tensors[name])), [])
                    place.append((offsets, block))
                    values += block[common[0]].numel()
            if values < block.numel():
                what = f"a block of {name}"
                raise _damaged(header, Damage.VALUES, here=values, all=block.numel(), what=what)
    return targets


def _overlap(at: tuple[int, ...], block: Tensor, chunk: Chunk) -> tuple[Slices, Slices] | None:
    """Return the intersection of a block and a saved chunk, as slices of either; None if empty."""
    here, there = [], []
    for start, size, offset, saved in zip(at, block.shape, chunk.offsets, chunk.sizes, strict=True):
        if start >= offset + saved or offset >= start + size:
            return None
        low, high = max(start, offset), min(start + size, offset + saved)
        here.append(slice(low - start, high - start))
        there.append(slice(low - offset, high - offset))
    return tuple(here), tuple(there)


def _damaged(header: CheckpointHeader, damage: Damage, **facts: Any) -> DamagedCheckpoint:
    """Return the error for an invalid description of tensors."""
    return DamagedCheckpoint(header.folder, METADATA, damage.format(**facts))


def _file(header: CheckpointHeader, name: str, chunk: Chunk) -> str:
    if chunk.file is None:
        raise _damaged(header, Damage.NO_PLACE, name=name)
    return chunk.file


@torch.no_grad()
def _read_file(header: CheckpointHeader, file: str, places: _Places) -> None:
    with reading(header.folder, file), header.folder.reader(file) as read_into:
        for (chunk, dtype), blocks in sorted(places.items(), key=lambda place: place[0][0].begin):
            # one request per chunk for an object store
            in_parts = header.folder.local and chunk.length > _SMALL and bool(chunk.sizes)
            record, parts = _Record(header, file, chunk, dtype, read_into, in_parts), [chunk]
            if record.whole is None:
                ends = [end for start, block in blocks for end in (start[0], start[0] + len(block))]
                parts = _cut(chunk, _READ // _row_bytes(chunk, dtype), ends)
            for part in parts:
                record.fill(part, blocks)


def _cut(chunk: Chunk, step: int, ends: Iterable[int] = ()) -> list[Chunk]:
    """Cut a chunk into blocks of rows, at multiples of `step` rows of the tensor and at `ends`."""
    first, stop, step = chunk.offsets[0], _end(chunk), max(1, step)
    ends = (*ends, *range(first - first % step, stop, step))
    cuts = {first, *(end for end in ends if first < end < stop), stop}
    return [
        Chunk((begin, *chunk.offsets[1:]), (end - begin, *chunk.sizes[1:]))
        for begin, end in pairwise(sorted(cuts))
    ]


def _end(rows: Chunk) -> int:
    return rows.offsets[0] + rows.sizes[0]


def _row_bytes(chunk: Chunk, dtype: torch.dtype) -> int:
    return max(1, prod(chunk.sizes[1:]) * dtype.itemsize)


class _Record(io.RawIOBase):
    """A chunk as a file object, whose values are read into tensors in one pass."""

    def __init__(
        self,
        header: CheckpointHeader,
        file: str,
        chunk: Chunk,
        dtype: torch.dtype,
        read_into: ReadInto,
        in_parts: bool,
    ) -> None:
        """in_parts: read some rows at a time if the record's format allows; otherwise as a whole."""
        self._header, self._file, self._chunk, self._dtype = header, file, chunk, dtype
        self._read_into, self._at, self._hasher = read_into, 0, xxhash.xxh3_128()
        self.whole: Tensor | None = None  # what has been read as a whole
        self._scratch = torch.empty(0, dtype=dtype)
        begin = self._begin_of_values() if in_parts else None
        self._at = 0
        try:
            data = bytearray(chunk.length if begin is None else begin)
        except MemoryError:  # an impossible length
            raise Damage.SHORT() from None
        self._take(data)
        if begin is None:
            self._check()
            try:
                self.whole = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:  # torch and pickle may raise anything for damaged bytes
                raise Damage.RECORD(begin=chunk.begin, error=type(error).__name__) from None
            if self.whole.shape != chunk.sizes:
                raise _damaged(header, Damage.SHAPES, file=file, begin=chunk.begin)

    def fill(self, part: Chunk, blocks: _Blocks) -> None:
        """Read the next rows, `part`, into blocks of the tensor.

        With the last rows, raises ValueError if the chunk's checksum differs.
        """
        overlaps = ((block, _overlap(offsets, block, part)) for offsets, block in blocks)
        targets = [(block[both[0]], both[1]) for block, both in overlaps if both is not None]
        values = self.whole
        if values is None:
            values = next((target for target, _ in targets if self._fits(target, part)), None)
            if values is None:
                if len(self._scratch) < part.sizes[0]:
                    self._scratch = torch.empty(part.sizes, dtype=self._dtype)
                values = self._scratch[: part.sizes[0]]
            self._take(values.view(torch.uint8).numpy())
            if _end(part) == _end(self._chunk):
                self._take(bytearray(self._chunk.length - self._at))
                self._check()
        elif part.sizes:
            values = values[part.offsets[0] - self._chunk.offsets[0] :][: part.sizes[0]]
        for target, there in targets:
            if target is not values:
                target.copy_(values[there])

    def _fits(self, target: Tensor, part: Chunk) -> bool:
        """Return whether the part's bytes can be read directly into the tensor's memory."""
        alike = target.dtype == self._dtype and target.shape == part.sizes
        return alike and target.device.type == "cpu" and target.is_contiguous()

    def _take(self, buffer: Any) -> None:
        """Fill a buffer with the next bytes and update the checksum while they are in the CPU's
        cache."""
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), _READ):
            part = view[start : start + _READ]
            if self._read_into(self._chunk.begin + self._at, part) < len(part):
                raise Damage.SHORT()
            self._hasher.update(part)
            self._at += len(part)

    def _check(self) -> None:
        """Raise ValueError if the bytes read differ from those written."""
        chunk, sums = self._chunk, self._header.checksums
        if sums is not None:
            check_chunk(sums, self._file, chunk.begin, chunk.length, self._hasher.digest())

    def _begin_of_values(self) -> int | None:
        """Return the offset at which the contiguous values begin; None for an unexpected format."""
        chunk, dtype = self._chunk, self._dtype
        try:
            tensor, begin = describe_record(self)
        except OSError:
            raise
        except Exception:  # damaged, as the checksum will show
            return None
        size = prod(chunk.sizes) * dtype.itemsize
        plain = tensor.is_contiguous() and not tensor.storage_offset() and tensor.dtype == dtype
        fits = tensor.shape == chunk.sizes and begin + size <= chunk.length
        return begin if plain and fits else None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._chunk.length)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(0, self._chunk.length - self._at))
        count = self._read_into(self._chunk.begin + self._at, memoryview(buffer)[:size])
        self._at += count
        return count


# --- outside of training: in one process ----------------------------------------------------------


class ShardReader:
    """Reads the tensors of an intact checkpoint in one process, checking them."""

    def __init__(self, header: CheckpointHeader) -> None:
        self.header, self.folder = header, header.folder

    @classmethod
    def open(cls, key: str, location: str, *, ema: bool = False) -> ShardReader:
        """Open a checkpoint, or a run's newest one. ema: the averages replace the weights. Raises
        ValueError, naming `key`, if there is none; DamagedCheckpoint, UnsafeCheckpoint."""
        header = open_header(resolve(key, location))
        if not ema:
            return cls(header)
        averages = {
            MODEL + name.removeprefix(OPTIMIZER).removesuffix(".ema"): tensor
            for name, tensor in header.tensors.items()
            if name.startswith(OPTIMIZER) and name.endswith(".ema")
        }
        if not averages:
            reason = "has no average of the weights, which ema.decay=0.999 trains with"
            raise ValueError(f"--ema: {header.folder} {reason}; write it without")
        return cls(replace(header, tensors=header.tensors | averages))

    def entries(self, prefix: str) -> dict[str, SavedTensor]:
        """Return the tensors whose names begin with a prefix, with that removed."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.header.tensors.items()
            if name.startswith(prefix)
        }

    def whole(self, name: str) -> Tensor:
        """Read a full tensor."""
        saved = self.header.tensors[name]
        tensor = torch.empty(saved.shape, dtype=dtype_of(saved))
        read(self.header, {name: tensor}, None)
        return tensor

    def rows(self, name: str, most_bytes: int = MOST_BYTES) -> Iterator[Tensor]:
        """Yield a tensor's rows (first dimension), in blocks of up to `most_bytes`."""
        saved = self.header.tensors[name]
        if saved.bytes <= most_bytes:
            if saved.numel:
                yield self.whole(name)
            return
        size, dtype = saved.shape, dtype_of(saved)
        whole = Chunk((0,) * len(size), size)
        step = max(1, most_bytes // _row_bytes(whole, dtype))
        slabs: _Blocks = []  # the block that is being filled
        chunks = [
            (c, self._chunk_rows(saved, c, step, slabs)) for c in saved.chunks if prod(c.sizes)
        ]
        for place in _cut(whole, step):
            slab = torch.empty(place.sizes, dtype=dtype)
            slabs[:], values = [(place.offsets, slab)], 0
            for chunk, reads in chunks:
                if (common := _overlap(place.offsets, slab, chunk)) is not None:
                    next(reads)
                    values += slab[common[0]].numel()
            if values != slab.numel():
                facts = {"here": values, "all": slab.numel(), "what": f"rows of {name}"}
                raise _damaged(self.header, Damage.VALUES, **facts)
            yield slab

    def _chunk_rows(
        self, saved: SavedTensor, chunk: Chunk, step: int, slabs: _Blocks
    ) -> Iterator[None]:
        """Read a chunk into the current `slabs`, yielding at each `step` rows of the tensor."""
        dtype, file = dtype_of(saved), _file(self.header, saved.name, chunk)
        with reading(self.folder, file), self.folder.reader(file) as read_into:
            record = _Record(self.header, file, chunk, dtype, read_into, in_parts=True)
            for part in _cut(chunk, step):
                record.fill(part, slabs)
                yield


def dtype_of(tensor: SavedTensor) -> torch.dtype:
    return getattr(torch, tensor.dtype)


# --- its model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model with all arguments of its constructor."""

    model: Custom
    config: Config
    step: int


def saved_model(folder: Storage, root: str, consent: Consent, builds: bool = True) -> SavedModel:
    """Return a checkpoint's model. builds: whether it is going to be built.

    root: the folder that the user named. Raises ValueError if opening files outside of it or
    importing code is not allowed, or if the checkpoint does not name its model; DamagedCheckpoint.
    """
    state = read_state(folder)
    plain: dict[str, Any] = state.get("config", {})
    if not plain:
        raise ValueError(
            f"{folder} does not say which model it has: it was restored from a file of another "
            "program; train a step from it first (checkpoint.start_from)"
        )
    config, _ = parse(plain)  # keys removed since then do not affect the model
    if "model" in state:
        args = {k: value for k, value in state["model"].items() if k not in ("name", "tp_plan")}
        config = replace(
            config, model=replace(config.model, name=state["model"]["name"], args=args)
        )
    config = consent.with_places(config)
    named = named_outside(config, root, ("model", "tokenizer"))
    if not builds:
        named.pop("model.name", None)
    consent.check(folder, named)
    model = Custom(config.model.name, config.model.args)
    if "model" in state or (model.name not in MODELS and not builds):
        return SavedModel(model, config, state["step"])
    try:  # saved by an earlier version
        return SavedModel(resolve_model(config), config, state["step"])
    except ConfigError as error:
        raise ValueError(f"{folder}: its model is not known: {error}") from None


def add_evaluation(checkpoint: Storage, result: dict[str, Any]) -> str:
    """Append a result to the JSON list of a checkpoint's evaluations; return its path."""
    folder, name = checkpoint.parent, f"{checkpoint.name}.evaluations.json"
    results: Any = []
    if folder.exists(name):
        with contextlib.suppress(ValueError):
            results = json.loads(folder.read(name))
    results = results if isinstance(results, list) else []
    text = json.dumps([*results, {"time": time.time(), **result}], indent=1)
    folder.write(name, text.encode() + b"\n")
    return f"{folder}/{name}"
