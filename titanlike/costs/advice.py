"""What would make a step shorter: a few changes of the command line, each planned like the line itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from titanlike.config import validate
from titanlike.config.errors import ConfigError
from titanlike.config.groups import (
    ActivationCheckpoint,
    AutoSplit,
    FitActivationCheckpoint,
    LoopedSchedule,
    Precision,
    Schedule,
    SelectiveActivationCheckpoint,
    ZeroBubbleSchedule,
)
from titanlike.config.schema import Config
from titanlike.costs.plan import Plan, make_plan

_SECONDS = 3.0  # of this process; after them nothing else is tried
_LEAST = 0.01  # gain that is worth a line


@dataclass(frozen=True)
class Advice:
    """Overrides, and what a step gains by them: a share of its speed."""

    overrides: str
    gain: float
    plan: Plan

    def __str__(self) -> str:
        return f"{self.overrides} gains {self.gain:.0%}"


def advise(plan: Plan, seconds: float = _SECONDS) -> list[Advice]:
    """Single changes that fit and are faster, the best first."""
    end = time.process_time() + seconds
    found = []
    for overrides, config in _changes(plan):
        if time.process_time() > end:
            break
        if validate.problems(config):
            continue
        try:
            other = make_plan(config, plan.hardware, checked=plan.draft.transforms)
        except (ConfigError, ValueError):
            continue
        gain = plan.step_seconds / other.step_seconds - 1
        if other.fits and gain > _LEAST:
            text = " ".join(f"{key}={value}" for key, value in overrides.items())
            found.append(Advice(text, gain, other))
    return sorted(found, key=lambda advice: -advice.gain)


def _changes(plan: Plan) -> Iterator[tuple[dict[str, Any], Config]]:
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
