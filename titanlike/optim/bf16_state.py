"""AdamW with exp_avg and exp_avg_sq in bf16: 4 bytes of state per parameter instead of 8.

torch's AdamW refuses bf16 state for fp32 parameters. Here the state is cast to fp32, a few rows at
a time, for torch's own update, and rounded back stochastically: up or down, with probabilities that
make the expectation exact. With round-to-nearest, a moving average stops changing once an update is
below half a bf16 ulp: with betas[1]=0.999, exp_avg_sq would never decay.

The random bits are a function of (seed, parameter name, step, element), so every layout and every
resumed run rounds identically.
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
_CHUNK = 2**22  # elements that are cast to fp32 at a time
_LOW_32 = 0xFFFFFFFF


class Bf16StateAdamW(EachParameter):
    """torch.optim.AdamW(fused=True) with bf16 state."""

    def __init__(
        self, groups: list[dict[str, Any]], config: AdamW, context: OptimizerContext
    ) -> None:
        defaults = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
        super().__init__(groups, defaults)
        self._seeds, self._parts = context.seeds, context.parts
        self._positions: dict[nn.Parameter, Positions] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, which torch casts to the parameters' dtype, and cast it back to bf16."""
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
        shards = [torch.atleast_1d(local(tensor).detach()) for tensor in tensors]
        rows = max(1, _CHUNK // max(1, shards[0][:1].numel()))
        skip, clip, row = self.skip_of(parameter), self.clip_on(parameter.device), 0
        for chunk in zip(*(tensor.split(rows) for tensor in shards), strict=True):
            weights, gradient, *means = chunk
            mean, square = (mean.float() for mean in means)
            step = state["step"].clone()  # every call increments it
            fused_adamw([weights], [gradient], [mean], [square], [step], group, skip, clip)
            # in a skipped step the values are still exact in bf16, so rounding changes nothing
            positions = self._positions[parameter].of_rows(slice(row, row + len(weights)))
            bits = random_bits(positions, self._seeds[parameter], state["step"])
            means[0].copy_(round_stochastically(mean, bits >> 16))
            means[1].copy_(round_stochastically(square, bits & 0xFFFF))
            row += len(weights)
        state["step"] += 1 if skip is None else 1 - skip


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bf16, away from zero with the probability that makes the expectation exact.

    noise: uniform integers in [0, 65535], in the shape of `values`. inf and NaN stay.
    """
    # bf16 is the upper half of fp32: noise added to the lower half carries with that probability
    bits = values.view(torch.int32) + noise.to(torch.int32)
    rounded = bits.bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class Positions:
    """Maps the elements of this rank's shard to their flat indices in the full tensor."""

    def __init__(self, tensor: Tensor, part: Part | None = None) -> None:
        """tensor: full, or sharded by FSDP, by tensor parallelism (as `part` says), or both."""
        shape = tensor.shape if part is None else part.shape
        # row-major strides of the full tensor
        self._strides = [math.prod(shape[dim + 1 :]) for dim in range(max(1, len(shape)))]
        device = local(tensor).device
        self._places = [place.to(device) for place in places(tensor, part)]
        self._places = self._places or [torch.zeros(1, dtype=torch.int64, device=device)]

    def of_rows(self, rows: slice) -> Tensor:
        """Return the flat indices of these rows of the shard, int64 in the rows' shape."""
        first, *others = self._places
        result = first[rows] * self._strides[0]
        for place, stride in zip(others, self._strides[1:], strict=True):
            result = result.unsqueeze(-1) + place * stride
        return result


def random_bits(positions: Tensor, seed: int, step: Tensor) -> Tensor:
    """Return 32 random bits per element, int64 in [0, 2^32), the same in every layout.

    positions: flat indices in the full tensor; step: a scalar on the device. The hash is
    MurmurHash3's finalizer, applied to (seed, step) and then to each position.
    """
    start = _mix(step.to(torch.int64) * 0x9E3779B1 + (seed & _LOW_32))
    return _mix(_mix(positions + (positions >> 32) * 0x85EBCA6B) ^ start)


def _mix(bits: Tensor) -> Tensor:
    """Hash int64 to int64 in [0, 2^32): each result bit depends on all of the lowest 32 bits."""
    bits = bits & _LOW_32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _LOW_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _LOW_32
    return bits ^ (bits >> 16)
