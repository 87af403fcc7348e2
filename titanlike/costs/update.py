"""How long the optimizer's update takes: it reads and writes state, and Muon multiplies matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from titanlike.config.hardware import Hardware
from titanlike.config.schema import AdamW, Config, Muon, Sgd
from titanlike.optim.muon import hidden_matrices

_CLIP = 12  # bytes a parameter: the norm reads gradients, clipping reads and writes them


def update_seconds(config: Config, numel: float, flops: float, hardware: Hardware) -> float:
    """numel: parameters that a rank updates; flops: see `orthogonalization`."""
    optimizer = config.optimizer
    match optimizer:
        case Sgd(momentum=momentum):
            touched = 12 + (8 if momentum > 0 else 0)
        case AdamW(state_dtype="bf16"):
            touched = 20
        case _:
            touched = 28
    touched += _CLIP if getattr(optimizer, "clip", None) is not None else 4
    seconds = numel * touched / (hardware.memory_bandwidth * hardware.memory_efficiency)
    if config.fsdp.cpu_offload:  # gradients to the host, parameters back; its memory is slower
        seconds = numel * (8 + touched) / hardware.host_bandwidth
    return seconds + flops / (hardware.bf16_flops * hardware.matmul_efficiency)


def orthogonalization(
    config: Config, model: nn.Module, stages: Sequence[Mapping[str, int]]
) -> list[float]:
    """FLOPs of Muon's Newton-Schulz iterations (optim/orthogonalize.py) on each stage's matrices.

    stages: of each the names of its parameters.
    """
    found = [0.0] * len(stages)
    if not isinstance(config.optimizer, Muon):
        return found
    hidden = hidden_matrices(model, config.optimizer)
    for stage, names in enumerate(stages):
        for name in hidden & names.keys():
            *_, rows, columns = model.get_parameter(name).shape
            small, large = sorted((rows, columns))
            # x x^T, its square, and their product with x
            each = 4 * small * small * large + 2 * small**3
            found[stage] += config.optimizer.ns_steps * each
    return found
