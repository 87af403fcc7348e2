"""The commands of tools/checkpoint.py that read tensors: consolidate and restore, a checkpoint to
one safetensors file and back; and compare, whether two checkpoints have the same tensors.

The safetensors file has the model's tensors, names without `model.`; with the optimizer also
everything else that a run needs to resume, names as in the checkpoint. Its metadata (strings):

format     pt
step       of the run
contents   model, or run: with the optimizer
xxh3       checksum of names and bytes, sorted by name
titanlike  state.json

Other safetensors files of a model can be restored, too: as step 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanlike.checkpoint.digest import digest_of, text_of
from titanlike.checkpoint.discovery import resolve
from titanlike.checkpoint.integrity import (
    MODEL,
    OPTIMIZER,
    RNG,
    check_all,
    delete_checkpoint,
    open_header,
)
from titanlike.checkpoint.reader import ShardReader
from titanlike.checkpoint.state_dict import DTYPES, cast_weights
from titanlike.checkpoint.storage import MARKER, STATE, DamagedCheckpoint, Storage
from titanlike.checkpoint.writer import prepare_save, write_checkpoint
from titanlike.config.files import parse_object, replaced
from titanlike.data.kinds import READERS
from titanlike.metrics import units
from titanlike.metrics.console import Console
from titanlike.models.safetensors_folder import write_file

_COMPARED = 2**22  # elements compared at a time
_MAX_NAMES = 20  # names in a list, without --tensors
_RUN_PREFIXES = (OPTIMIZER, RNG, READERS)


class DamagedFile(DamagedCheckpoint):
    """A safetensors file differs from what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        ValueError.__init__(self, f"{path} is damaged: {reason}")


def consolidate(location: str, file: str, *, dtype: str | None, with_optimizer: bool) -> str:
    """Write `file` atomically; return a summary. All tensors are in memory at once.

    Raises ValueError if data would be lost silently, DamagedCheckpoint, OSError.
    """
    path = _local(file)
    if path.exists():
        raise ValueError(f"{path} exists already; write another name, or remove it first")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if dtype and with_optimizer:
        raise ValueError(
            "--dtype with --optimizer: a resumed run needs its exact weights; write one of the two"
        )
    source = _open("CHECKPOINT", location)
    if with_optimizer and not source.entries(OPTIMIZER):
        raise ValueError(f"--optimizer: {source.folder} has the model alone; write it without")
    tensors = {}
    for name in source.header.tensors:
        if not name.startswith(MODEL):
            if with_optimizer:
                tensors[name] = source.whole(name)
            continue
        short = name.removeprefix(MODEL)
        if short.startswith(_RUN_PREFIXES):
            raise ValueError(f"a parameter is named {short}, a prefix reserved for the run's state")
        tensor = source.whole(name)
        tensors[short] = cast_weights(tensor, DTYPES[dtype], name) if dtype else tensor
    state = source.header.state
    about = {"format": "pt", "step": str(state["step"]), "titanlike": json.dumps(state)}
    about |= {"contents": "run" if with_optimizer else "model", "xxh3": _checksum(tensors)}
    with replaced(path) as temporary:
        write_file(tensors, temporary, about)
    Storage(path.parent).sync()
    return f"{path}: {_summary(tensors)} of {source.folder}"


def restore(file: str, folder: str) -> str:
    """Make a checkpoint in `folder` from a safetensors file; return a summary.

    Raises ValueError if the file is missing or the checkpoint exists already; DamagedFile.
    """
    path, parent = _local(file), Storage(folder)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as source:
            about = source.metadata() or {}
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedFile(path, f"not a complete safetensors file: {error}") from None
    if not tensors:
        raise ValueError(f"{path} has no tensors")
    if "xxh3" in about and about["xxh3"] != _checksum(tensors):
        raise DamagedFile(path, "its tensors do not match its checksum")
    prefixes = _RUN_PREFIXES if about.get("contents") == "run" else ()
    named = {
        name if name.startswith(prefixes) else MODEL + name: tensor
        for name, tensor in tensors.items()
    }
    # a file of another program counts as step 0
    state = {"step": 0, "progress": {}, "val_loss": None, "same": {}, "sequences": None}
    try:
        state |= parse_object(about.get("titanlike", "{}")) | {"torch": torch.__version__}
    except ValueError as error:
        raise DamagedFile(path, f"its state {error}") from None
    if type(state["step"]) is not int:
        raise DamagedFile(path, f"its state has {repr(state['step'])[:40]} as step")
    target = parent.at(f"{'step' if prefixes else 'model'}-{state['step']:08d}")
    if target.names():
        raise ValueError(f"{target} exists already; write another FOLDER, or remove it first")
    parent.make()
    try:
        write_checkpoint(target, state, prepare_save(named, None, None), None)
    except OSError as error:
        raise OSError(f"{target} could not be written: {error}") from error
    finally:
        if not target.exists(MARKER):
            delete_checkpoint(target)
    key = "checkpoint.resume" if prefixes else "checkpoint.start_from"
    return f"{target}: {_summary(tensors)}; train with {key}={target}"


def _checksum(tensors: dict[str, Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _local(file: str) -> Path:
    if "://" in file:
        raise ValueError(f"{file}: a safetensors file is a local path; copy it there afterwards")
    return Path(file).expanduser().absolute()


def _summary(tensors: dict[str, Tensor]) -> str:
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}))
    size = units.size(sum(t.nbytes for t in tensors.values()))
    return f"{len(tensors)} tensors ({dtypes}, {size})"


