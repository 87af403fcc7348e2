"""Everything that can be declared, one dataclass a config group, one doc line a key.

A group's choice is a YAML file in `conf/`; its `name` says which dataclass below reads the rest of
its keys (`VARIANTS`). Where a dataclass is not among them, `name` is an import path of your own
(`package.module.attribute`) and the keys are that callable's keyword arguments (`Custom`).

These are plain data: no torch, no Hydra, so `--help` and error messages are quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NewType

Seconds = NewType("Seconds", float)  # written as a number, or as 45s, 90m, 11h30m, 11:30:00


def key(default: Any, doc: str) -> Any:
    """A config field: its default and the line that `--help` prints for it."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"doc": doc})
    if callable(default):
        return field(default_factory=default, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def required(doc: str) -> Any:
    """A config field without a default: its choice is an error until the user gives it."""
    return field(metadata={"doc": doc})


@dataclass
class Custom:
    """A choice from outside: `name` is an import path, `args` its keyword arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


# --- split: where the model is cut into stages -------------------------------------------------


@dataclass
class EvenSplit:
    """Contiguous stages whose heaviest is as light as can be; every block weighs 1."""

    name: str = key("even", "choice")
    embedding_weight: float = key(1.0, "weight of what comes before the blocks, in blocks")
    head_weight: float = key(1.0, "weight of what comes after the blocks, in blocks")


@dataclass
class PointSplit:
    """Stages that begin at named modules."""

    name: str = key("points", "choice")
    points: list[str] = key([], "modules where a new stage begins, e.g. [layers.3,layers.6]")


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
    """Stages whose heaviest rank is as light as can be, by what the units cost."""

    name: str = key("auto", "choice")
    cost: Literal["params", "flops", "time", "memory"] = key(
        "flops",
        "params; flops of a training step; time, measured on the device; memory of state and "
        "activations",
    )


# --- schedule: the order of a pipeline's computations ------------------------------------------


@dataclass
class Schedule:
    """A schedule with one stage on each pipeline rank (gpipe, 1f1b), or two in a V (zbv, dualpipev)."""

    name: str = key("1f1b", "choice")
    microbatches: int | None = key(
        None, "parts that each dp rank's batch is cut into; null = derived and printed"
    )


@dataclass
class LoopedSchedule:
    """A schedule with several stages on each pipeline rank."""

    name: str = key("interleaved1f1b", "choice")
    microbatches: int | None = key(
        None, "parts that each dp rank's batch is cut into; null = derived and printed"
    )
    stages_per_rank: int = key(2, "stages (model chunks) on each pipeline rank")


@dataclass(kw_only=True)
class CsvSchedule:
    """An order read from a file: a row a pipeline rank, cells like 0F0, 0B0, 0I0, 0W0."""

    name: str = key("csv", "choice")
    path: str = required("CSV file; microbatches and stages are counted in it")


# --- data --------------------------------------------------------------------------------------


@dataclass
class TextData:
    """Text files, JSONL or Parquet, tokenized once into a cache and packed into sequences."""

    name: str = key("text", "choice")
    path: str | None = key(
        None,
        "file or folder (.txt .py .md ..., .jsonl, .parquet); null = this Python's own sources",
    )
    text_key: str = key("text", "field (JSONL) or column (Parquet) that holds the text")
    tokenizer: str = key("bytes", "'bytes' (built in) or the path of a tokenizer.json")
    validation_fraction: float = key(0.05, "share of the documents held out for validation")
    cache: str | None = key(None, "folder for tokenized files; null = ~/.cache/titanlike")
    documents: bool = key(
        False, "attention stays within each document of a sequence, where positions begin at 0"
    )
    workers: int = key(0, "loader processes a rank; 0 = load in the training process")


@dataclass(kw_only=True)
class TokenData:
    """A file of token ids, memory-mapped."""

    name: str = key("tokens", "choice")
    path: str = required("token file: .npy, or raw little-endian integers (.bin)")
    dtype: Literal["uint16", "uint32"] = key("uint16", "integer type of a raw .bin file")
    vocab_size: int = required("number of token ids; every id in the file is smaller")
    validation_fraction: float = key(0.05, "share at the end of the file held out for validation")
    boundary: int | None = key(None, "token id that begins (or ends) every document")
    documents: bool = key(
        False, "attention stays within each document of a sequence; needs data.boundary"
    )
    workers: int = key(0, "loader processes a rank; 0 = load in the training process")


@dataclass
class SyntheticData:
    """Random tokens from (seed, position): for benchmarks, costs nothing to load."""

    name: str = key("synthetic", "choice")
    vocab_size: int = key(256, "number of token ids")


# --- optimization ------------------------------------------------------------------------------


@dataclass
class AdamW:
    """torch.optim.AdamW, fused."""

    name: str = key("adamw", "choice")
    lr: float = key(3e-3, "peak learning rate")
    betas: list[float] = key([0.9, 0.95], "decay of the two running means")
    eps: float = key(1e-8, "added to the denominator")
    weight_decay: float = key(0.1, "decoupled decay of matrices; vectors (norms, biases) have none")
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping")


@dataclass
class Sgd:
    """torch.optim.SGD."""

    name: str = key("sgd", "choice")
    lr: float = key(0.1, "peak learning rate")
    momentum: float = key(0.0, "momentum factor")
    weight_decay: float = key(0.0, "L2 decay of matrices; vectors (norms, biases) have none")
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping")


@dataclass
class ConstantLr:
    """Warm-up, then the peak."""

    name: str = key("constant", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0")


@dataclass
class DecayLr:
    """Warm-up, then a decay (linear or cosine) over all steps that remain."""

    name: str = key("cosine", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0")
    final: float = key(0.1, "learning rate of the last step, as a share of the peak")


@dataclass
class WsdLr:
    """Warm-up, stable, decay (arXiv 2404.06395): the peak until the last part of the run."""

    name: str = key("wsd", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0")
    decay: float = key(0.2, "share of all steps, at the end, in which it falls linearly")
    final: float = key(0.05, "learning rate of the last step, as a share of the peak")


@dataclass
class CrossEntropy:
    """Token cross entropy in nats: summed, over the global number of valid tokens."""

    name: str = key("cross_entropy", "choice")


@dataclass
class ChunkedCrossEntropy:
    """The same, a few tokens at a time: logits of the whole batch are never in memory."""

    name: str = key("chunked_cross_entropy", "choice")
    chunk: int = key(2048, "tokens of a microbatch whose logits are held at a time")


@dataclass
class Mse:
    """Squared differences of output and targets: their mean over all elements of the batch."""

    name: str = key("mse", "choice")


# --- precision, sharding -----------------------------------------------------------------------


@dataclass
class Precision:
    """fp32, or bf16: compute and activations in bf16, master weights and reductions in fp32."""

    name: Literal["fp32", "bf16"] = key("fp32", "choice")


@dataclass
class Fsdp:
    """FSDP2 inside each stage."""

    zero: Literal["auto", 1, 2, 3] = key(
        "auto",
        "what stays sharded during a step: 1 optimizer state, 2 also gradients, 3 also parameters; "
        "auto = 3 without a pipeline, 2 with one, 1 under zero-bubble schedules",
    )
    cpu_offload: bool = key(False, "keep shards and optimizer state in CPU memory")


# --- the run -----------------------------------------------------------------------------------


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
class Wandb:
    """Weights & Biases: online where a key is found, else offline into run_dir/wandb."""

    name: str = key("wandb", "choice")
    project: str = key("titanlike", "project")
    run_name: str | None = key(None, "name of the run; null = the run directory's")
    group: str | None = key(None, "group of the run")
    mode: Literal["auto", "online", "offline"] = key("auto", "auto = online if a key is found")
    timeout: float = key(30.0, "seconds to wait for the server before going offline")


@dataclass
class TensorBoard:
    """TensorBoard event files in run_dir/tensorboard (needs the extra titanlike[tensorboard])."""

    name: str = key("tensorboard", "choice")


@dataclass
class NoLogger:
    """metrics.jsonl alone."""

    name: str = key("none", "choice")


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
