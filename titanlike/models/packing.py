"""Several documents in one sequence: attention stays within each, and its positions start at 0.

Legend of shapes: B batch, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_inputs(
    ids: Tensor, document_ids: Tensor | None, positions: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(positions, mask) of ids [B, T], from what is given beside them; the latter win.

    document_ids: integers [B, T] that change where a new document begins.
    positions: integers [B, T], or [T] for all sequences; without any, 0, 1, ... in each document.
    mask: bool [B, T] (false = padding) or [B, T, T] or [B, 1, T, T] (query, key; true = attends).
    The mask that is returned is bool [B, 1, T, T], or None: causal attention over all.
    """
    tokens = torch.arange(ids.size(1), device=ids.device)  # [T]
    runs = None
    if document_ids is not None:
        begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))  # [B, T]
        runs = begins.cumsum(dim=1)  # numbers of the documents: an id may come again
        if positions is None:
            positions = tokens - (begins * tokens).cummax(dim=1).values
    if positions is None:
        positions = tokens
    if mask is None and runs is None:
        return positions, None
    allowed = (tokens[:, None] >= tokens)[None, None]  # [1, 1, query, key]
    if runs is not None:
        allowed = allowed & (runs[:, None, :, None] == runs[:, None, None, :])
    if mask is not None:
        mask = mask[:, None] if mask.dim() == 2 else mask  # [B, 1 or query, key]
        mask = mask[:, None] if mask.dim() == 3 else mask  # [B, 1, 1 or query, key]
        itself = tokens[:, None] == tokens  # a query that sees nothing would give NaN
        allowed = (allowed & mask.bool()) | itself
    return positions, allowed
