"""Packed documents: attention stays within a document, and its positions start at 0.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanlike.models.documents import Documents, document_spans, document_starts


def attention_inputs(
    ids: Tensor,
    document_ids: Tensor | None,
    positions: Tensor | None,
    mask: Tensor | None,
    by_offsets: bool = False,
) -> tuple[Tensor, Tensor | Documents | None]:
    """(positions, mask) for ids [B, T].

    document_ids: integers [B, T] that change where a document begins.
    positions: integers [B, T], or [T] for all sequences; None = 0, 1, ... in each document.
    mask: bool [B, T] (False = padding), or [B, T, T] or [B, 1, T, T] (query, key; True = attends).
    by_offsets: whether the model's attention takes `Documents`.
    The returned mask is `Documents` for documents on a GPU, where no mask is given; otherwise bool
    [B, 1, T, T], causal. None = causal over the whole sequence.
    """
    tokens = torch.arange(ids.size(1), device=ids.device)  # [T]
    runs = None
    if document_ids is not None:
        starts = document_starts(document_ids)  # [B, T]
        if positions is None:
            positions = tokens - (starts * tokens).cummax(dim=1).values
        if mask is None and by_offsets and takes_documents(ids):
            return positions, Documents(document_spans(document_ids))
        runs = starts.cumsum(dim=1)  # 0, 1, ...: an id may occur again later
    if positions is None:
        positions = tokens
    if mask is None and runs is None:
        return positions, None
    allowed = (tokens[:, None] >= tokens)[None, None]  # [1, 1, T, T]
    if runs is not None:
        allowed = allowed & (runs[:, None, :, None] == runs[:, None, None, :])
    if mask is not None:
        mask = mask[:, None] if mask.dim() == 2 else mask  # [B, 1 or T, T]
        mask = mask[:, None] if mask.dim() == 3 else mask  # [B, 1, 1 or T, T]
        itself = tokens[:, None] == tokens  # a query without any key would give NaN
        allowed = (allowed & mask.bool()) | itself
    return positions, allowed


def takes_documents(ids: Tensor) -> bool:
    """Whether the kernels of the device take offsets or blocks of documents: those of GPUs."""
    return ids.is_cuda
