"""Reads a checkpoint's tensors, into a run's or by themselves, and checks what is read.

Of a piece a rank reads the parts (rows that share a checksum, about 1 MiB) of which it needs rows,
directly into the tensor's memory where it has them in a row. A part's checksum is computed on the
way, and compared before anything else is read.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.core.checkpoint.discovery import resolve
from titanlike.core.checkpoint.format import Piece, SavedTensor
from titanlike.core.checkpoint.integrity import (
    MODEL,
    OPTIMIZER,
    CheckpointHeader,
    Damage,
    open_header,
    read_part,
    read_state,
    reading,
)
from titanlike.core.checkpoint.storage import (
    INDEX,
    MARKER,
    DamagedCheckpoint,
    Moved,
    ReadInto,
    Storage,
    UnreadableFile,
    error_line,
)
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.parse import parse
from titanlike.core.config.received import Consent, named_outside, with_kept_tokenizer
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import Blocks, blocks_of

MOST_BYTES = 2**24  # of rows in memory at a time
_AT_ONCE = 2**26  # bytes of a request to an object store
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
    for kind in (UnreadableFile, DamagedCheckpoint, Exception):
        for failure in errors:
            if isinstance(failure, kind):
                raise failure from None


def read_header_on_all_ranks(
    folder: Storage, group: dist.ProcessGroup, key: str
) -> CheckpointHeader:
    """Read and check the small files of a committed checkpoint on rank 0, and tell the others.
    Collective.

    key: the config key that chose the checkpoint. Raises on all ranks what any did: UnreadableFile,
    DamagedCheckpoint; ValueError if a rank does not see the checkpoint.
    """
    rank = dist.get_rank(group)
    found: list[Any] = [None]
    with raise_on_all_ranks(group, UnreadableFile, ValueError):
        if rank == 0:
            header = open_header(folder)
            found = [(header.state, header.index)]
        elif not folder.exists(MARKER):
            raise ValueError(
                f"rank {rank} does not see {folder}, from which rank 0 loads; "
                f"write a {key} on a file system that all machines share"
            )
    dist.broadcast_object_list(found, src=0, group=group)
    state, index = found[0]
    return CheckpointHeader(folder, state, index, index.tensors)


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
    if unread:
        others = [name for name in header.tensors if name.startswith(unread)]
        others = others[dist.get_rank(group) :: dist.get_world_size(group)]
    with raise_on_all_ranks(group, UnreadableFile, DamagedCheckpoint, text=text):
        pieces = header.pieces({*tensors, *others})
        targets = _targets(header, tensors, pieces)
        for piece in (piece for name in others for piece in pieces[name]):
            targets.setdefault(piece.file, {}).setdefault(piece, (torch.uint8, []))
        _read_files(header.folder, targets)


_Blocks = list[tuple[tuple[int, ...], Tensor]]  # offsets in the full tensor, block
_Places = dict[Piece, tuple[torch.dtype, _Blocks]]  # blocks that need some values of a piece


def _targets(
    header: CheckpointHeader,
    tensors: Mapping[str, Tensor | Blocks],
    pieces: Mapping[str, list[Piece]],
) -> dict[str, _Places]:
    """Return what is to be read, by file."""
    targets: dict[str, _Places] = {}
    for name, tensor in tensors.items():
        for offsets, block in blocks_of(tensor).items():
            values = 0
            for piece in pieces[name]:
                if (common := _overlap(offsets, block, piece)) is not None:
                    places = targets.setdefault(piece.file, {})
                    dtype = dtype_of(header.tensors[name])
                    places.setdefault(piece, (dtype, []))[1].append((offsets, block))
                    values += prod(s.stop - s.start for s in common[0])
            if values < block.numel():
                facts = {"here": values, "all": block.numel(), "what": f"a block of {name}"}
                raise DamagedCheckpoint(header.folder, INDEX, Damage.VALUES.format(**facts))
    return targets


def _overlap(at: tuple[int, ...], block: Tensor, piece: Piece) -> tuple[Slices, Slices] | None:
    """Return the intersection of a block and a saved piece, as slices of either; None if empty."""
    here, there = [], []
    for start, size, offset, saved in zip(at, block.shape, piece.offsets, piece.sizes, strict=True):
        if start >= offset + saved or offset >= start + size:
            return None
        low, high = max(start, offset), min(start + size, offset + saved)
        here.append(slice(low - start, high - start))
        there.append(slice(low - offset, high - offset))
    return tuple(here), tuple(there)


def _read_files(folder: Storage, targets: dict[str, _Places]) -> None:
    for file, places in targets.items():
        _read_file(folder, file, places)


@torch.no_grad()
def _read_file(folder: Storage, file: str, places: _Places) -> None:
    with reading(folder, file), folder.reader(file) as read_into:
        scratch = torch.empty(0, dtype=torch.uint8)
        for piece, (dtype, blocks) in sorted(places.items(), key=lambda place: place[0].begin):
            wanted: list[tuple[Piece, list[tuple[Tensor, Slices]]]] = []
            for part in piece.parts():
                both = ((block, _overlap(offsets, block, part)) for offsets, block in blocks)
                needs = [(block[two[0]], two[1]) for block, two in both if two is not None]
                if needs or not blocks:
                    wanted.append((part, needs))
            source = read_into
            if not folder.local and wanted:  # few requests
                source = _read_ahead(read_into, wanted[0][0].begin, wanted[-1][0])
            for part, needs in wanted:
                values = next((to for to, _ in needs if _fits(to, part, dtype)), None)
                if values is None:
                    if len(scratch) < part.bytes:
                        scratch = torch.empty(part.bytes, dtype=torch.uint8)
                    values = scratch[: part.bytes].view(dtype)
                    values = values.view(part.sizes) if needs else values
                data = values.view(-1).view(torch.uint8).numpy().data
                read_part(source, part, data)
                for target, there in needs:
                    if target is not values:
                        target.copy_(values[there])


def _fits(target: Tensor, part: Piece, dtype: torch.dtype) -> bool:
    """Return whether a part's bytes can be read directly into the tensor's memory."""
    alike = target.dtype == dtype and target.shape == part.sizes
    return alike and target.device.type == "cpu" and target.is_contiguous()


def _read_ahead(read_into: ReadInto, begin: int, last: Piece) -> ReadInto:
    """Read up to the end of a part; return a function that copies from there."""
    data, here = memoryview(bytearray(last.begin + last.bytes - begin)), 0
    for start in range(0, len(data), _AT_ONCE):  # each is progress for the watchdog
        here += read_into(begin + start, data[start : start + _AT_ONCE])

    def copy(start: int, buffer: Any) -> int:
        part = data[start - begin : min(start - begin + len(buffer), here)]
        buffer[: len(part)] = part
        return len(part)

    return copy


# --- outside of training: in one process ----------------------------------------------------------


class ShardReader:
    """Reads the tensors of an intact checkpoint in one process, checking them."""

    def __init__(self, header: CheckpointHeader) -> None:
        self.header, self.folder = header, header.folder
        self._pieces = header.pieces()

    @classmethod
    def open(
        cls, key: str, location: str, *, ema: bool = False, moved: Moved | None = None
    ) -> ShardReader:
        """Open a checkpoint, or a run's newest one. ema: the averages replace the weights; moved:
        see `Storage`. Raises ValueError, naming `key`, if there is none; DamagedCheckpoint."""
        header = open_header(resolve(key, location, moved))
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
        tensor = _empty(saved, saved.shape)
        self._read(name, tensor)
        return tensor

    def _read(self, name: str, tensor: Tensor | Blocks) -> None:
        _read_files(self.folder, _targets(self.header, {name: tensor}, self._pieces))

    def rows(self, name: str, most_bytes: int = MOST_BYTES) -> Iterator[Tensor]:
        """Yield a tensor's rows (first dimension), in blocks of up to `most_bytes`."""
        saved = self.header.tensors[name]
        if saved.bytes <= most_bytes:
            if saved.numel:
                yield self.whole(name)
            return
        step = max(1, most_bytes // (saved.bytes // saved.shape[0]))
        for row in range(0, saved.shape[0], step):
            sizes = (min(step, saved.shape[0] - row), *saved.shape[1:])
            rows = _empty(saved, sizes)
            place = (row, *[0] * (len(sizes) - 1))
            self._read(name, Blocks(rows, torch.Size(saved.shape), {place: rows}))
            yield rows


def _empty(tensor: SavedTensor, sizes: tuple[int, ...]) -> Tensor:
    try:
        return torch.empty(sizes, dtype=dtype_of(tensor))
    except RuntimeError as error:
        raise ValueError(f"{tensor.name}: {error_line(error)}") from None


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
    if not ("config" in state and "model" in state):
        raise ValueError(f"{folder} does not say which model it has: no run of titanlike saved it")
    config, _ = parse(state["config"])  # keys removed since then do not affect the model
    args = {k: value for k, value in state["model"].items() if k not in ("name", "tp_plan")}
    config = replace(config, model=replace(config.model, name=state["model"]["name"], args=args))
    config = consent.with_places(with_kept_tokenizer(config, root))
    named = named_outside(config, root, ("model", "tokenizer"))
    if not builds:
        named.pop("model.name", None)
    consent.check(folder, named)
    return SavedModel(Custom(config.model.name, config.model.args), config, state["step"])


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
