"""What a run's timeline says of the units of a model, in any layout of it.

A stage's seconds are those of its units by their FLOPs: units of one stage cannot be told apart, and two
runs with other stages say more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titanlike.config.parse import parse
from titanlike.config.profile import TIMELINE
from titanlike.config.schema import Config
from titanlike.costs.unit_costs import CostError
from titanlike.metrics.timeline_file import Timeline, read_timeline, stage_seconds

Seconds = tuple[float, float, float]  # forward, input gradient, weight gradient of a microbatch


def run_timeline(run: str) -> Timeline:
    """Raises CostError where there is none."""
    path = Path(run) / TIMELINE
    try:
        return read_timeline(path)
    except OSError as error:
        raise CostError(
            f"{path} cannot be read: {error.strerror}; timeline=true writes it"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CostError(f"{path} is no timeline: {type(error).__name__} {error}") from None


def seconds_of_units(
    run: str, names: Sequence[str], flops: Sequence[int], config: Config, microbatch: int
) -> list[Seconds]:
    """Of each unit in a run of `config`. flops: of each, forward and backward; microbatch: its samples.

    Raises CostError where the run is of another model.
    """
    timeline = run_timeline(run)
    weight = dict(zip(names, flops, strict=True))
    known = [name for stage in timeline.stages for name in stage]
    if known != [*names]:
        other = next((b for a, b in zip(names, known, strict=False) if a != b), "")
        raise CostError(f"{run} is a run of another model: it has {other or len(known)}")
    before = parse(timeline.config)[0]
    scale = microbatch * config.seq_len / (config.cp * config.tp)
    scale /= timeline.microbatch * before.seq_len / (before.cp * before.tp)
    found: dict[str, Seconds] = {}
    for stage, inside in enumerate(timeline.stages):
        seconds = stage_seconds(timeline, stage)
        forward, backward = seconds["F"], seconds["B"]
        if before.activation_checkpoint.name == "full":
            backward = max(0.0, backward - forward)
        inputs, weights = seconds["I"] + backward / 2, seconds["W"] + backward / 2
        total = sum(weight[name] for name in inside)
        for name in inside:
            share = scale * (weight[name] / total if total else 1 / len(inside))
            found[name] = forward * share, inputs * share, weights * share
    return [found[name] for name in names]
