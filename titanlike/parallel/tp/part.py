"""Which part of a parameter a tensor-parallel rank holds, and what FSDP's shards of it are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from titanlike.torch_private.dtensor import local_slices

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """This rank's part of a parameter.

    Along `dim` it is the whole's rows `ranges`, (start, stop) each, one after the other: several for
    packed weights such as q, k and v in one matrix.
    """

    shape: torch.Size  # of the whole parameter
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def local_shape(self) -> torch.Size:
        shape = list(self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.ranges)
        return torch.Size(shape)


def pieces(tensor: Tensor, part: Part | None) -> Iterator[tuple[Slices, Slices]]:
    """Where this rank's elements of a parameter, or of a tensor like it, are in the whole.

    tensor: a rank's part, or FSDP's DTensor of it; part: None where the rank has, or FSDP shards, the
    whole. Gives (place in the local tensor, place in the whole one), a slice a dimension each.
    """
    held = local_slices(tensor)  # of the rank's part
    lengths = [piece.stop - piece.start for piece in held]
    if part is None:
        yield tuple(slice(0, length) for length in lengths), held
        return
    places: list[list[tuple[slice, slice]]] = [
        [(slice(0, length), piece)] for length, piece in zip(lengths, held, strict=True)
    ]
    places[part.dim] = [*_ranges(held[part.dim], part.ranges)]
    for combination in product(*places):
        yield tuple(local for local, _ in combination), tuple(whole for _, whole in combination)


def places(tensor: Tensor, part: Part | None) -> list[Tensor]:
    """Of each dimension, where what this rank holds of it is in the whole: int64 vectors."""
    held = local_slices(tensor)
    ranges = [[piece] for piece in held]
    if part is not None:
        ranges[part.dim] = [whole for _, whole in _ranges(held[part.dim], part.ranges)]
    return [
        torch.cat([torch.arange(0), *(torch.arange(one.start, one.stop) for one in of_dim)])
        for of_dim in ranges
    ]


def _ranges(held: slice, ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[slice, slice]]:
    """The ranges within `held`, which counts along all of them."""
    before = 0
    for start, stop in ranges:
        low, high = max(held.start, before), min(held.stop, before + stop - start)
        if low < high:
            local = slice(low - held.start, high - held.start)
            yield local, slice(start + low - before, start + high - before)
        before += stop - start


def local_of(tensor: Tensor, part: Part | None, whole: Callable[[Slices], Tensor]) -> Tensor:
    """What this rank holds of a whole tensor, in the form of `tensor`'s local part.

    whole: gives the values at a place.
    """
    found = [(local, whole(place)) for local, place in pieces(tensor, part)]
    if len(found) == 1:
        return found[0][1]
    shape = [piece.stop - piece.start for piece in local_slices(tensor)]
    first = found[0][1] if found else torch.empty(0)
    result = first.new_empty(shape)
    for local, values in found:
        result[local] = values
    return result
