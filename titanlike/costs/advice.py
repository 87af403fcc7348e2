"""What would help: the nearest layout that fits into a device, and changes that make a step shorter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titanlike.config import validate
from titanlike.config.errors import ConfigError
from titanlike.config.groups import (
    ActivationCheckpoint,
    AutoSplit,
    LoopedSchedule,
    Precision,
    Schedule,
    SelectiveActivationCheckpoint,
    ZeroBubbleSchedule,
)
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

if TYPE_CHECKING:  # imported where changes are planned
    from titanlike.costs.estimate import Estimate

_SECONDS = 3.0  # of this process; after them nothing else is tried
_LEAST = 0.01  # gain that is worth a line


@dataclass(frozen=True)
class Advice:
    """Overrides, and what a step gains by them: a share of its speed."""

    overrides: str
    gain: float
    plan: Estimate

    def __str__(self) -> str:
        return f"{self.overrides} gains {self.gain:.0%}"


def advise(plan: Estimate, seconds: float = _SECONDS) -> list[Advice]:
    """Single changes that fit and are faster, the best first."""
    from titanlike.costs.estimate import make_estimate

    end = time.process_time() + seconds
    found = []
    for overrides, config in _changes(plan):
        if time.process_time() > end:
            break
        if validate.problems(config):
            continue
        try:
            other = make_estimate(config, plan.hardware, checked=plan.draft.transforms)
        except (ConfigError, ValueError):
            continue
        gain = plan.step_seconds / other.step_seconds - 1
        if other.fits and gain > _LEAST:
            text = " ".join(f"{key}={value}" for key, value in overrides.items())
            found.append(Advice(text, gain, other))
    return sorted(found, key=lambda advice: -advice.gain)


def _changes(plan: Estimate) -> Iterator[tuple[dict[str, Any], Config]]:
    """Single changes that change nothing of what is trained, those that often help first."""
    config, now = plan.config, plan.draft.microbatches
    schedule: Any = config.schedule
    if config.precision.name == "fp32" and plan.hardware.runs_ahead:
        yield {"precision": "bf16"}, replace(config, precision=Precision("bf16"))
    if not config.compile and plan.hardware.runs_ahead:
        yield {"compile": "true"}, replace(config, compile=True)
    how = config.activation_checkpoint.name
    for name, choice in (
        ("none", ActivationCheckpoint("none")),
        ("fit", FitActivationCheckpoint()),
        ("selective", SelectiveActivationCheckpoint()),
    ):
        if how not in (name, "none") and plan.draft.recomputed.count:
            yield {"activation_checkpoint": name}, replace(config, activation_checkpoint=choice)
    if config.pp > 1 and hasattr(schedule, "microbatches"):
        for other in (
            ZeroBubbleSchedule("zbvzerobubble", now),
            LoopedSchedule("interleaved1f1b", now),
            Schedule("1f1b", now),
        ):
            if other.name != schedule.name:
                words = {"schedule": other.name, "schedule.microbatches": now}
                yield words, replace(config, schedule=other)
        if not isinstance(config.split, AutoSplit):
            yield {"split": "auto"}, replace(config, split=AutoSplit())
    for zero in (1, 2):
        if plan.draft.zero > zero and config.shards > 1:
            yield {"fsdp.zero": zero}, replace(config, fsdp=replace(config.fsdp, zero=zero))
    each = config.batch_size // config.dp
    for count in (2 * now, now // 2):
        if hasattr(schedule, "microbatches") and count and each % count == 0:
            changed = replace(schedule, microbatches=count)
            yield {"schedule.microbatches": count}, replace(config, schedule=changed)
    for key in ("tp", "pp"):
        size = getattr(config, key)
        if size > 1 and size % 2 == 0 and config.batch_size % (2 * config.dp) == 0:
            changed = replace(config, **{key: size // 2, "dp": 2 * config.dp})
            words = {key: size // 2, "dp": 2 * config.dp}
            if getattr(schedule, "microbatches", None):
                count = max(1, schedule.microbatches // 2)
                changed = replace(changed, schedule=replace(schedule, microbatches=count))
                words["schedule.microbatches"] = count
            yield words, changed


# --- whether a layout fits into the memory of a device, and the nearest choice that does ----------


_FIT_SECONDS = 8.0  # of this process; after them no other choice is tried

# A choice's overrides, and the config with them; None where it would change nothing
Choice = tuple[dict[str, Any], Config] | None


def memory_warning(
    config: Config, drafted: Draft, room: int | None = None, seconds: float = _FIT_SECONDS
) -> str:
    """What a rank would take and has, and overrides with which it fits; "" where it fits.

    room: bytes that training may take on a rank; None = by the config, or what this machine has;
    seconds: of this process, after which no other choice is tried.

    Nothing is said where memory is unknown, and of a run on CPUs with more ranks than there are
    cores: it is meant for another machine.
    """
    room = _room(config) if room is None else room
    needed = None if room is None else _peak_bytes(drafted)
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
        taken = _peak_bytes(other)
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


def _peak_bytes(drafted: Draft) -> int | None:
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
