"""AdamW whose two running means are kept in bf16: 4 bytes a parameter in place of 8.

torch's AdamW refuses bf16 means of fp32 parameters. Here they are widened to fp32, some rows at a
time, for torch's own update, and rounded back stochastically: up or down, with probabilities that
make the expectation exact. Rounded to the nearest, a mean stops moving where an update is less than
half its last digit (1/512 of it): with betas[1]=0.999 the mean of squares would never fall again.

The random bits are a function of (seed, parameter name, step, element), so that every layout and
every resumed run rounds alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.optim.fused import fused_adamw
from titanlike.optim.skipping import SkippingOptimizer
from titanlike.torch_private.dtensor import local_slices

_MEANS = ("exp_avg", "exp_avg_sq")
_CHUNK = 2**22  # elements that are widened at a time
_LOW_32 = 0xFFFFFFFF


class Bf16StateAdamW(SkippingOptimizer):
    """torch.optim.AdamW, fused, but for the dtype of its state."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        seeds: Mapping[nn.Parameter, int],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """seeds: of the rounding, one for each parameter."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._seeds = seeds
        self._first_rows: dict[nn.Parameter, int] = {}  # of this rank's part

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _first_row(self, parameter: nn.Parameter) -> int:
        if parameter not in self._first_rows:
            self._first_rows[parameter] = local_slices(parameter)[0].start if parameter.dim() else 0
        return self._first_rows[parameter]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts state to the dtype of its parameter; here it is cast back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for key in _MEANS:
                if key in state:
                    state[key] = state[key].to(torch.bfloat16)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for key in _MEANS:
                state[key] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        tensors = (parameter, parameter.grad, *(state[key] for key in _MEANS))
        rows = self._first_row(parameter)
        locals_ = [_rows(tensor) for tensor in tensors]
        length = max(1, locals_[0][:1].numel())  # of a row
        each = max(1, _CHUNK // length)
        skip = self.skip_of(parameter)
        for chunk in zip(*(tensor.split(each) for tensor in locals_), strict=True):
            weights, gradient, *means = chunk
            wide = [mean.float() for mean in means]
            mean, square = ([mean] for mean in wide)
            step = [state["step"].clone()]  # counted up by each call
            fused_adamw([weights], [gradient], mean, square, step, group, skip)
            # what was not updated is in bf16 still, and rounded to itself
            bits = random_bits(weights, rows * length, self._seeds[parameter], state["step"])
            for mean, exact, noise in zip(means, wide, (bits >> 16, bits & 0xFFFF), strict=True):
                mean.copy_(round_stochastically(exact, noise))
            rows += len(weights)
        state["step"] += 1 if skip is None else 1 - skip


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 -> bf16: each value up or down in size; noise: integers in [0, 65535], all as likely."""
    # bf16 is the upper half of fp32; the lower half is the share of a digit that is rounded
    bits = values.view(torch.int32) + noise.to(torch.int32)
    rounded = bits.bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def random_bits(like: Tensor, first: int, seed: int, step: Tensor) -> Tensor:
    """32 random bits for each element, int64 in [0, 2^32), of `like`'s shape; the shards of a tensor
    get what the whole one does.

    first: the position of the first element in the whole tensor; step: a scalar, on the device.
    The mixing is MurmurHash3's, twice: of (seed, step), then of each position with it.
    """
    start = _mix(step.to(torch.int64) * 0x9E3779B1 + (seed & _LOW_32))
    positions = torch.arange(first, first + like.numel(), device=like.device)
    mixed = _mix(_mix(positions + (positions >> 32) * 0x85EBCA6B) ^ start)
    return mixed.view(like.shape)


def _mix(bits: Tensor) -> Tensor:
    """int64 -> int64 in [0, 2^32): every bit of the low 32 depends on every one."""
    bits = bits & _LOW_32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _LOW_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _LOW_32
    return bits ^ (bits >> 16)


def _rows(tensor: Tensor) -> Tensor:
    """This rank's part, at least 1-D."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return torch.atleast_1d(local.detach())
