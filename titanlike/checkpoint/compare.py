"""Whether two checkpoints hold the same: names, shapes, dtypes, values. One tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlike.checkpoint import store
from titanlike.checkpoint.contents import MODEL, RNG
from titanlike.checkpoint.find import named
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.whole import check_all
from titanlike.metrics.console import Console

_PIECE = 2**22  # numbers that are compared at a time
_MOST = 20  # names in a list, unless all are asked for


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is whole, to read from."""

    folder: Storage
    metadata: Metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        found = self.metadata.state_dict_metadata.items()
        return {name: one for name, one in found if isinstance(one, TensorStorageMetadata)}

    def read(self, name: str) -> Tensor:
        entry = self.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        store.read(self.folder, self.metadata, {name: tensor}, None)
        return tensor


def opened(key: str, location: str) -> Opened:
    """Reads all files against their checksums first. Raises ValueError, Damaged, Refused."""
    folder = named(key, location)
    check_all(folder)
    return Opened(folder, store.metadata_of(folder))


def compare(
    console: Console, location_a: str, location_b: str, tolerance: float, *, all_names: bool
) -> bool:
    """Say what differs; whether nothing does.

    The states of random generators are per rank: they are compared if as many ranks saved both.
    """
    if not tolerance >= 0:
        raise ValueError(f"--tolerance {tolerance}: write a number of at least 0")
    a, b = opened("A", location_a), opened("B", location_b)
    names_a, names_b = set(a.tensors), set(b.tensors)
    generators = {name for name in names_a | names_b if name.startswith(RNG)}
    ranks = [
        sum(one.endswith(".cpu") for one in generators & names) for names in (names_a, names_b)
    ]
    if apart := generators & (names_a ^ names_b):
        names_a, names_b = names_a - generators, names_b - generators
    most = len(names_a | names_b) if all_names else _MOST
    _only(console, "only in A", names_a - names_b, most)
    _only(console, "only in B", names_b - names_a, most)
    rows: list[tuple[float, list[Any]]] = []
    largest = (0.0, "")
    both = sorted(names_a & names_b)
    for name in both:
        difference, row = _difference(a, b, name)
        if difference is not None:
            largest = max(largest, (difference, name))
        if row is not None and not (row[1] == "values" and row[2] <= tolerance):
            rows.append((float("inf") if row[2] is None else row[2], row))
    if rows:
        # parameters first: the optimizer's step counts differ by more
        rows.sort(key=lambda one: (not one[1][0].startswith(MODEL), -one[0]))
        headers = ["tensor", "what differs", "by at most", "numbers"]
        console.table("", headers, [row for _, row in rows[:most]])
        if len(rows) > most:
            console.line(f"  and {len(rows) - most} more (--tensors names all)")
    if apart:
        console.line(f"random generators: not compared, of {ranks[0]} and of {ranks[1]} ranks")
    same = not rows and names_a == names_b
    within = f" (differences of at most {tolerance:g} count as none)" if tolerance else ""
    text = "the same" if same else "different"
    console.line(
        f"{text}: {len(both) - len(rows)} of {len(names_a | names_b)} tensors are equal{within}"
    )
    if largest[0] > 0:
        console.line(f"largest absolute difference: {largest[0]:.3e} in {largest[1]}")
    return same


def _difference(a: Opened, b: Opened, name: str) -> tuple[float | None, list[Any] | None]:
    """Largest absolute difference, and a row of the table where something differs."""
    of_a, of_b = a.tensors[name], b.tensors[name]
    if of_a.size != of_b.size:
        return None, [name, f"shape: {_shape(of_a)} and {_shape(of_b)}", None, None]
    largest, count = _values(a.read(name), b.read(name))
    types = [str(one.properties.dtype).removeprefix("torch.") for one in (of_a, of_b)]
    if types[0] != types[1]:
        return largest, [name, f"dtype: {types[0]} and {types[1]}", largest, count]
    return largest, [name, "values", largest, count] if count else None


def _values(a: Tensor, b: Tensor) -> tuple[float, int]:
    """Largest absolute difference, and how many numbers differ. NaN is equal to NaN alone, and
    infinitely far from any number."""
    largest, count = 0.0, 0
    for x, y in zip(a.flatten().split(_PIECE), b.flatten().split(_PIECE), strict=True):
        if x.dtype == y.dtype and torch.equal(x, y):
            continue
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        x, y = x.to(wide), y.to(wide)
        differ = (x != y) & ~(x.isnan() & y.isnan())
        if differ.any():
            count += int(differ.sum())
            apart = (x - y)[differ].abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
            largest = max(largest, apart.max().item())
    return largest, count


def _shape(entry: TensorStorageMetadata) -> str:
    return "x".join(map(str, entry.size)) or "scalar"


def _only(console: Console, what: str, names: set[str], most: int) -> None:
    for name in sorted(names)[:most]:
        console.line(f"{what}: {name}")
    if len(names) > most:
        console.line(f"{what}: {len(names) - most} more (--tensors names all)")
