"""Activation checkpointing: blocks whose activations are recomputed in the backward.

A block's forward is replaced, not the block: parameters keep their names, and FSDP's hooks, which
run around the forward, gather nothing again. Dropout draws the same masks again
(torch.utils.checkpoint restores the random state).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.distributed.placement import experts_of
from titanlike.core.distributed.transform import Transform
from titanlike.core.torch_private.autograd import ignore_ranges_in_selective_checkpoints
from titanlike.core.torch_private.operators import written_by
from titanlike.core.torch_private.tensors import tensors_in

# custom operators that are matmuls: of `weight_gradients.py` and `techniques/mixture/experts.py`
PRODUCTS = ("titanlike.linear_queueing", "titanlike.expert_linear")
# the routing, in layers that set `keeps_choice` (others change its results in place): recomputed, a
# tie could be decided differently, and a rank would receive more tokens than before
_CHOICE = "aten.topk"
_ROUTE = "titanlike.*route_tokens"  # the host waits for its results


class ActivationCheckpointing(Transform):
    def __init__(
        self, blocks: Sequence[Sequence[str]], save: Sequence[str], exchanged: bool
    ) -> None:
        """blocks: the recomputed ones of each stage; exchanged: see `checkpoint_blocks`."""
        self._blocks, self._save, self._exchanged = blocks, save, exchanged

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        checkpoint_blocks(stage, self._blocks[index], self._save, self._exchanged)


def keeps(operator: str, save: Sequence[str]) -> bool:
    """Whether a recomputed block saves the results of an operator, named as in "aten.mm"."""
    return any(fnmatchcase(operator, pattern) for pattern in save)


def checkpoint_blocks(
    stage: nn.Module, blocks: Iterable[str], save: Sequence[str], exchanged: bool = False
) -> None:
    """Recompute these blocks of a stage in the backward; call it before `fully_shard`.

    save: operators whose results are saved, as "aten.mm" or "aten._scaled_dot_product*"; all others
    are recomputed, except the choice of experts (`keeps_choice`). exchanged: experts are on other
    ranks; the received token counts are saved, too.
    """
    for name in blocks:
        block = stage.get_submodule(name)
        routed = any(getattr(part, "keeps_choice", False) for part in block.modules())
        saved = [*save, *([_CHOICE] if routed else [])]
        saved += [_ROUTE] if exchanged and experts_of(block) else []
        # torch.compile accepts no context_fn that does nothing
        options = {"context_fn": _contexts(name, saved)} if saved else {}
        block.forward = functools.partial(_forward, block.forward, options)


def _contexts(block: str, save: Sequence[str]) -> Callable[[], Any]:
    """Return a function that makes the contexts of a block's forward and of its recomputation."""
    ignore_ranges_in_selective_checkpoints()
    saved: dict[Any, bool] = {}  # by operator
    return lambda: create_selective_checkpoint_contexts(_Kept(block, save, saved))


def _forward(forward: Callable[..., Any], options: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


class _Kept:
    """The selective-checkpoint policy of one forward: whether each operator's results are saved.

    Raises ConfigError if a saved result is changed in place: only when the run's forward does it,
    since layers such as nn.LSTM do it on some devices only. Symptom without it: torch saves the
    changed value, and the recomputation changes it again; torch notices only if the change was not
    through an unsafe view, as a linear layer without bias returns one.
    """

    def __init__(self, block: str, save: Sequence[str], saved: dict[Any, bool]) -> None:
        self._block, self._save, self._saved = block, save, saved
        self._storages: dict[StorageWeakRef, str] = {}  # storage of a saved result -> operator

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(getattr(operator, "overloadpacket", operator))  # "aten.mm", without overload
        name = "aten.mm" if name in PRODUCTS else name
        if operator not in self._saved:
            self._saved[operator] = keeps(name, self._save)
        if not context.is_recompute:
            for tensor in written_by(operator, args, kwargs):
                if source := self._storages.get(StorageWeakRef(tensor.untyped_storage())):
                    changed = f"its {self._block} changes a result of {source} in place"
                    fix, reason = "activation_checkpoint=full", f"{changed}, which is to be kept"
                    raise ConfigError([Problem("activation_checkpoint", "selective", reason, fix)])
            if self._saved[operator]:
                # 2.11 does not pass the operator's results: in-place changes go unnoticed there
                for tensor in tensors_in(getattr(context, "op_output", None)):
                    self._storages[StorageWeakRef(tensor.untyped_storage())] = name
        keep = self._saved[operator]
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
