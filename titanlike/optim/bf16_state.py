"""AdamW whose two running means are kept in bf16: 4 bytes a parameter in place of 8.

torch's AdamW refuses bf16 means of fp32 parameters. Here they are widened to fp32, some rows at a
time, for torch's own update, and rounded back stochastically: up or down, with probabilities that
make the expectation exact. Rounded to the nearest, a mean stops moving where an update is less than
half its last digit (1/512 of it): with betas[1]=0.999 the mean of squares would never fall again.

The random bits are a function of (seed, parameter name, step, element), so that every layout and
every resumed run rounds alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.config.optimizers.adamw import AdamW
from titanlike.distributed.placement import Part, places
from titanlike.optim.fused import EachParameter, OptimizerContext, fused_adamw
from titanlike.torch_private.dtensor import local

_MEANS = ("exp_avg", "exp_avg_sq")
_CHUNK = 2**22  # elements that are widened at a time
_LOW_32 = 0xFFFFFFFF


class Bf16StateAdamW(EachParameter):
    """torch.optim.AdamW, fused, but for the dtype of its state."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: AdamW,
        context: OptimizerContext,
    ) -> None:
        defaults = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
        super().__init__(groups, defaults)
        self._seeds, self._parts = context.seeds, context.parts
        self._positions: dict[nn.Parameter, Positions] = {}

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
        if parameter not in self._positions:
            self._positions[parameter] = Positions(parameter, self._parts.get(parameter))
        tensors: list[Any] = [parameter, parameter.grad, *(state[key] for key in _MEANS)]
        held = [torch.atleast_1d(local(tensor).detach()) for tensor in tensors]
        rows = max(1, _CHUNK // max(1, held[0][:1].numel()))
        skip, clip, row = self.skip_of(parameter), self.clip_on(parameter.device), 0
        for chunk in zip(*(tensor.split(rows) for tensor in held), strict=True):
            weights, gradient, *means = chunk
            mean, square = (mean.float() for mean in means)
            step = state["step"].clone()  # counted up by each call
            fused_adamw([weights], [gradient], [mean], [square], [step], group, skip, clip)
            # what was not updated is in bf16 still, and rounded to itself
            at = self._positions[parameter].of_rows(slice(row, row + len(weights)))
            bits = random_bits(at, self._seeds[parameter], state["step"])
            means[0].copy_(round_stochastically(mean, bits >> 16))
            means[1].copy_(round_stochastically(square, bits & 0xFFFF))
            row += len(weights)
        state["step"] += 1 if skip is None else 1 - skip


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 -> bf16: each value up or down in size; noise: integers in [0, 65535], all as likely."""
    # bf16 is the upper half of fp32; the lower half is the share of a digit that is rounded
    bits = values.view(torch.int32) + noise.to(torch.int32)
    rounded = bits.bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class Positions:
    """Where the elements that this rank holds of a tensor are in the whole one, counted from its
    first."""

    def __init__(self, tensor: Tensor, part: Part | None = None) -> None:
        """tensor: FSDP's shards, a tensor-parallel rank's part, both, or the whole."""
        shape = tensor.shape if part is None else part.shape
        # of each dimension, what a step along it adds; the first is of rows
        self._strides = [math.prod(shape[dim + 1 :]) for dim in range(max(1, len(shape)))]
        device = local(tensor).device
        self._places = [place.to(device) for place in places(tensor, part)]
        self._places = self._places or [torch.zeros(1, dtype=torch.int64, device=device)]

    def of_rows(self, rows: slice) -> Tensor:
        """int64, in the shape of these rows of what this rank holds."""
        first, *others = self._places
        result = first[rows] * self._strides[0]
        for place, stride in zip(others, self._strides[1:], strict=True):
            result = result.unsqueeze(-1) + place * stride
        return result


def random_bits(positions: Tensor, seed: int, step: Tensor) -> Tensor:
    """32 random bits for each element of a tensor, int64 in [0, 2^32), by its position in the whole
    tensor: in every layout the same.

    step: a scalar, on the device. The mixing is MurmurHash3's, twice: of (seed, step), then of each
    position with it.
    """
    start = _mix(step.to(torch.int64) * 0x9E3779B1 + (seed & _LOW_32))
    return _mix(_mix(positions + (positions >> 32) * 0x85EBCA6B) ^ start)


def _mix(bits: Tensor) -> Tensor:
    """int64 -> int64 in [0, 2^32): every bit of the low 32 depends on every one."""
    bits = bits & _LOW_32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _LOW_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _LOW_32
    return bits ^ (bits >> 16)
