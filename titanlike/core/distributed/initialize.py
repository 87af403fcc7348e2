"""Initial weights, the same whatever the layout and the device.

With a model's method `initial(name) -> (mean, std)` no rank needs all weights: they depend on
(seed, name) alone. A parameter is cut along its first dimension, which FSDP shards, into pieces of
a fixed size; each has its own random generator, seeded with (seed, name, piece). So a rank draws
only the pieces that overlap its shard. Any other model starts as its constructor leaves it, with
torch's generator at the run's seed; each rank copies its shards of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from titanlike.core.distributed.placement import Part, Slices, pieces
from titanlike.core.launch.environment import available_cores
from titanlike.core.metrics import units
from titanlike.core.torch_private.dtensor import local

_PIECE = 2**18  # numbers in a piece: few compared with a shard, but worth seeding a generator

_MOST_THREADS = 32
PROGRESS = 10.0  # seconds between lines of progress


def piece_seed(seed: int, name: str, piece: int) -> int:
    """A 63-bit seed that differs for every (seed, name, piece)."""
    digest = hashlib.blake2b(f"{seed}/{name}/{piece}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw(
    shape: torch.Size, rows: slice, seed: int, name: str, mean: float, std: float, threads: int = 1
) -> Tensor:
    """Rows `rows` of the fp32 tensor `name` of the given shape: normal(mean, std), on the CPU.

    threads: each draws a piece at a time. Peak memory is the result and two pieces (1 MiB each, or
    a row): those in which the shard begins and ends.
    """
    if not shape:  # a scalar
        return draw(torch.Size([1]), slice(0, 1), seed, name, mean, std)[0]
    out = torch.empty(rows.stop - rows.start, *shape[1:])
    if std == 0 or out.numel() == 0:
        return out.fill_(mean)
    step = max(1, _PIECE // out[0].numel())

    def fill(piece: int) -> None:
        start, stop = piece * step, min((piece + 1) * step, shape[0])
        generator = torch.Generator().manual_seed(piece_seed(seed, name, piece))
        low, high = max(start, rows.start), min(stop, rows.stop)
        here = out[low - rows.start : high - rows.start]
        if (low, high) == (start, stop):
            here.normal_(mean, std, generator=generator)
        else:  # a shard begins or ends in it
            part = torch.empty(stop - start, *shape[1:]).normal_(mean, std, generator=generator)
            here.copy_(part[low - start : high - start])

    # each piece is drawn by one thread, so the values do not depend on the number of threads
    pieces = range(rows.start // step, -(-rows.stop // step))
    if threads == 1 or len(pieces) == 1:
        for piece in pieces:
            fill(piece)
        return out
    with ThreadPoolExecutor(min(threads, len(pieces)), "weights") as pool:
        for _ in pool.map(fill, pieces):
            pass
    return out


def drawing_threads() -> int:
    """This rank's share of the machine's cores. Not torch's own number: torchrun sets that to 1."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(1, available_cores() // ranks), _MOST_THREADS)


class InitialWeights(Protocol):
    """The values of parameters and buffers before the first step."""

    origin: str  # for the opening table

    def block(self, name: str, shape: torch.Size, place: Slices) -> Tensor:
        """Return a block of a parameter, fp32 on the CPU; `name` and `shape` are those of the full
        parameter, `place` selects the block by a slice for each dimension."""

    def buffer(self, name: str) -> Tensor:
        """A buffer, on the CPU."""


@dataclass(frozen=True)
class SeededWeights:
    """Weights drawn from (seed, name) alone."""

    origin = "initialized from seed and parameter name"
    initial: Callable[[str], tuple[float, float]]  # the model's: name -> (mean, std)
    seed: int
    buffers: dict[str, Tensor]

    def block(self, name: str, shape: torch.Size, place: Slices) -> Tensor:
        rows, *others = place or (slice(0, 1),)
        drawn = draw(shape, rows, self.seed, name, *self.initial(name), drawing_threads())
        return drawn[:, *others] if others else drawn

    def buffer(self, name: str) -> Tensor:
        return self.buffers[name]


class ConstructedWeights:
    """Weights as the model's constructor leaves them; holds the whole model in memory."""

    origin = "the constructor's (each rank builds the whole model once)"

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = dict(model.named_buffers(remove_duplicate=False))

    def block(self, name: str, shape: torch.Size, place: Slices) -> Tensor:
        return self._parameters[name].detach()[place]

    def buffer(self, name: str) -> Tensor:
        return self._buffers[name]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which torch's, numpy's and Python's generators are seeded; their states are
    restored afterwards."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


@contextlib.contextmanager
def parameters_on_meta(
    keep: Callable[[nn.Module, str], bool] = lambda module, name: False,
) -> Iterator[None]:
    """A context in which new modules have parameters on meta, but real buffers.

    keep: (module, name of its parameter) -> whether to make this parameter real, too.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and not keep(module, name):
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield


@torch.no_grad()
def initialize(
    stage: nn.Module,
    weights: InitialWeights,
    device: torch.device,
    names: Mapping[str, str] | None = None,
    say: Callable[[str], object] = lambda _: None,
    parts: Mapping[str, Part | None] | None = None,
) -> None:
    """Allocate a meta stage on `device` and fill its parameters and buffers.

    names: parameter of the stage -> its name in the full model, where that differs; say: called
    with a line every `PROGRESS` seconds, by another thread; parts: by name in the full model, which
    part of a parameter this rank holds.
    """
    names, parts = names or {}, parts or {}
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            shared.setdefault(id(parameter), []).append((module, name))
    stage.to_empty(device=device)
    for (first, name), *others in shared.values():  # to_empty makes two tensors of a tied one
        for module, other in others:
            module.register_parameter(other, first._parameters[name])
    total = sum(local(parameter).numel() for parameter in stage.parameters())
    begin, done, ended = time.monotonic(), 0, threading.Event()

    def report() -> None:
        while not ended.wait(PROGRESS):
            share, seconds = done / max(1, total), time.monotonic() - begin
            say(f"weights: {share:.0%} of {units.count(total)} after {seconds:.0f} s")

    thread = threading.Thread(target=report, daemon=True, name="progress")
    thread.start()
    try:
        for name, parameter in stage.named_parameters():
            whole_name = names.get(name, name)
            part = parts.get(whole_name)
            shape = parameter.shape if part is None else part.shape
            for here, place in pieces(parameter, part):
                local(parameter)[here].copy_(weights.block(whole_name, shape, place))
            done += local(parameter).numel()
    finally:
        ended.set()
        thread.join()
    for name, buffer in stage.named_buffers():
        buffer.copy_(weights.buffer(name))
