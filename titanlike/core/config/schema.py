"""Every config key, as plain dataclasses: one for each set of keys, one doc line for each key.

A group's choice is a YAML file in `conf/`; its `name` selects the dataclass of its other keys
(`VARIANTS`). Any other `name` is the import path of user code, and the keys are its keyword
arguments (`Custom`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from titanlike.core.config import keys
from titanlike.core.config.groups import computation, jobs, optimization, pipeline, watching
from titanlike.core.config.groups.data import (
    ChatData,
    HFData,
    MixtureData,
    RampStage,
    StreamData,
    SyntheticData,
    TextData,
    TokenData,
)
from titanlike.core.config.groups.hardware import CpuHardware, Hardware, NoHardware
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer, Model
from titanlike.core.config.keys import MAX_RANKS, Seconds, key
from titanlike.core.config.optimizer import Optimizer, optimizer_kinds
from titanlike.core.config.optimizers.adamw import AdamW

OBJECTIVES = ("val_loss", "loss", "tokens_per_second", "samples_per_second", "step_seconds", "mfu")
OBJECTIVES += ("memory_bytes",)
MESH_AXES = ("pp", "dp", "cp", "tp")  # their product is the world size; ep is within them
LAYER_AXES = MESH_AXES[3:]  # axes whose ranks each hold a shard of every layer


@dataclass
class Config:
    """The config of one run."""

    pp: int = key(1, "pipeline-parallel ranks", ge=1, le=256)
    dp: int = key(1, "data-parallel ranks, sharded (FSDP) and replicated", ge=1, le=MAX_RANKS)
    tp: int = key(
        1, "tensor-parallel ranks: each has a shard of every layer (needs a tp plan)", ge=1, le=256
    )
    tp_sequence: bool = key(
        True, "shard the sequence between sharded layers, where the tp plan says so"
    )
    tp_check: bool = key(
        True, "refuse a tp plan not known to be right; false = warn; prove it with verify"
    )
    tp_async: bool = key(
        False, "overlap tp's collectives with matmuls (compiled blocks on NVIDIA GPUs)"
    )
    cp: int = key(1, "context-parallel ranks: each has a shard of every sequence", ge=1, le=1024)
    context_parallel: Literal["auto", "gather", "ulysses", "ring"] = key(
        "auto",
        "attention under cp: gather = all-gather keys and values; ulysses = all-to-all of heads "
        "for tokens; ring = pass keys and values around; auto = as heads and masks allow",
    )
    ep: int = key(
        1,
        "expert-parallel ranks, each with a shard of every layer's experts; taken from dp x cp, or"
        " dp x cp x tp if ep does not divide dp x cp",
        ge=1,
    )
    replicate: int = key(1, "replicas among dp: 1 = FSDP, dp = replication, between = HSDP", ge=1)
    device: Literal["auto", "cpu", "cuda", "xpu"] = key(
        "auto", "auto = the machine's GPUs (accelerators), else the CPU"
    )
    batch_size: int = key(16, "GLOBAL batch, in sequences per optimizer step over all of dp", ge=1)
    seq_len: int = key(128, "tokens in a sequence", ge=1, le=2**27)
    ramp: list[RampStage] = key(
        [],
        "smaller batches or shorter sequences until this many tokens, in order: [{tokens: 1000000,"
        " batch_size: 4}, {tokens: 4000000, seq_len: 64}]",
    )
    steps: int = key(300, "optimizer steps in total", ge=1)
    max_tokens: int | None = key(
        None, "end the run after this many tokens; null = no limit", gt=0, example=1_000_000
    )
    max_time: Seconds | None = key(
        None, "save and stop after this time (90m, 11h30m, 11:30:00, or seconds); null = no limit"
    )
    mixes_samples: bool = key(
        False,
        "allow a model or loss that couples a batch's samples: results then depend on the layout",
    )
    seed: int = key(0, "seed of the initial weights and of the data order", le=2**63 - 1)
    matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest", "precision of fp32 matmuls: high = TensorFloat-32 on GPUs, medium = bf16"
    )
    compile: bool = key(False, "compile each block with torch.compile (inductor)")
    deterministic: bool = key(False, "deterministic kernels only; an operation without one fails")
    on_nonfinite: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "if loss or gradient is not finite: stop; skip the update; rollback = return to the "
        "checkpoint and skip the batches since",
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = key(
        "ignore", "the same, if loss or gradient norm is far above recent steps'"
    )
    spike_zscore: float = key(6.0, "standard deviations above the mean that count as a spike", gt=0)
    spike_window: int = key(
        100, "recent steps in that mean; detection needs half of them", ge=2, le=1_000_000
    )
    run_dir: str = key(
        "outputs/run",
        "output folder; a run in it resumes; if not given, outputs/DATE/TIME",
        keys.PATH,
        example="outputs/NAME",
    )
    value: str | None = key(
        None,
        "a sweep's objective: val_loss (null), loss, tokens_per_second (samples_per_second), "
        "step_seconds, mfu, memory_bytes, val_loss/SET, or your metric (-NAME = lower is better)",
    )
    log_every: int = key(10, "steps between printed lines; metrics.jsonl has every step", ge=1)
    gc_every: int = key(
        50,
        "steps between Python's garbage collections, on all ranks at once; 0 = left to Python",
        ge=0,
    )
    report: bool = key(True, "write report.html, a page of curves and events, when a run ends")
    plan: Literal["warn", "strict"] = key(
        "warn", "if predicted memory exceeds the device's: warn, or strict = refuse"
    )
    # the model's keys are its constructor's arguments: see titanlike/models
    model: Model = key(lambda: Model("llama"), "model family or import path, and its arguments")
    split: pipeline.EvenSplit | pipeline.PointSplit | pipeline.BalanceSplit | pipeline.AutoSplit = (
        key(pipeline.EvenSplit, "where stages begin")
    )
    schedule: (
        pipeline.Schedule | pipeline.CsvSchedule | pipeline.AutoSchedule | pipeline.CustomSchedule
    ) = key(pipeline.Schedule, "pipeline schedule")
    data: (
        TextData | HFData | TokenData | MixtureData | ChatData | StreamData | SyntheticData | Custom
    ) = key(TextData, "training data")
    optimizer: Optimizer | CustomOptimizer = key(AdamW, "optimizer")
    ema: optimization.Ema = key(optimization.Ema, "average of the weights")
    lr: optimization.ConstantLr | optimization.DecayLr | optimization.WsdLr | Custom = key(
        optimization.WsdLr, "learning-rate schedule"
    )
    loss: (
        optimization.CrossEntropy | optimization.ChunkedCrossEntropy | optimization.Mse | Custom
    ) = key(optimization.CrossEntropy, "loss function")
    precision: computation.Precision = key(computation.Precision, "compute precision")
    numerics: computation.Numerics = key(
        computation.Numerics, "order of sums: fast, or bitwise equal in all layouts"
    )
    activation_checkpoint: computation.ActivationCheckpoint = key(
        computation.ActivationCheckpoint, "which activations are recomputed in the backward"
    )
    fsdp: computation.Fsdp = key(computation.Fsdp, "sharding inside a stage")
    metrics: watching.Metrics = key(watching.Metrics, "what is recorded of each step")
    validation: jobs.Validation = key(jobs.Validation, "loss on the validation data")
    sample: jobs.Sample = key(jobs.Sample, "texts written by the model during training")
    evaluate: jobs.Evaluate = key(jobs.Evaluate, "perplexity of a checkpoint")
    verify: jobs.Verify = key(jobs.Verify, "comparison with one process")
    bench: jobs.Bench = key(jobs.Bench, "comparison with a plain PyTorch loop")
    checkpoint: jobs.Checkpoint = key(jobs.Checkpoint, "saving and resuming")
    logger: watching.Wandb | watching.TensorBoard | watching.NoLogger = key(
        watching.Wandb, "metrics sink besides metrics.jsonl"
    )
    profile: watching.NoProfile | watching.TraceProfile | watching.MemoryProfile = key(
        watching.NoProfile, "detailed recording of a few steps, into run_dir/profile"
    )
    timeline: watching.Timeline = key(
        watching.Timeline, "a few steps as they were computed, rank by rank"
    )
    hardware: NoHardware | Hardware = key(
        NoHardware, "devices and links that a plan assumes (titanlike plan)"
    )
    launch: jobs.Launch = key(jobs.Launch, "launching and monitoring the workers")
    sweep: jobs.Sweep = key(jobs.Sweep, "many runs from one command (-m)")

    @property
    def world_size(self) -> int:
        """Number of processes of the mesh."""
        return prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes and their sizes; cp and tp only if > 1."""
        sizes = {axis: int(getattr(self, axis)) for axis in MESH_AXES}
        return {axis: n for axis, n in sizes.items() if n != 1 or axis in ("pp", "dp")}

    @property
    def model_ranks(self) -> int:
        """Ranks that process the batch of one dp rank: pp x cp x tp."""
        return prod(getattr(self, axis) for axis in MESH_AXES if axis != "dp")

    @property
    def layer_ranks(self) -> int:
        """Ranks that each hold a shard of every layer."""
        return prod(getattr(self, axis) for axis in LAYER_AXES)

    @property
    def shards(self) -> int:
        """Ranks over which FSDP shards a stage's weights: dp within one replica, times cp."""
        return self.dp // self.replicate * self.cp

    @property
    def ep_shards(self) -> int:
        """Of `shards`, adjacent ranks that have different experts. An `ep` that does not divide
        `shards` takes tp's ranks, too."""
        return self.ep // self.tp if self.shards % self.ep else self.ep

    @property
    def fitting_ep(self) -> int:
        """`ep`, or the largest below it that the mesh has ranks for: a divisor of `shards`, or tp
        times one."""
        divisors = (n for n in range(1, min(self.shards, self.ep) + 1) if self.shards % n == 0)
        sizes = (size for n in divisors for size in (n, n * self.tp))
        return max((size for size in sizes if size <= self.ep), default=1)

    @property
    def exact(self) -> bool:
        """Whether results must be bitwise equal in all layouts."""
        return self.numerics.name == "exact"

    @property
    def last_step(self) -> int:
        """The last step of the run: `steps`, or the first step that reaches `max_tokens`."""
        if self.max_tokens is None:
            return self.steps
        steps, left = 0, self.max_tokens
        for stage_steps, size, length in self.ramp_stages():
            more = min(stage_steps, -(-left // (size * length)))
            steps, left = steps + more, left - more * size * length
            if left <= 0:
                break
        return min(self.steps, steps)

    def ramp_stages(self) -> Iterator[tuple[int, int, int]]:
        """Yield (steps, sequences per batch, tokens per sequence) of each stage of `ramp`, then of
        the rest."""
        done = 0
        for stage in self.ramp:
            size, length = stage.batch_size or self.batch_size, stage.seq_len or self.seq_len
            steps = max(0, -(-(stage.tokens - done) // (size * length)))
            done += steps * size * length
            yield steps, size, length
        yield sys.maxsize, self.batch_size, self.seq_len

    def tokens(self, steps: int) -> int:
        """Return the number of tokens in the first `steps` steps, padding included."""
        total = 0
        for stage_steps, size, length in self.ramp_stages():
            total += min(steps, stage_steps) * size * length
            steps = max(0, steps - stage_steps)
        return total

    def batch_shape(self, step: int) -> tuple[int, int]:
        """Return (sequences, tokens per sequence) of the global batch of a step, counted from 1."""
        for stage_steps, size, length in self.ramp_stages():
            if step <= stage_steps:
                return size, length
            step -= stage_steps
        raise AssertionError("the last stage has no end")

    @property
    def timeline_steps(self) -> tuple[int, int]:
        """The first and last step that a timeline records."""
        if self.timeline.steps:
            return self.timeline.steps[0], self.timeline.steps[1]
        last = self.last_step
        usual = max(1, min(11, last - 1))  # compilation and allocation are over by then
        every = [e for e in (self.validation, self.checkpoint, self.sample) if e.every]

        def plain(step: int) -> bool:
            return step < last and not any(step % each.every == 0 for each in every)

        firsts = (*range(usual, min(last, usual + 200)), *range(usual - 1, 1, -1))
        first = next((step for step in firsts if plain(step) and plain(step + 1)), usual)
        return first, min(last, first + 1)


def _by_name(*choices: Any) -> dict[str, Any]:
    return {choice.name: choice for choice in choices}


# group -> name of the choice -> dataclass of its keys
VARIANTS: dict[str, dict[str, type[Any]]] = {
    "split": _by_name(
        pipeline.EvenSplit,
        pipeline.PointSplit,
        pipeline.TraceSplit,
        pipeline.BalanceSplit,
        pipeline.AutoSplit,
    ),
    "schedule": {
        **dict.fromkeys(("gpipe", "1f1b"), pipeline.Schedule),
        **dict.fromkeys(("interleaved1f1b", "loopedbfs"), pipeline.LoopedSchedule),
        "interleavedzerobubble": pipeline.LoopedZeroBubbleSchedule,
        **dict.fromkeys(("zbh1", "zbh2", "vhalf", "vmin"), pipeline.ZeroBubbleSchedule),
        **dict.fromkeys(("zbvzerobubble", "dualpipev"), pipeline.ZeroBubbleSchedule),
        **_by_name(pipeline.CsvSchedule, pipeline.AutoSchedule),
    },
    "data": _by_name(TextData, HFData, TokenData, MixtureData, ChatData, StreamData, SyntheticData),
    "optimizer": optimizer_kinds(),
    "lr": {
        "constant": optimization.ConstantLr,
        "linear": optimization.DecayLr,
        "cosine": optimization.DecayLr,
        "wsd": optimization.WsdLr,
    },
    "loss": _by_name(optimization.CrossEntropy, optimization.ChunkedCrossEntropy, optimization.Mse),
    "precision": {
        "fp32": computation.Precision,
        "bf16": computation.Precision,
        **_by_name(computation.Float8Precision, computation.Mxfp8Precision),
    },
    "activation_checkpoint": {
        **dict.fromkeys(("none", "full"), computation.ActivationCheckpoint),
        **_by_name(
            computation.SelectiveActivationCheckpoint, computation.EveryActivationCheckpoint
        ),
        **_by_name(computation.FitActivationCheckpoint),
    },
    "numerics": dict.fromkeys(("fast", "exact"), computation.Numerics),
    "verify": dict.fromkeys(("auto", "required", "off"), jobs.Verify),
    "logger": _by_name(watching.Wandb, watching.TensorBoard, watching.NoLogger),
    "profile": _by_name(watching.NoProfile, watching.TraceProfile, watching.MemoryProfile),
    "hardware": {
        **_by_name(NoHardware),
        **dict.fromkeys(("a100_40g", "a100_80g", "h100_sxm", "h100_pcie", "h200"), Hardware),
        **dict.fromkeys(("b200", "gb200", "mi300x"), Hardware),
        "cpu": CpuHardware,
    },
}

# groups whose `name` may be an import path of the user's own
OPEN_GROUPS = ("model", "schedule", "data", "optimizer", "lr", "loss")
