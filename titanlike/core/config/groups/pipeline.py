"""Where the stages of a pipeline begin, and the order of their computations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.keys import Bytes, key, required


@dataclass
class EvenSplit:
    """Contiguous stages that minimize the largest number of blocks in a stage."""

    name: str = key("even", "choice")
    embedding_weight: float = key(1.0, "weight of the modules before the blocks, in blocks", ge=0)
    head_weight: float = key(1.0, "weight of the modules after the blocks, in blocks", ge=0)


@dataclass
class PointSplit:
    """Stages that begin at named modules."""

    name: str = key("points", "choice")
    points: list[str] = key([], "modules where a stage begins: [model.layers.3,model.layers.6]")


@dataclass
class TraceSplit(PointSplit):
    """Stages that begin at named modules of any depth, cut from the graph that torch.export traces."""

    name: str = key("trace", "choice")


@dataclass
class BalanceSplit:
    """A number of blocks for every stage."""

    name: str = key("balance", "choice")
    balance: list[int] = key([], "blocks in each stage, first stage first, e.g. [3,3,2]")


@dataclass
class AutoSplit:
    """Stages that minimize the time of the slowest rank, by the modules' estimated or measured
    costs."""

    name: str = key("auto", "choice")
    cost: Literal["params", "flops", "time", "memory"] = key(
        "flops",
        "cost that is balanced: params; flops of a step; time measured on the device; memory of "
        "state and activations",
    )


@dataclass
class Schedule:
    """A schedule without a split backward, with one stage on each pipeline rank."""

    name: str = key("1f1b", "choice")
    microbatches: int | None = key(None, "number per dp rank and step; null = derived", le=100_000)


@dataclass
class LoopedSchedule(Schedule):
    """A schedule with several stages on each pipeline rank."""

    name: str = key("interleaved1f1b", "choice")
    stages_per_rank: int = key(2, "stages (model chunks) on each pipeline rank", ge=1, le=256)


_WEIGHT_GRADIENTS = "deferred = linear layers' in W, which fills the bubble; together = all in I, with the least memory"


@dataclass
class ZeroBubbleSchedule(Schedule):
    """A schedule with a split backward (input and weight gradients), with one stage per rank (zbh1,
    zbh2) or two in a V."""

    name: str = key("zbvzerobubble", "choice")
    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)


@dataclass
class LoopedZeroBubbleSchedule(LoopedSchedule):
    """A schedule with a split backward and several stages on each pipeline rank."""

    name: str = key("interleavedzerobubble", "choice")
    stages_per_rank: int = key(2, "stages (model chunks) on each pipeline rank", ge=2, le=256)
    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)


@dataclass(kw_only=True)
class CsvSchedule:
    """A schedule from a file: a row per pipeline rank, cells like 0F0, 0B0, 0I0, 0W0."""

    name: str = key("csv", "choice")
    path: str = required("CSV file, which determines microbatches and stages")
    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)


@dataclass
class AutoSchedule:
    """A schedule optimized for this model's stage costs, saved as order.csv in run_dir."""

    name: str = key("auto", "choice")
    microbatches: int | None = key(None, "number per dp rank and step; null = derived", le=100_000)
    stages_per_rank: int = key(
        2, "stages on each pipeline rank; a maximum if search=placement|split", ge=1, le=256
    )
    placement: Literal["v", "loop"] = key(
        "v", "ranks of the stages: loop = 0 1 2 0 1 2; v = 0 1 2 2 1 0 (two a rank)"
    )
    search: Literal["order", "placement", "split"] = key(
        "placement",
        "what is searched: order; placement = also stages per rank and placement; split = also where stages begin",
    )
    memory: float | None = key(
        None,
        "limit of a rank's activation memory, relative to 1f1b; null = 1.0, or memory_bytes and "
        "in_flight; all limits hold",
        gt=0,
        example=1.0,
    )
    memory_bytes: Bytes | None = key(
        None, "limit of a rank's activation memory in bytes, such as 40GiB; null = none"
    )
    in_flight: float | None = key(
        None,
        "limit of microbatches in flight on a rank, each in all its stages; null = none",
        ge=1,
        example=1,
    )
    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)
    path: str | None = key(None, "CSV of a searched order; null = run_dir/order.csv, else search")


@dataclass
class CustomSchedule(Custom):
    """A user's schedule: a function (pp, microbatches, **args) -> Order."""

    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)
