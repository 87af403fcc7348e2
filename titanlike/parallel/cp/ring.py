"""Ring attention (arXiv 2310.01889): keys and values go from rank to rank while each attends.

Each rank has two chunks of the sequence (`tokens.py`). Of causal attention a chunk of queries sees the
chunks of keys before it as a whole, its own causally, and none behind it: so no kernel needs a mask,
and each rank computes two blocks a step, three in the first, with its own keys.

Shapes: B batch, t tokens of a rank, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.parallel.cp.tokens import ContextRanks
from titanlike.torch_private import block_attention
from titanlike.torch_private.block_attention import Block


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, ranks: ContextRanks, causal: bool, scale: float | None
) -> Tensor:
    """q [B, H, t, E], k and v [B, K, t, E] -> [B, H, t, E]. Collective over the ranks."""
    return _Ring.apply(q, k, v, ranks, causal, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranks: ContextRanks,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        ctx.ranks, ctx.causal, ctx.scale = ranks, causal, scale
        queries = q.chunk(2, _TOKENS)
        found: list[Block | None] = [None, None]
        held = torch.stack([k, v])
        for step in range(ranks.size):
            coming = _send_on(held, ranks, True) if step < ranks.size - 1 else None
            halves = [_heads(half, q.shape[1]) for half in held.chunk(2, 1 + _TOKENS)]
            for mine, theirs, same in _pairs(ranks, step, causal):
                keys, values = halves[theirs]
                block = block_attention.forward(queries[mine], keys, values, same, scale)
                found[mine] = _added(found[mine], block)
            if coming is not None:
                held = coming()
        blocks = [block for block in found if block is not None]
        result = torch.cat([block.result for block in blocks], _TOKENS).to(q.dtype)
        sums = torch.cat([block.sums for block in blocks], _TOKENS)
        ctx.save_for_backward(q, k, v, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ranks, causal, scale = ctx.ranks, ctx.causal, ctx.scale
        q, k, v, *results = ctx.saved_tensors
        queries = q.chunk(2, _TOKENS)
        gradients = gradient.chunk(2, _TOKENS)
        wholes = [Block(*parts) for parts in zip(*(x.chunk(2, 2) for x in results), strict=True)]
        of_queries = [torch.zeros_like(half, dtype=torch.float32) for half in queries]
        held = torch.stack([k, v])
        # the sum of the gradients of the ranks that have had what is held: it is sent behind that,
        # beside the next step's attention, and at last back to its rank
        following: Callable[[], Tensor] | None = None
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else _send_on(held, ranks, True)
            halves = [_heads(half, q.shape[1]) for half in held.chunk(2, 1 + _TOKENS)]
            of_held = torch.zeros_like(held, dtype=torch.float32)
            parts = of_held.chunk(2, 1 + _TOKENS)
            for mine, theirs, same in _pairs(ranks, step, causal):
                keys, values = halves[theirs]
                given = gradients[mine], queries[mine], keys, values, wholes[mine]
                of_query, *both = block_attention.backward(*given, same, scale)
                of_queries[mine] += of_query
                for total, part in zip(parts[theirs], both, strict=True):
                    total += part.float().unflatten(1, (k.shape[1], -1)).sum(2)
            if following is not None:
                of_held += following()
            following = _send_on(of_held, ranks, not last)
            if coming is not None:
                held = coming()
        assert following is not None
        of_k, of_v = following().to(k.dtype)
        return torch.cat(of_queries, _TOKENS).to(q.dtype), of_k, of_v, None, None, None


_TOKENS = 2  # the dimension of tokens


def _pairs(ranks: ContextRanks, step: int, causal: bool) -> Iterator[tuple[int, int, bool]]:
    """(which of the rank's chunks of queries, which of the chunks of keys that it holds after so many
    steps, whether they are of the same tokens) where queries see keys."""
    last = 2 * ranks.size - 1
    source = (ranks.rank - step) % ranks.size
    for mine, query in enumerate((ranks.rank, last - ranks.rank)):
        for theirs, key in enumerate((source, last - source)):
            if not causal or query >= key:
                yield mine, theirs, causal and query == key


def _heads(held: Tensor, heads: int) -> Tensor:
    """Keys and values for each query head: [2, B, K, s, E] -> [2, B, H, s, E]."""
    return held.repeat_interleave(heads // held.shape[2], dim=2).contiguous()


def _added(sum_: Block | None, block: Block) -> Block:
    """Of the same queries with the keys of both."""
    if sum_ is None:
        return Block(block.result.float(), block.sums.float())
    sums = torch.logaddexp(sum_.sums, block.sums)
    weights = [(one.sums - sums).exp().unsqueeze(-1) for one in (sum_, block)]
    return Block(sum_.result * weights[0] + block.result * weights[1], sums)


def _send_on(x: Tensor, ranks: ContextRanks, beside: bool = False) -> Callable[[], Tensor]:
    """Send to the next rank; what comes from the one before once it is called.

    beside: the rank computes before it calls that."""
    if ranks.group is None or x.is_meta:
        ranks.count(x.nbytes, beside=beside)
        return lambda: torch.empty_like(x)
    result = torch.empty_like(x)
    before, after = (
        dist.get_global_rank(ranks.group, (ranks.rank + way) % ranks.size) for way in (-1, 1)
    )
    sent = dist.P2POp(dist.isend, x, after, ranks.group)
    works = dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, result, before, ranks.group)])
    return partial(_arrived, works, x, result)


def _arrived(works: list[dist.Work], _: Tensor, result: Tensor) -> Tensor:
    """_: what is sent, which is kept until it is."""
    for work in works:
        work.wait()
    return result