def _open(key: str, location: str) -> ShardReader:
    """Open a checkpoint after checking all checksums. Raises ValueError, DamagedCheckpoint,
    UnsafeCheckpoint."""
    folder = resolve(key, location)
    check_all(folder)
    return ShardReader(open_header(folder))


# --- compare --------------------------------------------------------------------------------------


def compare(
    console: Console, location_a: str, location_b: str, tolerance: float, *, all_names: bool
) -> bool:
    """Print the differences between two checkpoints; return whether there are none.

    States of random generators are per rank, and compared only if both have the same number of
    ranks.
    """
    if not tolerance >= 0:
        raise ValueError(f"--tolerance {tolerance}: write a number of at least 0")
    a, b = _open("A", location_a), _open("B", location_b)
    names_a, names_b = a.header.tensors.keys(), b.header.tensors.keys()
    rng = {name for name in names_a | names_b if name.startswith((RNG, READERS))}
    ranks = [sum(name.endswith(".cpu") for name in rng & names) for names in (names_a, names_b)]
    if other_ranks := rng & (names_a ^ names_b):
        names_a, names_b = names_a - rng, names_b - rng
    limit = len(names_a | names_b) if all_names else _MAX_NAMES
    for title, names in ("only in A", names_a - names_b), ("only in B", names_b - names_a):
        for name in sorted(names)[:limit]:
            console.line(f"{title}: {name}")
        if len(names) > limit:
            console.line(f"{title}: {len(names) - limit} more (--tensors names all)")
    both = sorted(names_a & names_b)
    differences = [_difference(a, b, name) for name in both]
    differing = [d for d in differences if d.reason != "values" or d.largest > tolerance]
    # parameters first: the optimizer's step counts differ by more
    differing.sort(key=lambda d: (not d.name.startswith(MODEL), -d.largest))
    rows: list[list[Any]] = []
    for d in differing[:limit]:
        numbers = [None, None] if d.reason.startswith("shape") else [d.largest, d.count]
        rows.append([d.name, d.reason, *numbers])
    if rows:
        console.table("", ["tensor", "what differs", "by at most", "elements"], rows)
    if len(differing) > limit:
        console.line(f"  and {len(differing) - limit} more (--tensors names all)")
    if other_ranks:
        console.line(f"random generators: not compared, of {ranks[0]} and of {ranks[1]} ranks")
    same = not differing and names_a == names_b
    within = f" (differences of at most {tolerance:g} count as none)" if tolerance else ""
    count = f"{len(both) - len(differing)} of {len(names_a | names_b)} tensors are equal"
    console.line(f"{'the same' if same else 'different'}: {count}{within}")
    largest = max(((d.largest, d.name) for d in differences if d.count), default=(0.0, ""))
    if largest[0] > 0:
        console.line(f"largest absolute difference: {largest[0]:.3e} in {largest[1]}")
    return same


def compare_digests(console: Console, location_a: str, location_b: str) -> bool:
    """Print the digests of two checkpoints, random generators excluded; return whether they are
    equal.

    A digest is computed from the files. Raises DamagedCheckpoint if it differs from the digest that
    the run recorded.
    """
    digests, steps = [], []
    for key, location in ("A", location_a), ("B", location_b):
        reader = _open(key, location)
        steps.append(reader.header.state.get("step"))
        total = torch.zeros((), dtype=torch.int64)
        for name, saved in reader.header.tensors.items():
            row, shape = 0, torch.Size(saved.shape)
            if name.startswith((RNG, READERS)):
                continue
            for rows in reader.rows(name):
                total += digest_of(name, rows, shape, (row, *[0] * (len(shape) - 1))[: len(shape)])
                row += len(rows) if shape else 0
        computed, recorded = text_of(total), reader.header.state.get("digest")
        if recorded not in (None, computed):
            reason = f"has the digest {recorded}, and the tensors in the files have {computed}"
            raise DamagedCheckpoint(reader.folder, STATE, reason)
        digests.append(computed)
        console.line(f"{key}: {computed} {reader.folder}")
    same = digests[0] == digests[1]
    verdict = "the same" if same else "different: `compare A B` says which tensors"
    if not same and steps[0] != steps[1]:
        verdict = f"different, as they are of steps {steps[0]} and {steps[1]}"
    console.line(verdict)
    return same


@dataclass(frozen=True)
class _Difference:
    name: str
    reason: str  # "values" (also without a difference), or which shapes or dtypes differ
    largest: float = 0.0  # absolute difference
    count: int = 0  # elements that differ


def _difference(a: ShardReader, b: ShardReader, name: str) -> _Difference:
    """Compare a tensor of two checkpoints. NaN equals only NaN, and is infinitely far from any
    number."""
    tensors = a.header.tensors[name], b.header.tensors[name]
    shapes = ["x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors]
    if shapes[0] != shapes[1]:
        return _Difference(name, f"shape: {shapes[0]} and {shapes[1]}", float("inf"))
    dtypes = [tensor.dtype for tensor in tensors]
    reason = "values" if dtypes[0] == dtypes[1] else f"dtype: {dtypes[0]} and {dtypes[1]}"
    largest, count = 0.0, 0
    rows = [r.rows(name, _COMPARED * t.item_size) for r, t in zip((a, b), tensors, strict=True)]
    for x, y in zip(*rows, strict=True):
        if x.dtype == y.dtype and torch.equal(x, y):
            continue
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        x, y = x.to(wide), y.to(wide)
        differ = (x != y) & ~(x.isnan() & y.isnan())
        if differ.any():
            count += int(differ.sum())
            distance = (x - y)[differ].abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
            largest = max(largest, distance.max().item())
    return _Difference(name, reason, largest, count)
