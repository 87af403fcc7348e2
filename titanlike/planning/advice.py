"""What a device lacks in memory, and the nearest layout that fits into it."""

from __future__ import annotations

import time
from typing import Any

from titanlike.core.config import validate
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.optimization import CrossEntropy
from titanlike.core.config.overrides import with_choices
from titanlike.core.config.schema import Config
from titanlike.core.metrics import units
from titanlike.core.training.preflight import too_large
from titanlike.core.training.train_plan import TrainPlan, make_plan

_SECONDS = 8.0  # CPU time after which no other change is tried

Choices = dict[str, Any]  # config key -> value, or config group -> name of a choice


def memory_warning(
    config: Config, plan: TrainPlan, room: int | None = None, seconds: float = _SECONDS
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


def _shown(choices: Choices) -> str:
    words = {key: str(value).lower() for key, value in choices.items()}
    return " ".join(f"{key}={word}" for key, word in words.items())


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
