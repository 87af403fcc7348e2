"""Optimizer steps that can be skipped on the device, and torch's fused AdamW and SGD as such.

The host launches a step before it knows its loss: reading it would wait for all launched kernels,
and then leave the device idle until new ones are launched. So the flag that skips a step stays on
the device, as torch's `found_inf` does: fused kernels read it, other updates use torch.where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from titanlike.core.config.optimizer import Optimizer
from titanlike.core.distributed.placement import Part
from titanlike.core.torch_private.dtensor import local
from titanlike.core.torch_private.tensors import divide


class SkippingOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` changes no parameter and no state if a flag on the device is set."""

    # flags are fp32 scalars, 1 = skip; None = 0
    skip: Tensor | None = None  # for all parameters
    # per parameter, for those that may have no gradient on any rank
    unreached: Mapping[nn.Parameter, Tensor] = {}
    # the update divides gradients by this to clip them; None = 1
    clip: Tensor | None = None

    def clip_on(self, device: torch.device) -> Tensor | None:
        return None if self.clip is None else self.clip.to(device)

    def skip_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's flag on its device. With CPU offload this waits for the GPU."""
        skip, unreached = self.skip, self.unreached.get(parameter)
        if unreached is not None:
            skip = unreached if skip is None else torch.maximum(skip, unreached)
        return None if skip is None else skip.to(parameter.device)

    def by_skip(
        self, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[list[nn.Parameter], Tensor | None]]:
        """Group parameters that have a gradient by device and flag."""
        together: dict[torch.device, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter in self.unreached:
                yield [parameter], self.skip_of(parameter)
            else:
                together.setdefault(parameter.device, []).append(parameter)
        for alike in together.values():
            yield alike, self.skip_of(alike[0])


def step_unless(
    optimizer: torch.optim.Optimizer,
    skip: Tensor | None,
    unreached: Mapping[nn.Parameter, Tensor],
    clip: Tensor | None = None,
) -> None:
    """Step an optimizer, with gradients divided by `clip`, unless the flags say skip.

    See `SkippingOptimizer`. Other optimizers (custom ones) cannot skip on the device, so the host
    waits for the flags.
    """
    if isinstance(optimizer, SkippingOptimizer):
        optimizer.skip, optimizer.unreached, optimizer.clip = skip, unreached, clip
        try:
            optimizer.step()
        finally:
            optimizer.skip, optimizer.unreached, optimizer.clip = None, {}, None
        return
    for parameter, flag in unreached.items():
        if flag.item():
            parameter.grad = None
    if skip is None or not skip.item():
        clip_in_place((p for group in optimizer.param_groups for p in group["params"]), clip)
        optimizer.step()


@torch.no_grad()
def clip_in_place(parameters: Iterable[Tensor], clip: Tensor | None) -> None:
    """Divide gradients by `clip`, for optimizers that do not do so in their update."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters if clip is not None else ():
        if parameter.grad is not None:
            by_device.setdefault(parameter.device, []).append(local(parameter.grad))
    for device, gradients in by_device.items():
        assert clip is not None
        divide(gradients, clip.to(device))


def around_step(
    optimizer: torch.optim.Optimizer, around: Callable[[Callable[[], object]], object]
) -> None:
    """Replace an optimizer's `step` by `around(step)`. torch's step hooks run twice if a class
    calls its base class' step."""
    step = optimizer.step
    vars(optimizer)["step"] = lambda closure=None: around(step)  # DCP passes closure=None


def select(skip: Tensor | None, old: Tensor, new: Tensor) -> None:
    """Copy `new` to `old` in place, unless the flag says skip."""
    old.copy_(new if skip is None else torch.where(skip > 0, old, new))


def fused_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
    skip: Tensor | None,
    clip: Tensor | None,
) -> None:
    """AdamW's fused update of plain tensors, in place; skip, clip: see `SkippingOptimizer`. In a
    skipped step `steps` do not change."""
    beta1, beta2 = group["betas"]
    adamw(
        *(weights, gradients, means, squares, [], steps),
        fused=True,
        found_inf=skip,
        grad_scale=clip,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


_REGISTER = 64  # elements; a multiple of the size of any CPU's vector registers


def padded(tensor: Tensor) -> Tensor:
    """Return the tensor, padded with zero rows unless its size is a multiple of `_REGISTER`.

    torch's CPU kernels round the last elements of a tensor, which fill no vector register,
    differently. With padding an element's bits do not depend on where a shard begins and ends.
    """
    if tensor.numel() % _REGISTER == 0:
        return tensor
    rows = tensor if tensor.dim() else tensor.view(1)
    together = _REGISTER // math.gcd(_REGISTER, rows[0].numel())
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -len(rows) % together))


def take_back(tensor: Tensor, wide: Tensor) -> None:
    """Copy the values of a tensor's `padded` version back to it."""
    if wide.data_ptr() != tensor.data_ptr():
        tensor.copy_(wide.flatten()[: tensor.numel()].view(tensor.shape))


