"""The compare command: whether two checkpoints have the same tensors. One tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlike.checkpoint import state_dict
from titanlike.checkpoint.dcp_metadata import read_metadata
from titanlike.checkpoint.discovery import resolve
from titanlike.checkpoint.integrity import check_all
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import MODEL, RNG
from titanlike.metrics.console import Console

_CHUNK = 2**22  # elements that are compared at a time
_MAX_NAMES = 20  # in a list, without --tensors


@dataclass(frozen=True)
class OpenCheckpoint:
    """An intact checkpoint, to read tensors from."""

    folder: Storage
    metadata: Metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        entries = self.metadata.state_dict_metadata.items()
        return {name: one for name, one in entries if isinstance(one, TensorStorageMetadata)}

    def read(self, name: str) -> Tensor:
        entry = self.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        state_dict.read(self.folder, self.metadata, {name: tensor}, None)
        return tensor


def open_checkpoint(key: str, location: str) -> OpenCheckpoint:
    """Checks all checksums first. Raises ValueError, DamagedCheckpoint, UnsafeCheckpoint."""
    folder = resolve(key, location)
    check_all(folder)
    return OpenCheckpoint(folder, read_metadata(folder))


def compare(
    console: Console, location_a: str, location_b: str, tolerance: float, *, all_names: bool
) -> bool:
    """Print the differences; whether there are none.

    The states of random generators are per rank: compared only if as many ranks saved both.
    """
    if not tolerance >= 0:
        raise ValueError(f"--tolerance {tolerance}: write a number of at least 0")
    a, b = open_checkpoint("A", location_a), open_checkpoint("B", location_b)
    names_a, names_b = set(a.tensors), set(b.tensors)
    rng = {name for name in names_a | names_b if name.startswith(RNG)}
    ranks = [sum(one.endswith(".cpu") for one in rng & names) for names in (names_a, names_b)]
    if other_ranks := rng & (names_a ^ names_b):
        names_a, names_b = names_a - rng, names_b - rng
    limit = len(names_a | names_b) if all_names else _MAX_NAMES
    _print_names(console, "only in A", names_a - names_b, limit)
    _print_names(console, "only in B", names_b - names_a, limit)
    both = sorted(names_a & names_b)
    differences = [_difference(a, b, name) for name in both]
    found = [d for d in differences if d.reason != "values" or d.largest > tolerance]
    _print_table(console, found, limit)
    if other_ranks:
        console.line(f"random generators: not compared, of {ranks[0]} and of {ranks[1]} ranks")
    same = not found and names_a == names_b
    within = f" (differences of at most {tolerance:g} count as none)" if tolerance else ""
    count = f"{len(both) - len(found)} of {len(names_a | names_b)} tensors are equal"
    console.line(f"{'the same' if same else 'different'}: {count}{within}")
    largest = max(((d.largest, d.name) for d in differences if d.count), default=(0.0, ""))
    if largest[0] > 0:
        console.line(f"largest absolute difference: {largest[0]:.3e} in {largest[1]}")
    return same


@dataclass(frozen=True)
class _Difference:
    name: str
    reason: str  # "values", also where there is no difference; or shapes, or dtypes
    largest: float = 0.0  # absolute difference
    count: int = 0  # elements that differ


def _difference(a: OpenCheckpoint, b: OpenCheckpoint, name: str) -> _Difference:
    entries = a.tensors[name], b.tensors[name]
    shapes = ["x".join(map(str, one.size)) or "scalar" for one in entries]
    if shapes[0] != shapes[1]:
        return _Difference(name, f"shape: {shapes[0]} and {shapes[1]}", float("inf"))
    dtypes = [str(one.properties.dtype).removeprefix("torch.") for one in entries]
    reason = "values" if dtypes[0] == dtypes[1] else f"dtype: {dtypes[0]} and {dtypes[1]}"
    return _Difference(name, reason, *_compare_values(a.read(name), b.read(name)))


def _compare_values(a: Tensor, b: Tensor) -> tuple[float, int]:
    """Largest absolute difference, and how many elements differ. NaN is equal to NaN only, and
    infinitely far from any number."""
    largest, count = 0.0, 0
    for x, y in zip(a.flatten().split(_CHUNK), b.flatten().split(_CHUNK), strict=True):
        if x.dtype == y.dtype and torch.equal(x, y):
            continue
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        x, y = x.to(wide), y.to(wide)
        differ = (x != y) & ~(x.isnan() & y.isnan())
        if differ.any():
            count += int(differ.sum())
            distance = (x - y)[differ].abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
            largest = max(largest, distance.max().item())
    return largest, count


def _print_table(console: Console, found: list[_Difference], limit: int) -> None:
    if not found:
        return
    # parameters first: the optimizer's step counts differ by more
    found = sorted(found, key=lambda d: (not d.name.startswith(MODEL), -d.largest))
    rows: list[list[Any]] = []
    for d in found[:limit]:
        numbers = [None, None] if d.reason.startswith("shape") else [d.largest, d.count]
        rows.append([d.name, d.reason, *numbers])
    console.table("", ["tensor", "what differs", "by at most", "elements"], rows)
    if len(found) > limit:
        console.line(f"  and {len(found) - limit} more (--tensors names all)")


def _print_names(console: Console, title: str, names: set[str], limit: int) -> None:
    for name in sorted(names)[:limit]:
        console.line(f"{title}: {name}")
    if len(names) > limit:
        console.line(f"{title}: {len(names) - limit} more (--tensors names all)")
