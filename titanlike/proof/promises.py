"""Promises of data, loss and model that hold in every layout, so that comparing layouts cannot test
them: targets are the next tokens, the loss is torch's cross entropy, and a document among others is
computed as if alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.core.config.groups.data import HFData, MixtureData, TextData, TokenData
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, CrossEntropy
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import IGNORE, Batch
from titanlike.core.optim.loss import logits_of

Pair = tuple[Tensor, Tensor]  # (actual, promised)


def of_data(config: Config, batch: Batch) -> dict[str, Pair]:
    if not isinstance(config.data, TextData | HFData | TokenData | MixtureData):
        return {}
    following, targets = batch["inputs"][:, 1:], batch["targets"][:, :-1]
    return {"next tokens as targets": (targets, torch.where(targets == IGNORE, IGNORE, following))}


def of_documents(batch: Batch, forward: Callable[[Batch], Tensor]) -> dict[str, Pair]:
    """forward: the model's logits [B, T, V] of inputs and other fields."""
    ids = batch.get("document_ids", torch.zeros(0, 0))
    begins = (ids[:, 1:] != ids[:, :-1]).nonzero()
    if not len(begins):
        return {}
    row, first = begins[-1].tolist()  # the document at the end of a sequence
    its = {name: value[row, first + 1 :][None] for name, value in batch.items()}
    among, alone = forward(batch)[row, first + 1 :], forward(its)[0]
    return {"logits of a document among others": (among, alone)}


def loss_in_plain_torch(config: Config, output: object, targets: Tensor) -> Tensor | None:
    """The sum over a batch; output: the model's, in training."""
    loss, rows = config.loss, targets.shape[-1]
    if not isinstance(loss, CrossEntropy | ChunkedCrossEntropy) or targets.dim() != 2:
        return None
    logits = logits_of(output).detach().double()
    further = logits.shape[1] // rows - 1 if loss.mtp_weight else 0
    groups = logits.split(rows, 1) if further else [logits]
    total = logits.new_zeros(())
    for later, group in enumerate(groups):  # token t + 1 + later, predicted from token t
        known = (group[:, : rows - later] if later else group).flatten(0, -2)
        goals = targets[:, later:].flatten()
        each = F.cross_entropy(known, goals, ignore_index=IGNORE, reduction="none")
        squares = known.logsumexp(-1).square().masked_fill(goals == IGNORE, 0)
        weight = loss.mtp_weight / further if later else 1.0
        total += weight * (each + loss.z_loss * squares).sum()
    return total
