"""A layout's memory on its fullest rank, and its relative time of a step.

Estimated from a draft: nothing is allocated, no process is started. Memory (`split/rank_memory.py`) is
what training adds to a process.

Of 20 layouts (docs/layouts.md) it is 0.97 to 1.06 of what a rank's live storages take at their peak.
A CPU process takes more: libraries and gloo 45 MiB, and where glibc keeps freed blocks (no sharding,
small microbatches) up to twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titanlike.config.schema import Config
from titanlike.pipeline.order import Act, Order, awaited, needs, walk
from titanlike.split.rank_memory import saved_operators
from titanlike.split.state_bytes import state_bytes
from titanlike.split.unit_costs import CostError
from titanlike.training.draft import Draft

# An action reads its weights, whatever its number of tokens: that takes as long as computing this
# many tokens (a GPU does 200 to 300 FLOPs per byte read). So small microbatches are slower.
_TOKENS_TO_READ_WEIGHTS = 256


@dataclass(frozen=True)
class Estimate:
    memory: int  # bytes that training takes on the fullest rank
    time: float  # of a step, in FLOPs of one rank: with the bubble, without traffic


def estimate(config: Config, draft: Draft) -> Estimate:
    """Estimate a layout, drafted from this config.

    A unit whose costs cannot be measured alone counts only with its parameters.
    """
    memory = draft.memory()
    unit_costs = memory.unit_costs
    try:
        flops = [0] if unit_costs is None else unit_costs.flops()
    except CostError:
        numel = unit_costs.parameter_table(lambda parameter: parameter.numel())
        flops = [int(numel[at, at + 1]) for at in range(len(numel) - 1)]
    names = [name for stage in draft.stages for name in stage]
    of_unit = dict(zip(names, flops, strict=False))
    read = 1 + _TOKENS_TO_READ_WEIGHTS / memory.tokens
    forward, backward = [], []
    for units, recomputed in zip(draft.stages, draft.recomputed.blocks, strict=True):
        once = read * sum(of_unit.get(name, 0) for name in units) / 3
        # what a selective recomputation leaves out is what takes longest
        flops_again = 0 if saved_operators(config) else sum(of_unit.get(n, 0) for n in recomputed)
        again = read * flops_again / 3
        forward.append(once)
        backward.append(2 * once + again)
    return Estimate(
        max(memory.of_ranks(draft.recomputed.blocks)), step_time(draft.order, forward, backward)
    )


def least_memory(config: Config, parameters: int) -> int:
    """Bytes that the ranks need on average, by the model's number of parameters alone: as if
    Muon updated all, if it is the optimizer."""
    zero = 3 if config.fsdp.zero == "auto" else config.fsdp.zero
    return int(parameters * state_bytes(config, zero, True) / config.pp)


def step_time(order: Order, forward: Sequence[float], backward: Sequence[float]) -> float:
    """When the last rank is done, if a microbatch takes forward[stage] and backward[stage].

    Half of a split backward is W. Messages take no time.
    """
    clock = [0.0] * len(order.ranks)
    done: dict[Act, float] = {}
    for rank, act in walk(order):
        start = max([clock[rank], *(done[need] for need in needs(act, order.stages - 1))])
        whole = forward[act.stage] if act.kind == "F" else backward[act.stage]
        clock[rank] = start + (whole / 2 if act.kind in "IW" else whole)
        done[awaited(act)] = clock[rank]
    return max(clock)
