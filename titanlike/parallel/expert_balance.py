"""Routed experts in a pipeline: how many tokens each had, counted over the global batch, once a step.

Tokens are counted where a training forward calls experts (see `models/experts.py` for what these are),
not where activation checkpointing runs it again. After the step the counts are summed over all ranks
that saw other tokens, so that they are those of the undivided batch in any layout: integers, the same
on every rank. The layer that holds the experts is told (`balance(counts, skip)`), if it wants to know; a
skipped step changes nothing.

All tokens count, padding included: all of them are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.distributed.mesh import Mesh
from titanlike.distributed.placement import experts_of
from titanlike.distributed.transform import Transform
from titanlike.torch_private.autograd import in_backward


@torch.library.custom_op("titanlike::tokens_of_experts", mutates_args=())
def _counted(counts: Tensor, total: Tensor) -> Tensor:
    """A copy of `counts`, which are added to `total`: an operator, since a compiled block runs nothing
    else. It does not say that it changes `total`; torch would take it out of a forward that is
    recomputed, or refuse."""
    if not in_backward():
        # without a new version of it: a compiled block that recomputes keeps it for the backward, and
        # would refuse it there
        total.data.add_(counts)
    return counts.clone()


@_counted.register_fake
def _(counts: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(counts)


@dataclass(frozen=True)
class _Layer:
    holder: Any  # the module whose child the experts are
    experts: Any
    total: Tensor  # tokens of each expert in this step, on this rank: int64


class ExpertBalance(Transform):
    """The modules of experts of this rank's stages; of any model that has some."""

    def __init__(self, mesh: Mesh, tensor_parts: Callable[[], bool]) -> None:
        """tensor_parts: whether the tensor-parallel ranks see different tokens in the current step."""
        self._mesh, self._tensor_parts = mesh, tensor_parts
        self._share = torch.zeros((), device=mesh.device)
        self._layers: list[_Layer] = []
        # of the busiest and the idlest expert, relative to the mean, in the step that was updated last;
        # the share of choices that no expert computed. -inf where this rank has no experts
        self.loads = torch.full((3,), -torch.inf, device=mesh.device)
        self._tokens: Tensor | None = None

    def on_weights(self, stage: nn.Module) -> None:
        """Count in the modules' forwards from now on: behind all else that replaces them, and before
        one is compiled."""
        for name, experts in experts_of(stage).items():
            holder = stage.get_submodule(name.rpartition(".")[0])
            count: Any = experts.num_experts
            total = torch.zeros(count, dtype=torch.int64, device=self._mesh.device)
            vars(experts)[_BEFORE] = vars(experts).get("forward")
            vars(experts)[_TOTAL] = total
            # not a closure: of blocks whose experts have other functions each is compiled
            experts.forward = MethodType(_forward, experts)
            if hasattr(holder, "token_share"):
                holder.token_share = self._share
            self._layers.append(_Layer(holder, experts, total))

    @contextmanager
    def training(self, tokens: Tensor) -> Iterator[None]:
        """Forwards within count in the next update; earlier ones are dropped.

        tokens: of the global batch, a scalar on the device.
        """
        self._tokens = tokens
        self._share.copy_(1 / tokens)
        for layer in self._layers:
            layer.total.zero_()
        yield

    @torch.no_grad()
    def after_update(self, skip: Tensor | None) -> None:
        """Tell the layers what was counted. Collective over the ranks that have the same stages.

        skip: a scalar on the device, 1 = leave them as they are; None = 0.
        """
        if not self._layers or self._tokens is None:
            return
        flat = torch.cat([layer.total for layer in self._layers])
        mesh = self._mesh
        if mesh.stage_copies > 1:
            for axis in ("shard", "replicate"):
                mesh.sum(flat, axis)
        if mesh.tp > 1 and self._tensor_parts():
            mesh.sum(flat, "tp")
        loads = []
        sums = flat.split([len(layer.total) for layer in self._layers])
        for layer, counts in zip(self._layers, sums, strict=True):
            if hasattr(layer.holder, "balance"):
                layer.holder.balance(counts, skip)
            relative = counts / counts.double().mean().clamp(min=1)
            wanted = self._tokens.double() * layer.experts.top_k
            dropped = 1 - counts.sum() / wanted
            loads.append(torch.stack([relative.max(), -relative.min(), dropped]))
        self.loads = torch.stack(loads).amax(0).float()

    def measured(self) -> Sequence[Tensor]:
        return self.loads.unbind()

    def record(self, values: Sequence[float]) -> dict[str, float]:
        busiest, idlest, dropped = values
        return {"busiest_expert": busiest, "idlest_expert": -idlest, "dropped": dropped}


# attributes of a module of experts: the forward that it had, None = that of its class; the count
_BEFORE, _TOTAL = "uncounted_forward", "tokens_of_step"


def _forward(experts: nn.Module, tokens: Tensor, counts: Tensor) -> Any:
    if experts.training and torch.is_grad_enabled():
        counts = torch.ops.titanlike.tokens_of_experts(counts, getattr(experts, _TOTAL))
    before = getattr(experts, _BEFORE)
    if before is None:
        return type(experts).forward(experts, tokens, counts)
    return before(tokens, counts)
