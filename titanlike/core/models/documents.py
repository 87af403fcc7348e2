"""Documents packed into sequences: attention stays within a document, and its positions begin at 0.

A mask has T * T values per sequence; document offsets, which attention kernels take, one value per
document.

Shapes: B sequences of T tokens, N documents in all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

if TYPE_CHECKING:
    from titanlike.core.models.cache import KeyValueCache

TILE = 128  # queries, and keys, per block of a kernel


class Documents(NamedTuple):
    """A token attends to itself and to previous tokens of its document.

    spans: int32 [L, N + 1], L views of one row. The row has the offset of each document's first
    token among the B * T tokens, then B * T; documents at its end may be empty. L is at least the
    length of the longest document: kernels need it on the host, where it is a shape.

    window: a token attends to so many tokens at most, itself included; None = no limit. attend: (q,
    k, v, documents, scale, dropout, sinks) computes attention where a rank has only some of the
    tokens, while spans cover all; None = this rank has all tokens.
    """

    spans: Tensor
    window: int | None = None
    attend: Callable[..., Tensor] | None = None


Mask = Tensor | Documents | None  # what `attention` takes; None = causal over the whole sequence


def attention_inputs(
    ids: Tensor,
    document_ids: Tensor | None,
    positions: Tensor | None,
    mask: Tensor | None,
    by_offsets: bool = False,
    cache: KeyValueCache | None = None,
    always: bool = False,
) -> tuple[Tensor, Mask]:
    """(positions, mask) for ids [B, T].

    document_ids: integers [B, T] that change where a document begins. positions: integers [B, T],
    or [T] for all sequences; None = 0, 1, ... in each document. mask: bool [B, T] (False =
    padding), or [B, T, T] or [B, 1, T, T] (query, key; True = attends). by_offsets: whether the
    model's attention takes `Documents`. cache: of previous tokens; it then supplies positions and
    mask. always: return `Documents` even for full sequences, on any device. The returned mask is
    `Documents` for documents on a GPU without a given mask; otherwise bool [B, 1, T, T], causal.
    None = causal over the full sequence.
    """
    if cache is not None:
        return cache.inputs(ids)
    tokens = torch.arange(ids.size(1), device=ids.device)  # [T]
    runs = None
    if document_ids is not None:
        starts = document_starts(document_ids)  # [B, T]
        if positions is None:
            positions = tokens - (starts * tokens).cummax(dim=1).values
        if mask is None and (always or by_offsets and takes_documents(ids)):
            return positions, Documents(document_spans(document_ids))
        runs = starts.cumsum(dim=1)  # 0, 1, ...: an id may occur again later
    if positions is None:
        positions = tokens
    if mask is None and runs is None:
        return positions, Documents(sequence_spans(ids)) if always else None
    allowed = (tokens[:, None] >= tokens)[None, None]  # [1, 1, T, T]
    if runs is not None:
        allowed = allowed & (runs[:, None, :, None] == runs[:, None, None, :])
    if mask is not None:
        mask = mask[:, None] if mask.dim() == 2 else mask  # [B, 1 or T, T]
        mask = mask[:, None] if mask.dim() == 3 else mask  # [B, 1, 1 or T, T]
        itself = tokens[:, None] == tokens  # a query without any key would give NaN
        allowed = (allowed & mask.bool()) | itself
    return positions, allowed


def within_window(mask: Tensor | Documents, window: int) -> Tensor | Documents:
    """Limit a mask such that a token attends to `window` tokens at most, itself included; a tensor
    mask's queries are the last tokens."""
    if isinstance(mask, Documents):
        return mask._replace(window=window)
    positions = torch.arange(mask.size(-1), device=mask.device)
    return mask & (positions[-mask.size(-2) :, None] - positions < window)


def takes_documents(ids: Tensor) -> bool:
    """Return whether the device's kernels take document offsets or blocks: a GPU's do."""
    return ids.is_cuda


def document_starts(document_ids: Tensor) -> Tensor:
    """Return bool [B, T]: where a document begins, except at a sequence's first token (False)."""
    return F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))


def document_spans(document_ids: Tensor) -> Tensor:
    """Return `Documents.spans` for document_ids, integers [B, T] that change where a document
    begins.

    N and L depend on values, which are read from the tensor's `host_copy` if it has one, so that a
    GPU is not synchronized. Both are rounded up to powers of two, so that few kernels are compiled:
    empty documents cost a GPU little as long as they are not the majority. On meta, the shape is
    that of one document per sequence.
    """
    if has_torch_function_unary(document_ids):  # recorded as one call, not by its operations
        return handle_torch_function(document_spans, (document_ids,), document_ids)
    batch, tokens = document_ids.shape
    if document_ids.is_meta:
        return sequence_spans(document_ids)
    host = host_copy(document_ids)
    count, longest = _count_and_longest(document_ids.cpu() if host is None else host)
    count, longest = _power_of_two(count), min(max(_power_of_two(longest), TILE), tokens)
    starts = document_starts(document_ids)
    starts[:, 0] = True
    number = starts.flatten().cumsum(0)  # number of each token's document: 1, 2, ...
    boundaries = torch.arange(1, count + 2, device=number.device)
    return torch.searchsorted(number, boundaries, out_int32=True).expand(longest, -1)


def sequence_spans(ids: Tensor) -> Tensor:
    """Return `Documents.spans` with each sequence of ids [B, T] as one document."""
    if has_torch_function_unary(ids):  # as above
        return handle_torch_function(sequence_spans, (ids,), ids)
    batch, tokens = ids.shape
    ends = torch.arange(batch + 1, device=ids.device, dtype=torch.int32) * tokens
    return ends.expand(tokens, -1)


def with_host_copy(tensor: Tensor, host: Tensor) -> Tensor:
    """Attach a copy on the CPU to a tensor; microbatches, as views, have it, too."""
    marked: Any = tensor
    marked.host_copy = host
    return tensor


def host_copy(tensor: Tensor) -> Tensor | None:
    """Return the values on the CPU without waiting for the device, None = there is no copy."""
    base = tensor if tensor._base is None else tensor._base
    host: Tensor | None = getattr(base, "host_copy", None)
    if host is None or host.stride() != base.stride():
        return None
    offset = tensor.storage_offset() - base.storage_offset() + host.storage_offset()
    return host.as_strided(tensor.shape, tensor.stride(), offset)


def _count_and_longest(document_ids: Tensor) -> tuple[int, int]:
    """Return the number of documents in all sequences, and the length of the longest."""
    starts = document_starts(document_ids)
    starts[:, 0] = True
    (first,) = torch.where(starts.flatten())
    end = first.new_tensor([document_ids.numel()])
    return len(first), int(first.diff(append=end).max())


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
