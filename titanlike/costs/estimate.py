"""A layout's memory on its fullest rank, and its time of a step, for those who compare many.

Estimated from a draft (`plan.py`): nothing is allocated, no process is started. Memory
(`rank_memory.py`) is what training adds to a process.

Of 27 layouts (docs/layouts.md) it is 0.97 to 1.02 of what a rank's live storages take at their peak.
A CPU process takes more: libraries and gloo 45 MiB, and where glibc keeps freed blocks (no sharding,
small microbatches) up to twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.config.schema import Config
from titanlike.costs.known_hardware import likely_hardware
from titanlike.costs.plan import make_plan
from titanlike.distributed.sharding import state_bytes
from titanlike.training.draft import Draft


@dataclass(frozen=True)
class Estimate:
    memory: int  # bytes that training takes on the fullest rank
    time: float  # seconds of a step


def estimate(config: Config, draft: Draft) -> Estimate:
    """Estimate a layout, drafted from this config, on the config's hardware or what is likely here.

    A unit whose costs cannot be measured alone counts only with its parameters.
    """
    plan = make_plan(config, likely_hardware(config), draft)
    return Estimate(max(plan.memory_bytes), plan.step_seconds)


def least_memory(config: Config, parameters: int) -> int:
    """Bytes that the ranks need on average, by the model's number of parameters alone: as if
    Muon updated all, if it is the optimizer."""
    zero = 3 if config.fsdp.zero == "auto" else config.fsdp.zero
    return int(parameters * state_bytes(config, zero, True) / config.model_ranks)
