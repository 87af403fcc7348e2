"""Every config key, as plain dataclasses: one for each group, one doc line for each key.

A group's choice is a YAML file in `conf/`; its `name` selects the dataclass of its other keys
(`VARIANTS`). Any other `name` is an import path of the user's own, and the keys are the keyword
arguments of what it names (`Custom`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titanlike.config.groups import (
    ActivationCheckpoint,
    AdamW,
    AutoSchedule,
    AutoSplit,
    BalanceSplit,
    ChatData,
    ChunkedCrossEntropy,
    ConstantLr,
    CrossEntropy,
    CsvSchedule,
    DecayLr,
    EvenSplit,
    EveryActivationCheckpoint,
    FitActivationCheckpoint,
    Float8Precision,
    HFData,
    LoopedSchedule,
    LoopedZeroBubbleSchedule,
    MixtureData,
    Mse,
    Muon,
    NoLogger,
    OwnSchedule,
    PointSplit,
    Precision,
    Schedule,
    SelectiveActivationCheckpoint,
    Sgd,
    SyntheticData,
    TensorBoard,
    TextData,
    TokenData,
    TraceSplit,
    Wandb,
    WsdLr,
    ZeroBubbleSchedule,
)
from titanlike.config.hardware import (
    CpuHardware,
    Hardware,
    MeasuredHardware,
    NoHardware,
    RunHardware,
)
from titanlike.config.keys import MAX_RANKS, Custom, Model, OwnOptimizer, Seconds, key
from titanlike.config.profile import MemoryProfile, NoProfile, Timeline, TraceProfile

__all__ = [
    "ActivationCheckpoint", "AdamW", "AutoSchedule", "AutoSplit", "BalanceSplit", "Bench",
    "ChatData", "Checkpoint", "ChunkedCrossEntropy", "Config", "ConstantLr", "CpuHardware",
    "CrossEntropy", "CsvSchedule", "Custom", "DecayLr", "Evaluate", "EvenSplit",
    "EveryActivationCheckpoint", "FitActivationCheckpoint", "Float8Precision", "Fsdp", "HFData",
    "Hardware", "Launch", "LoopedSchedule", "LoopedZeroBubbleSchedule", "MeasuredHardware",
    "MESH_AXES", "MemoryProfile", "MixtureData", "Model", "Mse", "Muon", "NoHardware", "NoLogger",
    "NoProfile", "OPEN_GROUPS", "Objective", "OwnOptimizer", "OwnSchedule", "PointSplit",
    "Precision", "RunHardware", "Sample", "Schedule", "Seconds",
    "SelectiveActivationCheckpoint", "Sgd", "Sweep", "SyntheticData", "TensorBoard", "TextData",
    "Timeline", "TokenData", "TraceProfile", "TraceSplit", "VARIANTS", "Validation", "Verify",
    "Wandb", "WsdLr", "ZeroBubbleSchedule",
]  # fmt: skip

Objective = Literal["val_loss", "loss", "tokens_per_second", "step_seconds", "mfu", "memory_bytes"]


@dataclass
class Fsdp:
    """FSDP2 inside each stage."""

    zero: Literal["auto", 1, 2, 3] = key(
        "auto",
        "what stays sharded during a step: 1 optimizer state, 2 also gradients, 3 also parameters; "
        "auto = 1 where it fits and a step has several microbatches, and under zero-bubble schedules; "
        "else 3 without a pipeline, 2 with one",
    )
    cpu_offload: bool = key(False, "keep shards and optimizer state in CPU memory")


@dataclass
class Validation:
    """Loss on the validation data."""

    every: int = key(100, "steps between validations, and after the last step; 0 = never", ge=0)
    batches: int = key(4, "global batches in a validation, the same each time", ge=1)


@dataclass
class Sample:
    """Texts that the model continues during training: to the console, samples.jsonl and W&B."""

    every: int = key(0, "steps between samples, and after the last step; 0 = never", ge=0)
    prompts: list[str] = key([], "texts to be continued: ['def main','import os']")
    tokens: int = key(64, "the most tokens of a sample", ge=1)
    temperature: float = key(0.8, "0 = the most probable token each time", ge=0)
    top_p: float = key(
        0.95, "of the most probable tokens that together have this probability", gt=0, le=1
    )
    top_k: int = key(0, "of so many most probable tokens; 0 = of all", ge=0)


@dataclass
class Evaluate:
    """What `titanlike evaluate` evaluates."""

    part: Literal["validation", "train", "all"] = key("validation", "part of the data")
    batches: int = key(0, "only the first so many batches of it; 0 = all", ge=0)


@dataclass
class Verify:
    """What is compared with one process: by `titanlike verify`, and before a first start."""

    name: Literal["auto", "required", "off"] = key(
        "auto",
        "before the first start of a layout: auto = code from outside of titanlike, where one process "
        "can hold the model and takes 30 s by estimate; required = always; off = never",
    )
    steps: int = key(3, "training steps, each on a batch of its own", ge=1)


@dataclass
class Bench:
    """What `titanlike bench` runs."""

    loop: Literal["both", "ours", "plain"] = key(
        "both", "both = in turns, for times; ours, plain = one alone, for its memory"
    )


@dataclass
class Checkpoint:
    """Distributed checkpoints."""

    folder: str | None = key(None, "path or fsspec URL (s3://...); null = run_dir/checkpoints")
    every: int = key(100, "steps between saves; 0 = none during training", ge=0)
    last: bool = key(True, "save after the last step")
    mode: Literal["sync", "async", "async_pinned", "async_process"] = key(
        "sync",
        "async = training continues while a copy in memory is written; async_pinned = also while "
        "it is copied, into a buffer that is kept (pinned with a GPU); async_process = that, and a "
        "process of each rank writes (Linux)",
    )
    keep: int = key(10, "newest checkpoints to retain; 0 = all", ge=0)
    keep_every: int = key(
        0, "also retain every checkpoint at a multiple of this step; 0 = none", ge=0
    )
    keep_best: int = key(0, "also retain this many with the lowest validation loss", ge=0)
    model_only: Literal["none", "fp32", "bf16", "fp16"] = key(
        "none", "after the last step also save the model alone in this dtype (model-XXXXXXXX)"
    )
    export: Literal["none", "hf"] = key(
        "none",
        "hf = after the last step also write a folder for transformers, run_dir/hf-XXXXXXXX, of "
        "what model_only has, or in fp32",
    )
    resume: str = key("auto", "auto = newest complete checkpoint; never; or the path of one")
    start_from: str | None = key(
        None,
        "checkpoint or run directory whose weights initialize a new run (warm start), or "
        "hf:/path of a folder of transformers (llama, gpt2)",
    )
    strict: bool = key(
        True, "start_from must have exactly the model's parameters; false = list differences"
    )
    rename: list[str] = key([], "prefixes of parameter names in start_from to change: [old:new]")
    timeout: float = key(1800.0, "seconds until a save or load fails", gt=0, le=1e6)


@dataclass
class Launch:
    """Starting and monitoring the workers."""

    timeout: float = key(
        600.0, "seconds until a wait for another rank, or the first step, fails", gt=0, le=1e6
    )
    step_timeout: float = key(
        300.0,
        "seconds without progress in a later step that count as a hang; 0 = never",
        ge=0,
        le=1e6,
    )
    heartbeat: float = key(
        10.0, "seconds between a rank's writes to logs/rankN.heartbeat", gt=0, le=1e6
    )
    straggler: float = key(
        0.25,
        "a rank that is busy for so much longer than others, 50 steps long, is named; 0 = none",
        ge=0,
    )
    max_restarts: int = key(0, "restarts of failed workers, from the newest checkpoint", ge=0)
    elastic: bool = key(False, "dp follows the number of ranks that torchrun starts: --nnodes 1:2")


@dataclass
class Sweep:
    """How the jobs of a sweep (`-m`) are run."""

    resume: bool = key(False, "run the unfinished jobs of run_dir's sweep; stopped ones resume")
    parallel: int = key(
        1, "concurrent jobs on this machine; 0 = as many as devices (cores) allow", ge=0
    )
    submit: str | None = key(
        None, "submit each job by this command instead: 'sbatch tools/slurm/train.sbatch'"
    )
    wait: Seconds | None = key(None, "with submit: longest wait for the jobs (12h); null = no wait")
    share: str | None = key(None, "i/n: run only jobs i, i+n, i+2n, ... from 0; for job arrays")


MESH_AXES = ("pp", "dp", "cp", "tp")  # of which ranks are the product; ep is taken from dp and cp


@dataclass
class Config:
    """One run."""

    pp: int = key(1, "pipeline-parallel ranks", ge=1, le=256)
    dp: int = key(
        1, "data-parallel ranks, sharded (FSDP) and replicated together", ge=1, le=MAX_RANKS
    )
    tp: int = key(
        1, "tensor-parallel ranks: each has a part of every layer (needs a tp plan)", ge=1, le=256
    )
    tp_sequence: bool = key(
        True,
        "between divided layers each tp rank has a part of the sequence, where the plan says so",
    )
    tp_check: bool = key(
        True,
        "refuse a tp plan that is not known to be right; false = say so, and prove it by verify",
    )
    tp_async: bool = key(
        False,
        "overlap what tp ranks exchange with matrix products (compiled blocks on NVIDIA GPUs)",
    )
    cp: int = key(1, "context-parallel ranks: each has a part of every sequence", ge=1, le=1024)
    context_parallel: Literal["auto", "gather", "ulysses", "ring"] = key(
        "auto",
        "how attention sees all tokens: gather = keys and values are gathered; ulysses = heads are "
        "exchanged for tokens; ring = keys and values go round; auto = as heads and masks allow; "
        "without cp it has no effect",
    )
    ep: int = key(
        1,
        "expert-parallel ranks among those of dp and cp: each has a part of every layer's experts",
        ge=1,
    )
    replicate: int = key(1, "replicas among dp: 1 = FSDP, dp = replication, between = HSDP", ge=1)
    device: Literal["auto", "cpu", "cuda", "xpu"] = key(
        "auto", "auto = the machine's GPUs (accelerators), the CPU only where there is none"
    )
    batch_size: int = key(16, "GLOBAL batch, in sequences per optimizer step over all of dp", ge=1)
    seq_len: int = key(128, "tokens in a sequence", ge=1, le=2**27)
    steps: int = key(300, "optimizer steps in total", ge=1)
    max_tokens: int | None = key(
        None, "end the run after this many tokens; null = no limit", gt=0, example=1_000_000
    )
    max_time: Seconds | None = key(
        None, "save and stop after this time (90m, 11h30m, 11:30:00, or seconds); null = no limit"
    )
    mixes_samples: bool = key(
        False, "the model or the loss mixes a batch's samples on purpose: layouts then differ"
    )
    seed: int = key(0, "of the initial weights and of the order of the data", le=2**63 - 1)
    matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest", "of fp32 matrix products: high = TensorFloat-32 on GPUs, medium = bf16"
    )
    compile: bool = key(False, "compile each block with torch.compile (inductor)")
    deterministic: bool = key(False, "deterministic kernels only; an operation without one fails")
    on_nonfinite: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "loss or gradient not finite: stop; skip the update; rollback = return to the checkpoint "
        "and skip the batches since then",
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = key(
        "ignore", "the same for a loss or gradient norm far above that of recent steps"
    )
    spike_zscore: float = key(6.0, "standard deviations above the mean that count as a spike", gt=0)
    spike_window: int = key(100, "recent steps in that mean; detection needs half of them", ge=2)
    run_dir: str = key(
        "outputs/run", "output folder; a run in it resumes; if not given, outputs/DATE/TIME"
    )
    value: Objective | None = key(
        None, "what a sweep compares; null = val_loss, or loss without validation"
    )
    log_every: int = key(10, "steps between printed lines; metrics.jsonl has every step", ge=1)
    gc_every: int = key(
        50,
        "steps between Python's garbage collections, all ranks at once; 0 = when Python does",
        ge=0,
    )
    report: bool = key(True, "write report.html, a page of curves and events, when a run ends")
    plan: Literal["warn", "strict"] = key(
        "warn", "memory that will not suffice: warn = say so at the start; strict = refuse"
    )
    # the model's keys are its constructor's arguments: see titanlike/models
    model: Model = key(lambda: Model("llama"), "model family or import path, and its arguments")
    split: EvenSplit | PointSplit | BalanceSplit | AutoSplit = key(EvenSplit, "where stages begin")
    schedule: Schedule | CsvSchedule | AutoSchedule | OwnSchedule = key(
        Schedule, "pipeline schedule"
    )
    data: TextData | HFData | TokenData | MixtureData | ChatData | SyntheticData | Custom = key(
        TextData, "training data"
    )
    optimizer: AdamW | Muon | Sgd | OwnOptimizer = key(AdamW, "optimizer")
    lr: ConstantLr | DecayLr | WsdLr | Custom = key(WsdLr, "learning-rate schedule")
    loss: CrossEntropy | ChunkedCrossEntropy | Mse | Custom = key(CrossEntropy, "loss function")
    precision: Precision = key(Precision, "compute precision")
    activation_checkpoint: ActivationCheckpoint = key(
        ActivationCheckpoint, "which activations are computed again in the backward"
    )
    fsdp: Fsdp = key(Fsdp, "sharding inside a stage")
    validation: Validation = key(Validation, "loss on the validation data")
    sample: Sample = key(Sample, "texts written by the model during training")
    evaluate: Evaluate = key(Evaluate, "perplexity of a checkpoint")
    verify: Verify = key(Verify, "the comparison with one process")
    bench: Bench = key(Bench, "the comparison with loops written by hand")
    checkpoint: Checkpoint = key(Checkpoint, "saving and resuming")
    logger: Wandb | TensorBoard | NoLogger = key(Wandb, "metrics sink besides metrics.jsonl")
    profile: NoProfile | TraceProfile | MemoryProfile = key(
        NoProfile, "a few steps recorded in detail, into run_dir/profile"
    )
    timeline: Timeline = key(Timeline, "a few steps as they were computed, rank by rank")
    hardware: NoHardware | MeasuredHardware | RunHardware | Hardware = key(
        NoHardware, "the devices and links that a run is planned for (tools/plan.py)"
    )
    launch: Launch = key(Launch, "starting and monitoring the workers")
    sweep: Sweep = key(Sweep, "many runs from one command (-m)")

    @property
    def world_size(self) -> int:
        """Processes that the mesh needs."""
        return self.model_ranks * self.dp

    @property
    def axes(self) -> dict[str, int]:
        """Each axis of the mesh and its ranks, but cp and tp only where they have several."""
        sizes = {axis: int(getattr(self, axis)) for axis in MESH_AXES}
        return {axis: n for axis, n in sizes.items() if n != 1 or axis in ("pp", "dp")}

    @property
    def model_ranks(self) -> int:
        """Ranks that a batch of one dp rank takes: pp and tp divide the model, cp the sequences."""
        return self.pp * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards a stage's weights over: those of dp in one replica, times cp."""
        return self.dp // self.replicate * self.cp

    @property
    def last_step(self) -> int:
        """The step that completes the run: `steps`, or the first that has trained on `max_tokens`."""
        if self.max_tokens is None:
            return self.steps
        return min(self.steps, -(-self.max_tokens // (self.batch_size * self.seq_len)))


# group -> name of the choice -> dataclass of its keys
VARIANTS: dict[str, dict[str, type[Any]]] = {
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
        "interleavedzerobubble": LoopedZeroBubbleSchedule,
        **dict.fromkeys(("zbh1", "zbh2", "vhalf", "vmin"), ZeroBubbleSchedule),
        "zbvzerobubble": ZeroBubbleSchedule,
        "dualpipev": ZeroBubbleSchedule,
        "csv": CsvSchedule,
        "auto": AutoSchedule,
    },
    "data": {
        "text": TextData,
        "hf": HFData,
        "tokens": TokenData,
        "mixture": MixtureData,
        "chat": ChatData,
        "synthetic": SyntheticData,
    },
    "optimizer": {"adamw": AdamW, "muon": Muon, "sgd": Sgd},
    "lr": {"constant": ConstantLr, "linear": DecayLr, "cosine": DecayLr, "wsd": WsdLr},
    "loss": {
        "cross_entropy": CrossEntropy,
        "chunked_cross_entropy": ChunkedCrossEntropy,
        "mse": Mse,
    },
    "precision": {"fp32": Precision, "bf16": Precision, "float8": Float8Precision},
    "activation_checkpoint": {
        "none": ActivationCheckpoint,
        "full": ActivationCheckpoint,
        "selective": SelectiveActivationCheckpoint,
        "every": EveryActivationCheckpoint,
        "fit": FitActivationCheckpoint,
    },
    "verify": {"auto": Verify, "required": Verify, "off": Verify},
    "logger": {"wandb": Wandb, "tensorboard": TensorBoard, "none": NoLogger},
    "profile": {"none": NoProfile, "trace": TraceProfile, "memory": MemoryProfile},
    "hardware": {
        "none": NoHardware,
        "measure": MeasuredHardware,
        "run": RunHardware,
        **dict.fromkeys(("a100_40g", "a100_80g", "h100_sxm", "h100_pcie", "h200"), Hardware),
        **dict.fromkeys(("b200", "mi300x"), Hardware),
        "cpu": CpuHardware,
    },
}

# groups whose `name` may be an import path of the user's own
OPEN_GROUPS = ("model", "schedule", "data", "optimizer", "lr", "loss")
