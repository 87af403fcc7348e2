"""Attention within packed documents, by kernels that take document offsets or a block mask. Shapes
as in `attention.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlike.core.models.documents import TILE, Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def takes_offsets(q: Tensor, v: Tensor) -> bool:
    """Return whether varlen attention (FlashAttention 2) supports these queries and values."""
    width = q.size(-1)
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or width != v.size(-1):
        return False
    ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return ampere and width % 8 == 0 and width <= 256


def by_offsets(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None
) -> Tensor:
    """Compute attention within documents, [B, H, T, E], if `takes_offsets`."""
    from torch.nn.attention.varlen import varlen_attn  # late: it imports torch's compiler

    # [B * T, H or K, E]
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    offsets, longest = documents.spans[0], documents.spans.size(0)
    left = -1 if documents.window is None else documents.window - 1
    options: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
    if q.size(1) != k.size(1) and "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
        options["enable_gqa"] = True  # torch 2.11 has no such argument, and accepts K < H anyway
    # only flash: cuDNN, which torch 2.15 prefers here, plans again for each number of documents
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        result: Any = varlen_attn(
            queries, keys, values, offsets, offsets, longest, longest, **options
        )
    return result.unflatten(0, (q.size(0), -1)).transpose(1, 2)  # [B, H, T, E]


def takes_blocks(q: Tensor, v: Tensor) -> bool:
    """Return whether flex attention's kernels support these queries and values."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    return q.is_cuda and q.dtype in dtypes and q.size(-1) >= 16 and v.size(-1) >= 16


def by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention within documents, [B, H, T, E], if `takes_blocks`."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention  # late, as varlen_attn

    batch, tokens, window = q.size(0), q.size(2), documents.window
    options: dict[str, Any] = {"scale": scale, "enable_gqa": q.size(1) != k.size(1)}
    if sinks is not None:
        options["return_aux"] = AuxRequest(lse=True)

    def with_sinks(result: Any) -> Tensor:
        """Scale a result by the keys' share of the softmax, from its log-sum-exp [B, H, T]."""
        if sinks is None:
            return result
        y, sums = result[0], result[1].lse
        return y * (sums - sinks.float()[:, None]).sigmoid().to(y.dtype).unsqueeze(-1)

    if torch.compiler.is_compiling():
        blocks = document_blocks(documents, batch, tokens)
        return with_sinks(flex_attention(q, k, v, block_mask=blocks, **options))
    # A graph takes 10 s and more to compile: it is one, however many sequences there are, with
    # gradients and without
    evaluates = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    if evaluates:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    parts = [
        part.split(1) for part in (q, k, v, *_blocks(documents.spans[0], batch, tokens, window))
    ]
    results = []
    with torch.set_grad_enabled(evaluates or torch.is_grad_enabled()):
        for query, key, value, *lists in zip(*parts, strict=True):
            mask = _block_mask(lists, tokens, window)
            result = _compiled(flex_attention)(query, key, value, block_mask=mask, **options)
            results.append(with_sinks(result))
            if evaluates:
                results[-1] = results[-1].detach()
    return torch.cat(results)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Flex attention writes all scores to memory unless it is compiled."""
    return torch.compile(function)


def document_mask(
    documents: Documents, batch: int, tokens: int, queries: Tensor | None = None
) -> Tensor:
    """Return the mask, bool [B, 1, T, T] (query, key; True = attends). queries: positions [t] of
    some tokens, to return their rows only."""
    numbers = _numbers(documents.spans[0], batch, tokens)
    keys = torch.arange(tokens, device=numbers.device)
    rows, q_numbers = keys, numbers
    if queries is not None:
        rows, q_numbers = queries, numbers.index_select(1, queries)
    allowed = (rows[:, None] >= keys) & (q_numbers[:, None, :, None] == numbers[:, None, None, :])
    if documents.window is not None:
        allowed = allowed & (rows[:, None] - keys < documents.window)
    return allowed


def document_blocks(documents: Documents, batch: int, tokens: int) -> BlockMask:
    """Return the block mask for flex attention without a tensor of T * T values (which
    `create_block_mask` makes unless compiled): documents are contiguous, so the first and last
    token of a block suffice."""
    window = documents.window
    return _block_mask(_blocks(documents.spans[0], batch, tokens, window), tokens, window)


def _block_mask(lists: list[Tensor], tokens: int, window: int | None) -> BlockMask:
    """lists: results of `_blocks`."""
    from torch.nn.attention.flex_attention import BlockMask  # late: it imports torch's compiler

    numbers, *rest = lists

    def attends(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (query >= key) & (numbers[b, query] == numbers[b, key])
        return allowed if window is None else allowed & (query - key < window)

    make: Any = BlockMask  # mypy does not know how many lists there are
    return make((tokens, tokens), *rest, BLOCK_SIZE=(TILE, TILE), mask_mod=attends)


@torch.library.custom_op("titanlike::document_blocks", mutates_args=())
def _blocks(offsets: Tensor, batch: int, tokens: int, window: int | None) -> list[Tensor]:
    """The number of each token's document, then the eight lists of a `BlockMask`.

    An operator, since flex attention reads the lists as rows one after the other, and inductor,
    where it can look into what makes them, transposes them or gives their dimension of size 1 any
    stride: in a compiled block without gradients, or a recomputed one, an illegal memory access or
    wrong gradients (torch 2.11 to 2.15).
    """
    from torch.nn.attention.flex_attention import BlockMask  # late, as above

    numbers = _numbers(offsets, batch, tokens)
    blocks = -(-tokens // TILE)
    beyond = batch * tokens + 1  # so that no block with tokens beyond T is full
    padded = F.pad(numbers, (0, blocks * TILE - tokens), value=beyond).unflatten(1, (blocks, -1))
    first, last = padded[..., 0], padded[..., -1]  # [B, blocks]
    last_token = padded.where(padded < beyond, 0).amax(-1)
    index = torch.arange(blocks, device=numbers.device)
    apart = index[:, None] - index  # [blocks, blocks], of query and key
    some = (apart >= 0) & (last_token[:, None, :] >= first[:, :, None])
    full = (apart > 0) & (first[:, None, :] == last[:, :, None])
    if window is not None:
        some = some & ((apart - 1) * TILE + 1 < window)
        full = full & ((apart + 1) * TILE - 1 < window)
    lists: list[Tensor] = []  # for each block of queries: number of key blocks, their indices
    for which in (some & ~full, full):
        dense = which[:, None].int()  # [B, 1, blocks, blocks]
        order = dense.argsort(dim=-1, descending=True, stable=True)
        lists += [dense.sum(-1, dtype=torch.int32), order.int()]
    mask: Any = BlockMask.from_kv_blocks(lists[0], lists[1], lists[2], lists[3], BLOCK_SIZE=TILE)
    key_lists = mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices
    return [numbers, *lists, *(part.contiguous() for part in key_lists)]


@_blocks.register_fake
def _(offsets: Tensor, batch: int, tokens: int, window: int | None) -> list[Tensor]:
    blocks = -(-tokens // TILE)
    shapes = (batch, 1, blocks), (batch, 1, blocks, blocks)
    numbers = offsets.new_empty(batch, tokens, dtype=torch.int64)
    return [numbers, *(offsets.new_empty(shape) for shape in shapes * 4)]


def _numbers(offsets: Tensor, batch: int, tokens: int) -> Tensor:
    """Return the number of each token's document, from 1, int64 [B, T]."""
    positions = torch.arange(batch * tokens, device=offsets.device, dtype=torch.int32)
    return torch.searchsorted(offsets, positions, right=True).view(batch, tokens)
