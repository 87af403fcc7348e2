"""Stages that take the same time."""

from __future__ import annotations

from titanlike.costs.simulate import Duration, StageTimes
from titanlike.pipeline.order import Order


def equal_stages(order: Order, forward: float = 1.0, backward: float = 2.0) -> list[StageTimes]:
    """Of stages that together take a rank so long for a microbatch; messages take no time.

    Half of a split backward is W.
    """
    chunks = order.stages / len(order.ranks)
    half = Duration(backward / 2 / chunks)
    times = StageTimes(Duration(forward / chunks), Duration(backward / chunks), half, half)
    return [times] * order.stages
