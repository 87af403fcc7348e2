"""Random numbers of tensor-parallel ranks: dropout masks.

All ranks of a group have the same default generator, so what they draw for activations that each has
as a whole is the same. A module that draws for the rank's part of heads, features or tokens runs in a
region: it takes one number from the default generator, as the others do, and draws with a generator
seeded with this number and its rank. So the default generators stay equal, and a block that is
recomputed, whose generator torch has set back, draws the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from titanlike.device.accelerator import kept_rng
from titanlike.distributed.initialize import piece_seed
from titanlike.parallel.tp.collectives import TensorRanks

# module -> {whether it draws for the rank's part}: both for a module that does both
Draws = Mapping[str, Set[bool]]


@dataclass
class _Region:
    parts: bool  # whether numbers differ between ranks
    seed: int  # the same on all of them
    inside: int = 0  # regions in it so far


class RandomRegions:
    """Of the modules of a rank's stages."""

    def __init__(self, ranks: TensorRanks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._running: list[_Region] = []

    def add(self, stage: nn.Module, draws: Draws, draws_whole: Draws) -> None:
        """Let modules of a stage draw in regions; call it before all else that replaces forwards.

        draws_whole: in batches whose activations are not divided along the sequence.
        """
        modes = {True: _kinds(stage, draws), False: _kinds(stage, draws_whole)}
        for name, module in stage.named_modules():
            parts = {sequence: kinds.get(name) for sequence, kinds in modes.items()}
            if any(kind is not None for kind in parts.values()):
                module.forward = partial(self._run, parts, module.forward)

    def _run(
        self,
        kinds: Mapping[bool, bool | None],
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        parts = kinds[self._ranks.sequence]
        if parts is None:
            return forward(*args, **kwargs)
        around = self._running[-1] if self._running else _Region(False, 0)
        if around.parts == parts:
            return forward(*args, **kwargs)
        if self._running:  # whose own generator goes on, and differs between ranks
            around.inside += 1
            seed = piece_seed(around.seed, "region", around.inside)
        else:  # on the CPU, where to look at it waits for no device
            seed = int(torch.randint(2**62, (), device="cpu"))
        self._running.append(_Region(parts, seed))
        try:
            with kept_rng(self._device):
                torch.manual_seed(piece_seed(seed, "rank", self._ranks.rank) if parts else seed)
                return forward(*args, **kwargs)
        finally:
            self._running.pop()


def _kinds(stage: nn.Module, draws: Draws) -> dict[str, bool]:
    """Modules that draw in a region of their own -> whether for parts."""
    divided = [name for name, parts in draws.items() if parts == {True}]
    found = dict.fromkeys(divided, True)
    for name, _ in stage.named_modules():
        within = any(name.startswith(f"{path}.") for path in divided)
        if within and draws.get(name) == {False}:
            found[name] = False
    return found


def drawing_parts(draws: Draws, block: str) -> bool:
    """Whether a block draws for the rank's part: it changes the generator, which is not compiled."""
    return any(
        True in parts and f"{name}.".startswith(f"{block}.") for name, parts in draws.items()
    )