@dataclass(frozen=True)
class OptimizerContext:
    """Inputs of an optimizer's arithmetic besides its own config."""

    # this rank's part of each tensor-parallel parameter
    parts: Mapping[nn.Parameter, Part | None] = field(default_factory=dict)
    # the ranks that share matrices; None = those of FSDP's mesh
    group: dist.ProcessGroup | None = None
    dtype: torch.dtype = torch.float32  # of activations
    exact: bool = False  # see `padded`


class Elementwise(SkippingOptimizer):
    """A built-in elementwise optimizer, whose arithmetic is the `update` method of its config
    class. `update` receives plain tensors: this rank's shard of a parameter, its gradient and its
    state."""

    def __init__(
        self, groups: list[dict[str, Any]], config: Optimizer, context: OptimizerContext
    ) -> None:
        super().__init__(groups, {"lr": config.lr})
        self._config, self._exact = config, context.exact

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local(parameter.grad)
        for key in self._config.state:
            if key not in state:
                state[key] = torch.zeros_like(parameter)
        old = [local(parameter), *(local(state[key]) for key in self._config.state)]
        # the update changes copies, which a skipped step discards
        weights, *means = [(padded(each) if self._exact else each).clone() for each in old]
        gradient = padded(gradient) if self._exact else gradient
        if (clip := self.clip_on(parameter.device)) is not None:
            gradient = gradient / clip
        self._config.update(group, weights, gradient, *means)
        for each, new in zip(old, (weights, *means), strict=True):
            select(self.skip_of(parameter), each, new.flatten()[: each.numel()].view(each.shape))


class _Fused(SkippingOptimizer):
    """A fused optimizer of torch, with the same arithmetic and the same state.

    It differs in two ways. The update is computed on plain local tensors instead of DTensors
    (AdamW's host time for 291 parameters is 1.5 ms instead of 9.9), for all parameters with the
    same flag at once. And state is initialized to zeros before the first update, which may be
    skipped.
    """

    keys: tuple[str, ...] = ()  # config keys that are arguments of torch's optimizer

    def __init__(self, groups: Any, config: Optimizer, context: OptimizerContext) -> None:
        settings: dict[str, Any] = {key: getattr(config, key) for key in ("lr", *self.keys)}
        settings["fused"] = True
        super().__init__(groups, **settings)
        self._exact = context.exact

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameters, skip in self.by_skip(group["params"]):
                self._update(
                    parameters,
                    [local(grad) for p in parameters if (grad := p.grad) is not None],
                    group,
                    skip,
                )

    def _update(
        self, parameters: Sequence[Any], gradients: list[Tensor], group: Any, skip: Tensor | None
    ) -> None:
        raise NotImplementedError

    def _called(self, update: Callable[..., object], *each: list[Tensor]) -> None:
        """Call an in-place `update` on lists of tensors, which are `padded` for numerics=exact."""
        if not self._exact:
            update(*each)
            return
        wide = [[padded(tensor) for tensor in tensors] for tensors in each]
        update(*wide)
        for tensor, copy in zip(chain(*each), chain(*wide), strict=True):
            take_back(tensor, copy)

    def _state(self, parameters: Sequence[nn.Parameter], key: str) -> list[Tensor]:
        """Return this rank's shards of the state `key`; missing ones are created as zeros."""
        for parameter in parameters:
            if self.state[parameter].get(key) is None:
                self.state[parameter][key] = torch.zeros_like(parameter)
        return [local(self.state[parameter][key]) for parameter in parameters]


class AdamW(_Fused, torch.optim.AdamW):
    """torch.optim.AdamW(fused=True)."""

    keys = ("betas", "eps")

    def _update(
        self, parameters: Sequence[Any], gradients: list[Tensor], group: Any, skip: Tensor | None
    ) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
        means, squares = (self._state(parameters, key) for key in ("exp_avg", "exp_avg_sq"))
        steps = [self.state[parameter]["step"] for parameter in parameters]
        clip = self.clip_on(parameters[0].device)
        update = partial(fused_adamw, steps=steps, group=group, skip=skip, clip=clip)
        self._called(update, [local(p) for p in parameters], gradients, means, squares)


class Sgd(_Fused, torch.optim.SGD):
    """torch.optim.SGD(fused=True).

    torch's own leaves momentum uninitialized if the first step is skipped. Test:
    test_skipping.py::test_torchs_sgd_leaves_its_momentum_uninitialized_if_it_skips_the_first_step
    """

    def _update(
        self, parameters: Sequence[Any], gradients: list[Tensor], group: Any, skip: Tensor | None
    ) -> None:
        tensors = [[local(parameter) for parameter in parameters], gradients]
        if group["momentum"]:
            tensors.append(self._state(parameters, "momentum_buffer"))

        def update(weights: list[Tensor], gradients: list[Tensor], *momenta: Any) -> None:
            sgd(
                *(weights, gradients, momenta[0] if momenta else [None] * len(weights)),
                fused=True,
                found_inf=skip,
                grad_scale=self.clip_on(parameters[0].device),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0,
                nesterov=False,
                maximize=False,
            )

        self._called(update, *tensors)
