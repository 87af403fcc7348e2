"""How long a stage's forward or backward takes where FSDP gathers and reduces its units meanwhile.

FSDP's collectives are in one stream of the device, one after the other: the gather of the unit that
runs next begins when a unit begins, the reduction of its gradients when it ends. The host is ahead, so
the first unit's gather came while the stage before was computed.
"""

from __future__ import annotations

from collections.abc import Sequence


def forward_seconds(units: Sequence[float], gathers: Sequence[float]) -> float:
    """units, gathers: seconds of each unit, in the order in which they run; no gathers = none."""
    if not any(gathers):
        return sum(units)
    end, link, ready = 0.0, gathers[0], 0.0
    for at, seconds in enumerate(units):
        start = max(end, ready)
        if at + 1 < len(units):
            link = max(link, start) + gathers[at + 1]
            ready = link
        end = start + seconds
    return max(end, link)


def backward_seconds(
    units: Sequence[float], gathers: Sequence[float], reductions: Sequence[float]
) -> float:
    """As `forward_seconds`, in the order of the backward. It ends when all is reduced."""
    if not any(gathers) and not any(reductions):
        return sum(units)
    end, ready = 0.0, 0.0
    link = gathers[0] if gathers else 0.0
    for at, seconds in enumerate(units):
        start = max(end, ready)
        if gathers and at + 1 < len(units):
            link = max(link, start) + gathers[at + 1]
            ready = link
        end = start + seconds
        if reductions:
            link = max(link, end) + reductions[at]
    return max(end, link)
