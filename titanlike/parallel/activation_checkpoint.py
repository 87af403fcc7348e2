"""Activation checkpointing: blocks whose activations are computed again in the backward.

A block's forward is replaced, not the block: parameters keep their names, and FSDP's hooks, which
run around the forward, gather nothing for the recomputation that is not gathered already. Dropout
draws the same masks again (torch.utils.checkpoint restores the random state).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def checkpoint_blocks(stage: nn.Module, blocks: Iterable[str], save: Sequence[str]) -> None:
    """Recompute these blocks of a stage in the backward; call it before `fully_shard`.

    save: operators whose results are kept, as in "aten.mm" or "aten._scaled_dot_product*"; all else
    is computed again.
    """
    for name in blocks:
        block = stage.get_submodule(name)
        block.forward = functools.partial(_forward, block.forward, _context(save))


def _forward(forward: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=context, **kwargs)


def _context(save: Sequence[str]) -> Any:
    if not save:
        return torch.utils.checkpoint.noop_context_fn
    kept: dict[Any, CheckpointPolicy] = {}  # by operator

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in kept:
            kept[operator] = _policy(operator, save)
        return kept[operator]

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _policy(operator: Any, save: Sequence[str]) -> CheckpointPolicy:
    name = str(getattr(operator, "overloadpacket", operator))  # "aten.mm", of all its overloads
    if any(fnmatchcase(name, pattern) for pattern in save):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
