"""A KV cache: keys and values of previous tokens, so that generating a token takes a forward of one
token.

A model takes a cache as an argument of its forward; None, as in training, means no cache. It asks
the cache for positions and mask, and each attention layer passes its keys and values and receives
all of them so far.

Shapes: B sequences, T tokens of this forward, S tokens including previous ones, K key/value heads,
E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KeyValueCache:
    """A cache for sequences that end together: shorter ones are padded on the left."""

    def __init__(self, padding: Tensor, size: int) -> None:
        """padding: number of padding tokens on the left of each sequence, integers [B]; size: the
        maximal number of tokens, padding included."""
        self._padding, self._size = padding, size
        self._start = self._stop = 0  # of this forward's tokens
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # [B, K, size, E] each

    def inputs(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (positions [B, T], mask bool [B, 1, T, S]) for the next tokens ids [B, T]."""
        self._start, self._stop = self._stop, self._stop + ids.size(1)
        assert self._stop <= self._size
        token = torch.arange(self._stop, device=ids.device)  # [S]
        queries, padding = token[self._start :], self._padding[:, None]
        positions = (queries - padding).clamp(min=0)
        causal = token <= queries[:, None]  # [T, S]
        # padding attends to itself: a query without any key would give NaN
        real = (token >= padding)[:, None] | (token == queries[:, None])  # [B, T, S]
        return positions, (causal & real)[:, None]

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values [B, K, T, E]; return all so far [B, K, S, E]."""
        if layer not in self._layers:
            shape = (*k.shape[:2], self._size, k.size(-1))
            self._layers[layer] = k.new_zeros(shape), v.new_zeros((*shape[:3], v.size(-1)))
        buffers = self._layers[layer]
        for all_tokens, new in zip(buffers, (k, v), strict=True):
            all_tokens[:, :, self._start : self._stop] = new
        return buffers[0][:, :, : self._stop], buffers[1][:, :, : self._stop]
