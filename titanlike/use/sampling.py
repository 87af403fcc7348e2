"""Choose the next token of each text from a model's logits, however they are computed.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Prompts = list[list[int]]  # ids of each
OnToken = Callable[[int, int], object]  # (prompt, id)


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 = greedy; top_k: sample from this many most probable tokens, 0 = from all;
    top_p: from the most probable tokens with this total probability (arXiv 1904.09751)."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0

    def generators(self, count: int) -> list[torch.Generator]:
        """A generator per sequence, so that draws do not depend on the other sequences."""
        return [torch.Generator().manual_seed((self.seed << 20) + row) for row in range(count)]


def next_tokens(logits: Tensor, sampling: Sampling, random: Sequence[torch.Generator]) -> Tensor:
    """Choose ids [B], on the CPU, from logits [B, V]; random: a generator per sequence."""
    if sampling.temperature == 0:
        return logits.argmax(-1).cpu()
    scaled = logits.float().cpu() / sampling.temperature
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
    shares = ordered.softmax(-1)
    # a token stays where those before it have less than top_p together: the first always does
    before = shares.cumsum(-1) - shares
    shares = shares.masked_fill(before >= sampling.top_p, 0.0)
    probabilities = torch.zeros_like(shares).scatter_(-1, ids, shares)
    rows = zip(probabilities, random, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=draw) for row, draw in rows])


def continue_texts(
    choose: Callable[[Prompts], list[int]],
    prompts: Prompts,
    tokens: int,
    ends: Collection[int | None],
    on_token: OnToken = lambda prompt, token: None,
) -> Prompts:
    """Generate up to `tokens` more ids for each prompt; a text ends before an id in `ends`.

    choose: returns the next id of every text; a text that has ended stays as it is.
    """
    texts, ended = [list(ids) for ids in prompts], [False] * len(prompts)
    for _ in range(tokens):
        for number, token in enumerate(choose(texts)):
            ended[number] = ended[number] or token in ends
            if not ended[number]:
                texts[number].append(token)
                on_token(number, token)
        if all(ended):
            break
    return [ids[len(prompt) :] for ids, prompt in zip(texts, prompts, strict=True)]
