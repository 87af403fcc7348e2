"""A step of every pipeline rank as boxes in time: what plans and timelines are drawn from. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = {
    "F": "forward",
    "again": "recomputation",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "gather": "gather",
    "reduce": "reduce",
    "update": "update",
    "agree": "agree on the norm",
    "data": "data",
    "host": "host",
    "other": "validation, save",
}


class Box(NamedTuple):
    """What a rank does for a while. kind: of KINDS; stage, mb: -1 of what belongs to none."""

    kind: str
    stage: int
    mb: int
    start: float  # seconds since the chart begins
    end: float

    @property
    def words(self) -> str:
        """forward stage 1 microbatch 3"""
        name = KINDS.get(self.kind, self.kind)
        name += f" stage {self.stage}" if self.stage >= 0 else ""
        return name + (f" microbatch {self.mb}" if self.mb >= 0 else "")


class Message(NamedTuple):
    """way: "F" to the next stage, "B" to the one before; stage: that which sends."""

    way: str
    stage: int
    mb: int
    sender: int
    receiver: int
    start: float
    end: float


class MemoryCurve(NamedTuple):
    """Of a rank."""

    seconds: list[float]
    nbytes: list[int]


@dataclass(frozen=True)
class Chart:
    title: str
    rows: list[list[Box]]  # of each pipeline rank
    first: list[int]  # each rank's first stage, drawn darker; -1 = it has none
    seconds: float  # until the end
    messages: list[Message] = field(default_factory=list)
    memory: list[MemoryCurve] = field(default_factory=list)  # of each rank; empty = unknown
    device_memory: int = 0  # bytes
