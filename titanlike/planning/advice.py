"""Advice: the nearest layout that fits into a device, and changes that make a step faster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlike.config import validate
from titanlike.config.errors import ConfigError
from titanlike.config.overrides import with_choices
from titanlike.config.schema import Config, CrossEntropy
from titanlike.metrics import units
from titanlike.training.preflight import too_large
from titanlike.training.train_plan import TrainPlan, make_plan

if TYPE_CHECKING:  # imported where changes are planned
    from titanlike.planning.estimate import Estimate

_SECONDS = 3.0  # CPU time after which no other change is tried
_FIT_SECONDS = 8.0  # the same for changes that save memory
_LEAST = 0.01  # smallest gain to report

Choices = dict[str, Any]  # config key -> value, or config group -> name of a choice


@dataclass(frozen=True)
class Advice:
    """Overrides, and the relative gain in speed with them."""

    overrides: str
    gain: float
    estimate: Estimate

    def __str__(self) -> str:
        return f"{self.overrides} gains {self.gain:.0%}"


def advise(estimate: Estimate, seconds: float = _SECONDS) -> list[Advice]:
    """Find single changes that fit and are faster, best first. seconds: limit of CPU time."""
    from titanlike.planning.estimate import improved

    end = time.process_time() + seconds
    gains = []
    for choices in _faster(estimate):
        if time.process_time() > end:
            break
        if (other := improved(estimate, choices, _LEAST)) is not None:
            gain = estimate.step_seconds / other.step_seconds - 1
            gains.append(Advice(_shown(choices), gain, other))
    return sorted(gains, key=lambda advice: -advice.gain)


def memory_warning(
    config: Config, plan: TrainPlan, room: int | None = None, seconds: float = _FIT_SECONDS
) -> str:
    """Describe the memory that a rank needs and has, and overrides with which it fits; "" if it
    fits.

    room: bytes available for training on a rank, None = from the config, or this machine's;
    seconds: CPU time after which no other change is tried.
    """
    if (over := too_large(config, plan, room)) is None:
        return ""
    needed, room = over
    text = f"a rank would take about {units.size(needed)}, and has {units.size(room)}"
    end = time.process_time() + seconds
    changed: Choices = {}
    for key in _SMALLER:
        if time.process_time() > end:
            break
        choices = _smaller(key, config, plan)
        smaller = with_choices(config, choices)
        if not choices or validate.problems(smaller):
            continue
        try:
            other = make_plan(smaller, device_memory=lambda: room)
        except ConfigError:
            continue
        smaller_peak = other.peak_bytes()
        if smaller_peak is None or smaller_peak >= needed:
            continue
        changed |= choices
        config, plan, needed = smaller, other, smaller_peak
        if smaller_peak <= room:
            return f"{text}; with {_shown(changed)} it would take {units.size(smaller_peak)}"
    also = f", nor does it fit with {_shown(changed)}" if changed else ""
    return f"{text}{also}; more ranks, or a smaller model or seq_len"


def _shown(choices: Mapping[str, Any]) -> str:
    words = {key: str(value).lower() for key, value in choices.items()}
    return " ".join(f"{key}={word}" for key, word in words.items())


def _faster(estimate: Estimate) -> Iterator[Choices]:
    """Yield single changes that do not affect results, in the order of how often they help."""
    config, microbatches = estimate.config, estimate.plan.microbatches
    schedule: Any = config.schedule
    counts = hasattr(schedule, "microbatches")
    if config.precision.name == "fp32" and estimate.hardware.runs_ahead:
        yield {"precision": "bf16"}
    if config.precision.name == "mxfp8" and not estimate.hardware.mxfp8_flops:  # it is emulated
        yield {"precision": "float8"}
    if not config.compile and estimate.hardware.runs_ahead:
        yield {"compile": True}
    recompute = config.activation_checkpoint.name
    if recompute != "none" and estimate.plan.recomputed.count:
        others = (name for name in ("none", "fit", "selective") if name != recompute)
        yield from ({"activation_checkpoint": name} for name in others)
    if config.pp > 1 and counts:
        for name in ("zbvzerobubble", "interleaved1f1b", "1f1b"):
            if name != schedule.name:
                yield {"schedule": name, "schedule.microbatches": microbatches}
        if config.split.name != "auto":
            yield {"split": "auto"}
    yield from (
        {"fsdp.zero": zero} for zero in (1, 2) if estimate.plan.zero > zero and config.shards > 1
    )
    rows, grain = config.batch_size // config.dp, config.numerics.grain
    if config.exact and rows % (2 * grain) == 0 and getattr(schedule, "microbatches", 0) is None:
        yield {"numerics.grain": 2 * grain}
    if counts and not config.exact:
        sizes = (
            count for count in (2 * microbatches, microbatches // 2) if count and rows % count == 0
        )
        yield from ({"schedule.microbatches": count} for count in sizes)
    for key in ("tp", "pp"):
        size = getattr(config, key)
        if size > 1 and size % 2 == 0 and config.batch_size % (2 * config.dp) == 0:
            choices = {key: size // 2, "dp": 2 * config.dp}
            if getattr(schedule, "microbatches", None):
                choices["schedule.microbatches"] = max(1, schedule.microbatches // 2)
            yield choices


# Keys to change in this order, each on top of the previous ones: cheap ones first, then those that
# cost FLOPs, traffic, and more ranks
_SMALLER = (
    *("schedule.microbatches", "loss", "activation_checkpoint", "fsdp.zero"),
    *("dp", "dp", "dp", "pp", "pp", "pp"),
)


def _smaller(key: str, config: Config, plan: TrainPlan) -> Choices:
    """A value of this key that takes less memory; {} if there is none."""
    schedule: Any = config.schedule
    rows, dp = config.batch_size // config.dp, 2 * config.dp
    grain = config.numerics.grain if config.exact else 1
    match key:
        case "schedule.microbatches" if config.exact:
            changes_grain = getattr(schedule, "microbatches", 0) is None and grain > 1
            return {"numerics.grain": 1} if changes_grain else {}
        case "schedule.microbatches":
            fewer = hasattr(schedule, "microbatches") and plan.microbatches < rows
            return {key: rows} if fewer else {}
        case "loss":
            return {key: "chunked_cross_entropy"} if type(config.loss) is CrossEntropy else {}
        case "activation_checkpoint":
            return {key: "fit"} if config.activation_checkpoint.name != "fit" else {}
        case "fsdp.zero":
            changes_grain = config.shards > 1 and plan.zero != 3
            return {key: 3} if changes_grain and not plan.order.splits_backward else {}
        case "dp" if config.batch_size % dp == 0:
            if (count := getattr(schedule, "microbatches", None)) is None:
                return {key: dp}
            return {key: dp, "schedule.microbatches": min(count, config.batch_size // dp // grain)}
        case "pp":
            return {key: 2 * config.pp}
    return {}
