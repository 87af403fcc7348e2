"""Everything that can be declared, one dataclass a config group, one doc line a key.

A group's choice is a YAML file in `conf/`; its `name` says which dataclass below reads the rest of
its keys (`VARIANTS`). Where a dataclass is not among them, `name` is an import path of your own
(`package.module.attribute`) and the keys are that callable's keyword arguments (`Custom`).

These are plain data: no torch, no Hydra, so `--help` and error messages are quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titanlike.config.fields import Custom, Seconds, key
from titanlike.config.groups import (
    AdamW,
    AutoSplit,
    BalanceSplit,
    ChunkedCrossEntropy,
    ConstantLr,
    CrossEntropy,
    CsvSchedule,
    DecayLr,
    EvenSplit,
    LoopedSchedule,
    Mse,
    NoLogger,
    PointSplit,
    Precision,
    Schedule,
    Sgd,
    SyntheticData,
    TensorBoard,
    TextData,
    TokenData,
    TraceSplit,
    Wandb,
    WsdLr,
)


@dataclass
class Fsdp:
    """FSDP2 inside each stage."""

    zero: Literal["auto", 1, 2, 3] = key(
        "auto",
        "what stays sharded during a step: 1 optimizer state, 2 also gradients, 3 also parameters; "
        "auto = 3 without a pipeline, 2 with one, 1 under zero-bubble schedules",
    )
    cpu_offload: bool = key(False, "keep shards and optimizer state in CPU memory")


@dataclass
class Validation:
    """Loss on held-out data."""

    every: int = key(100, "validate every so many steps and after the last; 0 = never")
    batches: int = key(4, "global batches in a validation, the same ones each time")


@dataclass
class Checkpoint:
    """Distributed checkpoints, whole or not there."""

    folder: str | None = key(
        None, "a path, or a URL that fsspec knows (s3://...); null = run_dir/checkpoints"
    )
    every: int = key(100, "save every so many steps; 0 = not between")
    last: bool = key(True, "save after the last step")
    mode: Literal["sync", "async", "async_pinned"] = key(
        "sync",
        "async = training goes on while a copy in memory is written; async_pinned = into buffers "
        "that are kept (pinned with a GPU)",
    )
    keep: int = key(10, "newest checkpoints that are kept; 0 = all")
    keep_every: int = key(0, "those of every so many steps are kept for good; 0 = none")
    keep_best: int = key(0, "so many with the lowest validation loss are kept, too")
    model_only: Literal["none", "fp32", "bf16", "fp16"] = key(
        "none", "after the last step also save the model alone, in this dtype (model-XXXXXXXX)"
    )
    resume: str = key("auto", "auto = newest whole one, never, or the path of a checkpoint")
    start_from: str | None = key(
        None, "checkpoint or run whose weights alone a new run starts from (warm start)"
    )
    strict: bool = key(
        True, "start_from must have every parameter and no other; false = list what differs"
    )
    rename: list[str] = key([], "start_from's names that differ: [old:new], beginnings of names")
    timeout: float = key(1800.0, "seconds after which a save or a load is an error")


@dataclass
class Launch:
    """Starting and watching the workers."""

    timeout: float = key(
        600.0, "seconds after which a wait for another rank, or the first step, is an error"
    )
    step_timeout: float = key(
        300.0, "seconds without progress in a later step that count as a hang; 0 = never"
    )
    heartbeat: float = key(10.0, "seconds between a rank's signs of life, logs/rankN.heartbeat")
    max_restarts: int = key(0, "times that failed workers are started again, from the checkpoint")
    elastic: bool = key(
        False, "dp follows the number of ranks that torchrun has started: --nnodes 1:2"
    )


@dataclass
class Sweep:
    """How the jobs of a sweep (`-m`) are run."""

    resume: bool = key(False, "run what is not done of the sweep in run_dir; stopped jobs go on")
    parallel: int = key(1, "jobs at a time on this machine; 0 = as many as have a device (a core)")
    submit: str | None = key(
        None, "hand each job to this command instead, 'sbatch tools/slurm/train.sbatch'"
    )
    wait: Seconds | None = key(
        None, "with submit: wait so long (12h) for the jobs' ends; null = not at all"
    )
    share: str | None = key(
        None, "i/n: run only every n-th job, from the i-th (0 = first) on; for job arrays"
    )


@dataclass
class Config:
    """One run."""

    pp: int = key(1, "pipeline-parallel ranks")
    dp: int = key(1, "data-parallel ranks, sharded (FSDP) and replicated together")
    replicate: int = key(1, "replicas among dp: 1 = FSDP, dp = replication, between = HSDP")
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "auto = CUDA with NCCL where there is a GPU"
    )
    batch_size: int = key(16, "GLOBAL batch in sequences an optimizer step, over all of dp")
    seq_len: int = key(128, "tokens in a sequence")
    steps: int = key(300, "optimizer steps in all")
    max_tokens: int | None = key(None, "the run is done after so many tokens; null = no limit")
    max_time: Seconds | None = key(
        None, "save and stop after this time (90m, 11h30m, 11:30:00, or seconds); null = no limit"
    )
    seed: int = key(0, "initial weights and order of the data")
    deterministic: bool = key(False, "torch's deterministic kernels only, or an error")
    on_nonfinite: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "loss or gradient not finite: stop; skip the update; rollback = go back to the checkpoint "
        "and leave the batches since then out",
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = key(
        "ignore", "the same for a loss or gradient norm far above the last steps'"
    )
    spike_zscore: float = key(6.0, "standard deviations above the mean that make a spike")
    spike_window: int = key(100, "steps of that mean; half of them must be there to judge")
    run_dir: str = key(
        "outputs/run",
        "where everything is written; started again, it goes on; left out = outputs/DATE/TIME",
    )
    value: (
        Literal["val_loss", "loss", "tokens_per_second", "step_seconds", "mfu", "memory_bytes"]
        | None
    ) = key(
        None,
        "what a sweep compares, result.json's value; null = val_loss, or loss without validation",
    )
    log_every: int = key(10, "steps between printed lines (metrics.jsonl has every step)")
    # the model's keys are its constructor's arguments: see titanlike/models
    model: Custom = key(lambda: Custom("llama"), "model family or import path, and its arguments")
    split: EvenSplit | PointSplit | BalanceSplit | AutoSplit = key(EvenSplit, "where stages begin")
    schedule: Schedule | LoopedSchedule | CsvSchedule | Custom = key(Schedule, "order of computing")
    data: TextData | TokenData | SyntheticData | Custom = key(TextData, "what is trained on")
    optimizer: AdamW | Sgd = key(AdamW, "optimizer")
    lr: ConstantLr | DecayLr | WsdLr = key(WsdLr, "learning rate over the steps")
    loss: CrossEntropy | ChunkedCrossEntropy | Mse | Custom = key(CrossEntropy, "what is minimized")
    precision: Precision = key(Precision, "number formats")
    fsdp: Fsdp = key(Fsdp, "sharding inside a stage")
    validation: Validation = key(Validation, "loss on held-out data")
    checkpoint: Checkpoint = key(Checkpoint, "what is kept of a run")
    logger: Wandb | TensorBoard | NoLogger = key(Wandb, "where metrics go besides metrics.jsonl")
    launch: Launch = key(Launch, "starting and watching the workers")
    sweep: Sweep = key(Sweep, "many runs by one command (-m)")

    @property
    def world_size(self) -> int:
        """Processes that the mesh needs."""
        return self.pp * self.dp


# group -> name of the choice -> dataclass of its keys
VARIANTS: dict[str, dict[str, type]] = {
    "split": {
        "even": EvenSplit,
        "points": PointSplit,
        "trace": TraceSplit,
        "balance": BalanceSplit,
        "auto": AutoSplit,
    },
    "schedule": {
        "gpipe": Schedule,
        "1f1b": Schedule,
        "interleaved1f1b": LoopedSchedule,
        "loopedbfs": LoopedSchedule,
        "interleavedzerobubble": LoopedSchedule,
        "zbvzerobubble": Schedule,
        "dualpipev": Schedule,
        "csv": CsvSchedule,
    },
    "data": {"text": TextData, "tokens": TokenData, "synthetic": SyntheticData},
    "optimizer": {"adamw": AdamW, "sgd": Sgd},
    "lr": {"constant": ConstantLr, "linear": DecayLr, "cosine": DecayLr, "wsd": WsdLr},
    "loss": {
        "cross_entropy": CrossEntropy,
        "chunked_cross_entropy": ChunkedCrossEntropy,
        "mse": Mse,
    },
    "precision": {"fp32": Precision, "bf16": Precision},
    "logger": {"wandb": Wandb, "tensorboard": TensorBoard, "none": NoLogger},
}

# groups whose `name` may be an import path of the user's own
OPEN_GROUPS = ("model", "schedule", "data", "loss")
