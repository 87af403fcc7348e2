"""What is recorded of a run, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titanlike.core.config import keys
from titanlike.core.config.keys import key


@dataclass
class Wandb:
    """Weights & Biases: offline into run_dir/wandb, online if asked for."""

    name: str = key("wandb", "choice")
    project: str | None = key(None, "project; null = WANDB_PROJECT, else titanlike", keys.PROJECT)
    entity: str | None = key(None, "user or team; null = the key's default", keys.PROJECT)
    run_name: str | None = key(
        None, "name; null = WANDB_NAME, else the overrides, else the folder's name", keys.NAME
    )
    group: str | None = key(None, "group of the run", keys.NAME)
    tags: list[str] = key([], "tags of the run: [a,b]", keys.TAG, example=["a", "b"])
    notes: str | None = key(None, "description of the run")
    mode: Literal["auto", "online", "offline"] = key("auto", "auto = WANDB_MODE, else offline")
    timeout: float = key(30.0, "seconds to wait for the server before going offline", gt=0, le=1e6)


@dataclass
class TensorBoard:
    """TensorBoard event files in run_dir/tensorboard (needs the extra titanlike[tensorboard])."""

    name: str = key("tensorboard", "choice")


@dataclass
class NoLogger:
    """Only metrics.jsonl."""

    name: str = key("none", "choice")


TIMELINE = "timeline.json"  # in a run's directory


@dataclass
class NoProfile:
    """Nothing is recorded."""

    name: str = key("none", "choice")


@dataclass
class MemoryProfile(NoProfile):
    """Allocations: on a GPU a memory snapshot, on a CPU a trace."""

    name: str = key("memory", "choice")
    steps: list[int] = key([10, 12], "first and last recorded step")
    ranks: list[int] = key([], "ranks that write: [0,8]; [] = the first of each pipeline rank")


@dataclass
class TraceProfile(MemoryProfile):
    """When each operator, kernel and schedule action began and ended, for Perfetto."""

    name: str = key("trace", "choice")
    stacks: bool = key(False, "record Python stacks, too: slower, larger files")


@dataclass
class Timeline:
    """When each rank computed, waited and communicated, compared with the plan (tools/timeline.py)."""

    enabled: bool = key(False, "record; timeline=true is short for timeline.enabled=true")
    steps: list[int] = key(
        [],
        "first and last recorded step: [10,11]; [] = two after step ten without validation, save or sample",
    )


@dataclass
class Metrics:
    """Additional metrics in metrics.jsonl."""

    microbatch_losses: bool = key(
        False, "record the loss of each microbatch, in the order of the global batch"
    )
    own: dict[str, str] | None = key(
        None,
        "your metrics, {accuracy: package.function}; a function of (output, targets) that returns a sum and a count",
    )
