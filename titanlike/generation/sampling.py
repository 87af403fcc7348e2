"""The next token of each sequence, from logits.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 = the most probable token (greedy); top_k: of so many most probable tokens, 0 = of
    all; top_p: of the most probable ones that together have this probability (arXiv 1904.09751)."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0

    def problems(self) -> list[str]:
        """key=value: reason; write ..., of each value that is out of bounds."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(
                f"temperature={self.temperature}: must be at least 0; write temperature=0.8"
            )
        if self.top_k < 0:
            found.append(f"top_k={self.top_k}: must be at least 0 (0 = all tokens); write top_k=40")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p={self.top_p}: must be above 0 and at most 1; write top_p=0.95")
        return found

    def generators(self, count: int) -> list[torch.Generator]:
        """One for each sequence: what it draws does not depend on those beside it."""
        return [torch.Generator().manual_seed((self.seed << 20) + row) for row in range(count)]


def next_tokens(logits: Tensor, sampling: Sampling, random: Sequence[torch.Generator]) -> Tensor:
    """logits [B, V] -> ids [B], on the CPU; random: a generator for each sequence."""
    if sampling.temperature == 0:
        return logits.argmax(-1).cpu()
    probabilities = _probabilities(logits.float().cpu(), sampling)
    rows = zip(probabilities, random, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=one) for row, one in rows])


def _probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    scaled = logits / sampling.temperature
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
    kept = ordered.softmax(-1)
    # a token stays where those before it have less than top_p together: the first always does
    before = kept.cumsum(-1) - kept
    kept = kept.masked_fill(before >= sampling.top_p, 0.0)
    return torch.zeros_like(kept).scatter_(-1, ids, kept)
