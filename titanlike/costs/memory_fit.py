"""Whether a layout fits into the memory of a device, and the nearest choice that does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from titanlike.config import validate
from titanlike.config.errors import ConfigError
from titanlike.config.hardware import Hardware
from titanlike.config.schema import (
    ChunkedCrossEntropy,
    Config,
    CrossEntropy,
    FitActivationCheckpoint,
)
from titanlike.device.choose import first_device
from titanlike.launch.environment import available_cores
from titanlike.metrics import units
from titanlike.training.draft import Draft, draft, memory_for_training

_SECONDS = 8.0  # of this process; after them no other choice is tried

# A choice's overrides, and the config with them; None where it would change nothing
Choice = tuple[dict[str, Any], Config] | None


def memory_warning(
    config: Config, drafted: Draft, room: int | None = None, seconds: float = _SECONDS
) -> str:
    """What a rank would take and has, and overrides with which it fits; "" where it fits.

    room: bytes that training may take on a rank; None = by the config, or what this machine has;
    seconds: of this process, after which no other choice is tried.

    Nothing is said where memory is unknown, and of a run on CPUs with more ranks than there are
    cores: it is meant for another machine.
    """
    room = _room(config) if room is None else room
    needed = None if room is None else _most(drafted)
    if room is None or needed is None or needed <= room:
        return ""
    text = f"a rank would take about {units.size(needed)}, and has {units.size(room)}"
    end = time.process_time() + seconds
    changed: dict[str, Any] = {}
    for choose in _CHOICES:
        if time.process_time() > end:
            break
        found = choose(config, drafted)
        if found is None or validate.problems(found[1]):
            continue
        try:
            other = draft(found[1], device_memory=lambda: room)
        except ConfigError:
            continue
        taken = _most(other)
        if taken is None or taken >= needed:
            continue
        changed |= found[0]
        config, drafted, needed = found[1], other, taken
        if taken <= room:
            return f"{text}; with {_shown(changed)} it would take {units.size(taken)}"
    also = f", nor does it fit with {_shown(changed)}" if changed else ""
    return f"{text}{also}; more ranks, or a smaller model or seq_len"


def _shown(overrides: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in overrides.items())


def _room(config: Config) -> int | None:
    """Bytes that training may take on a rank; None = not known."""
    how = config.activation_checkpoint
    if isinstance(how, FitActivationCheckpoint) and how.memory is not None:
        return how.memory
    planned = isinstance(config.hardware, Hardware)
    if (
        not planned
        and first_device(config.device).type == "cpu"
        and config.world_size > available_cores()
    ):
        return None
    return memory_for_training(config)


def _most(drafted: Draft) -> int | None:
    """Bytes on the fullest rank; None where activations cannot be estimated."""
    memory = drafted.memory()
    return None if memory.unknown else max(memory.of_ranks(drafted.recomputed.blocks))


# --- choices that take less memory --------------------------------------------------------------


def _smaller_microbatches(config: Config, drafted: Draft) -> Choice:
    count = config.batch_size // config.dp
    if not hasattr(config.schedule, "microbatches") or drafted.microbatches >= count:
        return None
    schedule: Any = config.schedule
    schedule = replace(schedule, microbatches=count)
    return {"schedule.microbatches": count}, replace(config, schedule=schedule)


def _chunked_loss(config: Config, _: Draft) -> Choice:
    if type(config.loss) is not CrossEntropy:
        return None
    return {"loss": "chunked_cross_entropy"}, replace(config, loss=ChunkedCrossEntropy())


def _recomputation(config: Config, _: Draft) -> Choice:
    if config.activation_checkpoint.name == "fit":
        return None
    how = FitActivationCheckpoint()
    return {"activation_checkpoint": "fit"}, replace(config, activation_checkpoint=how)


def _sharded_parameters(config: Config, drafted: Draft) -> Choice:
    shards = config.shards > 1
    if not shards or drafted.order.splits_backward or drafted.zero == 3:
        return None
    return {"fsdp.zero": 3}, replace(config, fsdp=replace(config.fsdp, zero=3))


def _more_shards(config: Config, _: Draft) -> Choice:
    dp = 2 * config.dp
    if config.batch_size % dp:
        return None
    if (given := getattr(config.schedule, "microbatches", None)) is None:
        return {"dp": dp}, replace(config, dp=dp)
    microbatches = min(given, config.batch_size // dp)
    schedule = replace(config.schedule, microbatches=microbatches)
    overrides = {"dp": dp, "schedule.microbatches": microbatches}
    return overrides, replace(config, dp=dp, schedule=schedule)


def _more_stages(config: Config, _: Draft) -> Choice:
    return {"pp": 2 * config.pp}, replace(config, pp=2 * config.pp)


# In this order, each with those before it: what costs little, then FLOPs, traffic, and more ranks
_CHOICES: list[Callable[[Config, Draft], Choice]] = [
    _smaller_microbatches,
    _chunked_loss,
    _recomputation,
    _sharded_parameters,
    *[_more_shards] * 3,
    *[_more_stages] * 3,
]
