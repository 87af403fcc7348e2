"""Every config key, as plain dataclasses: one for each set of keys, one doc line for each key.

A group's choice is a YAML file in `conf/`; its `name` selects the dataclass of its other keys
(`VARIANTS`). Any other `name` is the import path of user code, and the keys are its keyword
arguments (`Custom`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from titanlike.config import keys
from titanlike.config.keys import (
    MAX_RANKS,
    MAX_VOCAB,
    Batches,
    Bytes,
    Paths,
    Seconds,
    key,
    required,
)
from titanlike.config.optimizer import Optimizer, optimizer_kinds
from titanlike.config.optimizers.adamw import AdamW

# --- choices from outside: the user's own code --------------------------------------------------


@dataclass
class Custom:
    """User code: `name` is an import path, `args` its keyword arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Model(Custom):
    """A model family or an import path, called with `args`."""

    tp_plan: dict[str, Any] | None = key(
        None, "module names -> how tp shards them; null = the model's plan"
    )


@dataclass
class CustomOptimizer(Custom):
    """A user's optimizer class, called with the parameters, `lr` and `args`."""

    lr: float = key(3e-3, "peak learning rate", ge=0)
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping", gt=0)
    exact_on_shards: bool = key(
        False,
        "right on shards and stages (it communicates), although a trial without other ranks differs",
    )


# --- split: where the stages of a pipeline begin ----------------------------------------


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


# --- schedule: the order of a pipeline's computations ------------------------------------------


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


# --- optimization ------------------------------------------------------------------------------


@dataclass
class Ema:
    """An exponential moving average of the weights, kept as optimizer state."""

    decay: float | None = key(
        None, "decay of the average per step, such as 0.999; null = no average", ge=0, lt=1
    )


@dataclass
class ConstantLr:
    """Warm-up, then the peak."""

    name: str = key("constant", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)


@dataclass
class DecayLr:
    """Warm-up, then a decay (linear or cosine) over all remaining steps."""

    name: str = key("cosine", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)
    final: float = key(0.1, "learning rate of the last step, as a share of the peak", ge=0, le=1)


@dataclass
class WsdLr:
    """Warm-up, stable, decay (arXiv 2404.06395): the peak until the last part of the run."""

    name: str = key("wsd", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)
    decay: float = key(0.2, "share of all steps, at the end, with a linear decay", gt=0, le=1)
    final: float = key(0.05, "learning rate of the last step, as a share of the peak", ge=0, le=1)


_MTP_WEIGHT = "weight of the multi-token-prediction losses (model.num_nextn_predict_layers): 0.3"
_Z_LOSS = "weight of log(sum(exp(logits)))^2, added to each training loss: 1e-4"


@dataclass
class CrossEntropy:
    """Token cross entropy in nats: the sum divided by the global number of valid tokens."""

    name: str = key("cross_entropy", "choice")
    z_loss: float = key(0.0, _Z_LOSS, ge=0)
    mtp_weight: float = key(0.0, _MTP_WEIGHT, ge=0)


@dataclass
class ChunkedCrossEntropy:
    """Token cross entropy, computed for a few tokens at a time: the whole batch's logits are never
    in memory."""

    name: str = key("chunked_cross_entropy", "choice")
    z_loss: float = key(0.0, _Z_LOSS, ge=0)
    mtp_weight: float = key(0.0, _MTP_WEIGHT, ge=0)
    chunk: int = key(2048, "tokens of a microbatch whose logits are in memory at a time", ge=1)


@dataclass
class Mse:
    """Squared error, averaged over all elements of the batch."""

    name: str = key("mse", "choice")


# --- precision ----------------------------------------------------------------------------------


@dataclass
class Precision:
    """fp32, or bf16: compute and activations in bf16, master weights and reductions in fp32."""

    name: Literal["fp32", "bf16", "float8", "mxfp8"] = key("fp32", "choice")

    @property
    def low(self) -> bool:
        """Whether activations are bf16, and weights are cast to it."""
        return self.name != "fp32"


@dataclass
class ScaledPrecision(Precision):
    """bf16, and the matrix products of linear layers in float8 by torchao (titanlike[float8])."""

    recipe: str = key("", "of torchao")
    skip: list[str] = key(
        [], "linear layers that stay in bf16, by patterns of their names: [*.layers.0.*,*.o_proj]"
    )
    min_features: int = key(64, "linear layers with fewer inputs or outputs stay in bf16", ge=1)

    @property
    def weight_gradients(self) -> bool:
        """Whether those are products in float8, too."""
        return not self.recipe.endswith("_hp")


@dataclass
class Float8Precision(ScaledPrecision):
    """bf16, and matmuls of linear layers in float8, with a scale per tensor or row."""

    name: Literal["float8"] = key("float8", "choice")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = key(
        "tensorwise",
        "torchao's scaling: per tensor, per row, or per row with weight gradients in bf16",
    )


@dataclass
class Mxfp8Precision(ScaledPrecision):
    """bf16, and matmuls of linear layers in MXFP8: a scale per 32 elements of the summed dimension."""

    name: Literal["mxfp8"] = key("mxfp8", "choice")
    recipe: Literal["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"] = key(
        "mxfp8_rceil", "torchao's recipe: all matmuls in MXFP8, or weight gradients in bf16"
    )


# --- activation checkpointing -------------------------------------------------------------------


@dataclass
class ActivationCheckpoint:
    """Activations are kept for the backward (none), or recomputed in it (full)."""

    name: str = key("none", "choice")

    @property
    def saved(self) -> list[str]:
        """Patterns of operators whose results a recomputed block keeps."""
        return []


@dataclass
class SelectiveActivationCheckpoint(ActivationCheckpoint):
    """Every block is recomputed except its slowest operators: matrix products, attention,
    collectives."""

    name: str = key("selective", "choice")
    save: list[str] = key(
        # titanlike.*_tokens: ep's all-to-all and its routing; *_attn*: torch_attn._varlen_attn
        ["aten.*mm", "aten.convolution", "titanlike.*_tokens", "*attention*", "*_attn*"],
        "operators whose results are saved, by name patterns",
    )

    @property
    def saved(self) -> list[str]:
        return self.save


@dataclass
class EveryActivationCheckpoint(ActivationCheckpoint):
    """Every n-th block is recomputed."""

    name: str = key("every", "choice")
    every: int = key(2, "1 = every block, 2 = every second one, ...", ge=1)


@dataclass
class FitActivationCheckpoint(ActivationCheckpoint):
    """As few blocks are recomputed as memory allows, a number for each rank."""

    name: str = key("fit", "choice")
    memory: Bytes | None = key(
        None, "memory budget of a device, such as 75GiB; null = its memory, less 8%"
    )


# --- logger -------------------------------------------------------------------------------------


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


# --- data ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Data:
    """Keys of all kinds of data."""

    name: str = key("synthetic", "choice")
    changed: bool = key(False, "resume although the checkpoint's data differ; for one launch")


@dataclass(kw_only=True)
class SyntheticData(Data):
    """Random tokens from (seed, position): for benchmarks, loaded in no time."""

    vocab_size: int = key(256, "number of token ids", ge=1, le=MAX_VOCAB, example=256)


@dataclass(kw_only=True)
class Corpus(Data):
    """Keys of all data that are read from files."""

    validation_fraction: float = key(
        0.05,
        "validation share of the documents (rows, conversations), or of token files, at their end",
        gt=0,
        lt=1,
    )
    documents: bool = key(False, "attention within each document, whose positions begin at 0")
    workers: int = key(
        0, "loader processes per rank; 0 = load in the training process", ge=0, le=4096
    )


_TOKENIZER = "'bytes' (built in), or the path of a tokenizer.json, a folder with one, or a sentencepiece model"


@dataclass(kw_only=True)
class Tokenized(Corpus):
    """Keys of all data that are tokenized into a cache."""

    tokenizer: str = key("bytes", _TOKENIZER)
    cache: str | None = key(None, "folder for tokenized files; null = ~/.cache/titanlike")


_TEXT_KEY = "field (JSONL) or column (Parquet) that holds the text"


@dataclass(kw_only=True)
class TextData(Tokenized):
    """Text files, JSONL or Parquet, tokenized once into a cache and packed into sequences."""

    name: str = key("text", "choice")
    path: str | None = key(
        None,
        "file or folder (.txt .py .md ..., .jsonl, .parquet, .arrow), also .gz and .zst; null = this Python's sources",
    )
    text_key: str = key("text", _TEXT_KEY)


@dataclass(kw_only=True)
class HFData(Tokenized):
    """A Hugging Face dataset, read once in its order and tokenized into a cache, as text is."""

    name: str = key("hf", "choice")
    path: str = required(
        "folder of save_to_disk, folder or file of Parquet, Arrow, JSON or CSV, or a name on the hub"
    )
    subset: str | None = key(None, "the dataset's configuration, if it has several")
    split: str = key("train", "the dataset's split; validation is a share of it")
    revision: str | None = key(None, "branch, tag or commit on the hub")
    streaming: bool = key(True, "read without a copy in datasets' cache; false = download first")
    rows: int | None = key(None, "read only the first rows; null = all", ge=1, example="null")
    text_key: str = key("text", _TEXT_KEY)
    ids_key: str | None = key(None, "column of token ids, read instead of text: input_ids")
    vocab_size: int | None = key(
        None,
        "number of token ids of ids_key; null = the tokenizer's",
        ge=1,
        le=MAX_VOCAB,
        example=256,
    )


@dataclass(kw_only=True)
class TokenData(Corpus):
    """Files of token ids, memory-mapped."""

    name: str = key("tokens", "choice")
    path: Paths = required(
        "folder from titanlike tokenize; token file (.npy, raw little-endian .bin, Megatron's, "
        "llm.c's), folder of these, or list"
    )
    format: Literal["auto", "raw"] = key("auto", "auto = by the file's content; raw = ids of dtype")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = key(
        "uint16", "integer type of raw files"
    )
    vocab_size: int | None = key(
        None,
        "number of token ids, larger than every id; null = from the folder's index",
        ge=1,
        le=MAX_VOCAB,
        example=256,
    )
    boundary: int | None = key(
        None,
        "token id that begins (or ends) every document, for data.documents; null = from the folder's index",
    )


@dataclass(kw_only=True)
class MixtureData(Tokenized):
    """Several corpora, mixed by weights; the tokenizer of token files is in their index."""

    name: str = key("mixture", "choice")
    sources: dict[str, Any] = required(
        "name -> {path: tokens or text, weight: a number, or [[step, weight], ...], interpolated}"
    )
    text_key: str = key("text", _TEXT_KEY)


@dataclass(kw_only=True)
class ChatData(Tokenized):
    """Conversations, with loss on the answers alone; a tokenizer's folder may have the chat
    template."""

    name: str = key("chat", "choice")
    path: str = required("file or folder of JSONL, JSON, Parquet, Arrow or ORC, also .gz and .zst")
    messages_key: str = key("messages", "field with the list of messages: {role, content}")
    template: str | None = key(
        None, "Jinja file; null = the tokenizer's chat template, else a built-in one"
    )
    parse_special: bool = key(
        False, "parse special tokens in questions, too; false = only in answers"
    )
    documents: bool = key(True, "attention within each conversation of a sequence")


@dataclass(kw_only=True)
class StreamData(Data):
    """Text that is read, tokenized, packed and shuffled while training runs."""

    name: str = key("stream", "choice")
    path: str | None = key(
        None,
        "file or folder of text, JSONL, Parquet or WebDataset tars, folder of save_to_disk, or a name on "
        "the hub; null = this Python's sources",
    )
    sources: dict[str, Any] = key(
        dict, "instead of path: name -> {path, weight}, as for data=mixture"
    )
    text_key: str = key("text", _TEXT_KEY)
    subset: str | None = key(None, "the hub dataset's configuration, if it has several")
    split: str = key("train", "the dataset's split")
    revision: str | None = key(None, "branch, tag or commit on the hub")
    tokenizer: str = key("bytes", _TOKENIZER)
    documents: bool = key(False, "attention within each document, whose positions begin at 0")
    shuffle_buffer: int = key(
        1024, "sequences of all readers from which a random one is drawn; 0 = no shuffling", ge=0
    )
    readers: int | None = key(
        None,
        "shards of the stream, a multiple of dp; null = the largest number up to 64 that divides batch_size",
        ge=1,
        example=8,
    )
    repeat: bool = key(True, "begin again at the end; false = the run ends with the data")
    workers: int = key(
        1, "loader processes per rank; 0 = load in the training process", ge=0, le=4096
    )
    prefetch: int = key(2, "batches that each loader process prefetches", ge=1)


# --- profile and timeline: what is recorded of a few steps of a run, rank by rank ---------------


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


# --- hardware: the device, links and node that a run is planned for ------------------------------


# Peaks and bandwidths are the vendor's, for one device and dense matrices. The achievable share
# of these is a separate constant, the same for all GPUs: `tests/planning/test_published.py`
# compares the result with published runs.


@dataclass
class NoHardware:
    """The device that a run finds: its memory is queried, its speed unknown."""

    name: str = key("none", "choice")


@dataclass(kw_only=True)
class Hardware(NoHardware):
    """A device with its links."""

    name: str = key("profile", "choice")
    title: str = required("name of the device")
    bf16_flops: float = required("FLOP/s of dense bf16 matmuls, from the data sheet", gt=0)
    fp8_flops: float = required("FLOP/s of dense float8 matmuls; without float8, of bf16", gt=0)
    mxfp8_flops: float | None = key(
        None, "FLOP/s of dense MXFP8 matmuls; null = none, emulated", gt=0
    )
    tf32_flops: float = required("FLOP/s of fp32 matmuls with matmul_precision=high", gt=0)
    fp32_flops: float = required("FLOP/s of fp32 matmuls", gt=0)
    memory: Bytes = required("device memory visible to programs")
    memory_bandwidth: float = required("bytes/s of device memory", gt=0)
    devices_per_node: int = required("devices of a node, joined by its fast links", gt=0, example=8)
    node_bandwidth: float = required("bytes/s that a device sends within its node", gt=0)
    network_bandwidth: float = required("bytes/s that a device sends to other nodes", gt=0)
    collective_bandwidth: float | None = key(
        None,
        "bytes/s that a device sends in a collective within its node; null = node_bandwidth",
        gt=0,
    )
    gather_bandwidth: float | None = key(
        None,
        "bytes/s of FSDP's all-gathers within a node, copies included; null = collective_bandwidth",
        gt=0,
    )
    reduce_bandwidth: float | None = key(
        None,
        "bytes/s of FSDP's reduce-scatters within a node, copies included; null = collective_bandwidth",
        gt=0,
    )
    host_bandwidth: float = key(25e9, "bytes/s between device and host memory", gt=0)
    node_latency: float = key(5e-6, "seconds of a P2P send or collective step in a node", ge=0)
    network_latency: float = key(15e-6, "seconds of a collective's step between nodes", ge=0)
    matmul_efficiency: float = key(0.74, "share of the peak that large matmuls reach", gt=0, le=1)
    matmul_half: float = key(60.0, "rows, columns or sum at which a matmul has half of it", ge=0)
    attention_efficiency: float = required(
        "share of the peak that attention reaches (GPU: 8192 keys, heads of 128)",
        gt=0,
        le=1,
        example=0.4,
    )
    memory_efficiency: float = key(0.8, "share of the bandwidth that operators reach", gt=0, le=1)
    link_efficiency: float = key(0.8, "share of bandwidth that large messages reach", gt=0, le=1)
    kernel_seconds: float = key(3e-6, "fixed time of a kernel, in seconds", ge=0)
    host_seconds: float = key(6e-6, "host time to launch an operator, in seconds", ge=0)
    action_seconds: float = key(2e-4, "host time of a schedule action, in seconds", ge=0)
    runs_ahead: bool = key(True, "the host queues work on the device without waiting")
    allocator_loss: float = key(0.08, "memory share of allocator and libraries", ge=0, lt=1)

    @property
    def usable(self) -> int:
        """Bytes of a device's memory that training may use."""
        return int((1 - self.allocator_loss) * self.memory)

    def of_each(self, ranks: int) -> Hardware:
        """Return the profile of one of `ranks` ranks that share a device: its memory is divided."""
        title = f"1/{ranks} of {self.title}"
        return replace(self, memory=self.memory // ranks, title=title) if ranks > 1 else self


@dataclass(kw_only=True)
class CpuHardware(Hardware):
    """A CPU core, which cannot overlap compute with communication, and uses gloo."""

    def of_each(self, ranks: int) -> Hardware:
        return self

    node_latency: float = key(1e-4, "seconds of a P2P send or collective step in a node", ge=0)
    network_latency: float = key(2e-4, "seconds of a collective's step between nodes", ge=0)
    matmul_half: float = key(20.0, "rows, columns or sum at which a matmul has half of it", ge=0)
    attention_efficiency: float = key(0.3, "share of the peak that attention reaches", gt=0, le=1)
    memory_efficiency: float = key(0.6, "share of the bandwidth that operators reach", gt=0, le=1)
    kernel_seconds: float = key(1e-5, "fixed time of a kernel, in seconds", ge=0)
    host_seconds: float = key(0.0, "host time to launch an operator, in seconds", ge=0)
    action_seconds: float = key(5e-4, "host time of a schedule action, in seconds", ge=0)
    runs_ahead: bool = key(False, "the host queues work on the device without waiting")


# --- other sections ------------------------------------------------------------------------------


@dataclass
class Fsdp:
    """FSDP2 inside each stage."""

    zero: Literal["auto", 1, 2, 3] = key(
        "auto",
        "sharded during a step: 1 optimizer state, 2 also gradients, 3 also parameters; auto = 1 "
        "if it fits and a step has several microbatches, and under zero-bubble schedules; else 3 "
        "without a pipeline, 2 with one",
    )
    cpu_offload: bool = key(False, "keep parameter shards and optimizer state in CPU memory")


@dataclass
class Numerics:
    """Whether results are bitwise equal in all layouts."""

    name: Literal["fast", "exact"] = key(
        "fast", "exact = the same bits in every layout of pp, dp, ep, replicate, ZeRO, schedule"
    )
    grain: int = key(
        1, "exact: sequences per microbatch, the same in all layouts that must be equal", ge=1
    )
    digest_every: int = key(
        0, "steps between digests of all weights in metrics.jsonl; 0 = none", ge=0
    )


@dataclass
class Validation:
    """Loss on the validation data."""

    every: int = key(100, "steps between validations, and after the last step; 0 = never", ge=0)
    batches: Batches = key(
        4, "global batches per set, the same each time; all (or 0) = the whole set"
    )
    data: dict[str, Any] | None = key(
        None,
        "separate validation set, by keys of data: {path: val/}, {name: tokens, path: val.bin}, or"
        " several: {code: {path: a/}, web: {path: b/}}; null = data's held-out share",
    )


@dataclass
class Sample:
    """Texts that the model continues during training; written to the console, samples.jsonl and
    W&B."""

    every: int = key(0, "steps between samples, and after the last step; 0 = never", ge=0)
    prompts: list[str] = key([], "texts to continue: ['def main','import os']")
    tokens: int = key(64, "maximum number of tokens of a sample", ge=1)
    temperature: float = key(0.8, "0 = the most probable token each time", ge=0)
    top_p: float = key(
        0.95, "sample from the most probable tokens with this total probability", gt=0, le=1
    )
    top_k: int = key(0, "sample from this many most probable tokens; 0 = from all", ge=0)


@dataclass
class Evaluate:
    """The data that `titanlike evaluate` evaluates."""

    part: Literal["validation", "train", "all"] = key("validation", "part of the data")
    batches: Batches = key(0, "first batches of it; 0 = all")


@dataclass
class Verify:
    """The comparison with one process, by `titanlike verify` and before a first launch."""

    name: Literal["auto", "required", "off"] = key(
        "auto",
        "verify before the first launch of a layout: auto = if it has custom code, and one process"
        " holds the model and takes up to 30 s by estimate; required = always; off = never",
    )
    steps: int = key(3, "training steps, each on its own batch", ge=1)
    as_is: bool = key(False, "verify bf16 or float8 only as it is, not also in fp32")
    against: str | None = key(
        None, "folder with another framework's weights, gradients and losses, compared as well"
    )
    names: str | None = key(
        None, "YAML or JSON file: its parameter names -> the model's; # is any number"
    )
    repro: str | None = key(
        None,
        "file for a script, of at most forty lines, that reproduces a failure in the smallest model",
    )
    json: bool = key(
        False, "print the verdict as JSON in the last line, as in run_dir/verify/verdict.json"
    )


@dataclass
class Bench:
    """What `python tools/bench.py` measures."""

    loop: Literal["both", "titanlike", "plain"] = key(
        "both", "both = interleaved, for times; titanlike, plain = only one, for its memory"
    )


@dataclass
class Checkpoint:
    """Distributed checkpoints."""

    folder: str | None = key(
        None,
        "path, or URL of an object store (s3://...); null = run_dir/checkpoints",
        keys.PATH,
        example="outputs/NAME",
    )
    every: int = key(100, "steps between saves; 0 = none during training", ge=0)
    last: bool = key(True, "save after the last step")
    mode: Literal["sync", "async", "async_pinned"] = key(
        "sync",
        "async = training overlaps writing, from a copy in memory; async_pinned = also copying, "
        "into a reused buffer (pinned with a GPU)",
    )
    keep: int = key(10, "newest checkpoints to retain; 0 = all", ge=0)
    keep_every: int = key(0, "also retain checkpoints at multiples of this step; 0 = none", ge=0)
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
        "hf:/path of a folder of transformers (llama, gpt2, moe)",
    )
    strict: bool = key(
        True, "start_from must have exactly the model's parameters; false = list differences"
    )
    rename: list[str] = key(
        [],
        "prefixes of parameter names in start_from to change: [old:new]",
        keys.RENAME,
        example="[old.:new.]",
    )
    timeout: float = key(1800.0, "seconds until a save or load fails", gt=0, le=1e6)


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


@dataclass
class Launch:
    """Launching and monitoring the workers."""

    timeout: float = key(
        600.0, "seconds until a wait for another rank, or the first step, fails", gt=0, le=1e6
    )
    step_timeout: float = key(
        300.0,
        "seconds without progress in a later step that count as a hang; 0 = never",
        ge=0,
        le=1e6,
    )
    heartbeat: float = key(10.0, "seconds between writes of logs/rankN.heartbeat", gt=0, le=1e6)
    straggler: float = key(
        0.25,
        "report a rank that is busy for this share longer than others, over 50 steps; 0 = never",
        ge=0,
    )
    max_restarts: int = key(
        0, "restarts of failed workers, from the newest checkpoint", ge=0, le=1_000_000
    )
    ranks_per_device: int = key(
        1, "ranks that share a GPU, to check a layout (slow)", ge=1, le=1024
    )


@dataclass
class Sweep:
    """How the jobs of a sweep (`-m`) run."""

    resume: bool = key(False, "run the unfinished jobs of run_dir's sweep, and resume stopped ones")
    parallel: int = key(
        1,
        "concurrent jobs of this command; on several GPUs run one for each GPU, in its own run_dir",
        ge=1,
        le=100_000,
    )


@dataclass(kw_only=True)
class RampStage:
    """Smaller batches or shorter sequences at the beginning of a run."""

    tokens: int = required("tokens of the run after which the stage ends", gt=0)
    batch_size: int | None = key(None, "sequences per step over all of dp; null = as later", ge=1)
    seq_len: int | None = key(None, "tokens in a sequence; null = as later", ge=1, example=64)


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
    split: EvenSplit | PointSplit | BalanceSplit | AutoSplit = key(EvenSplit, "where stages begin")
    schedule: Schedule | CsvSchedule | AutoSchedule | CustomSchedule = key(
        Schedule, "pipeline schedule"
    )
    data: (
        TextData | HFData | TokenData | MixtureData | ChatData | StreamData | SyntheticData | Custom
    ) = key(TextData, "training data")
    optimizer: Optimizer | CustomOptimizer = key(AdamW, "optimizer")
    ema: Ema = key(Ema, "average of the weights")
    lr: ConstantLr | DecayLr | WsdLr | Custom = key(WsdLr, "learning-rate schedule")
    loss: CrossEntropy | ChunkedCrossEntropy | Mse | Custom = key(CrossEntropy, "loss function")
    precision: Precision = key(Precision, "compute precision")
    numerics: Numerics = key(Numerics, "order of sums: fast, or bitwise equal in all layouts")
    activation_checkpoint: ActivationCheckpoint = key(
        ActivationCheckpoint, "which activations are recomputed in the backward"
    )
    fsdp: Fsdp = key(Fsdp, "sharding inside a stage")
    metrics: Metrics = key(Metrics, "what is recorded of each step")
    validation: Validation = key(Validation, "loss on the validation data")
    sample: Sample = key(Sample, "texts written by the model during training")
    evaluate: Evaluate = key(Evaluate, "perplexity of a checkpoint")
    verify: Verify = key(Verify, "comparison with one process")
    bench: Bench = key(Bench, "comparison with a plain PyTorch loop")
    checkpoint: Checkpoint = key(Checkpoint, "saving and resuming")
    logger: Wandb | TensorBoard | NoLogger = key(Wandb, "metrics sink besides metrics.jsonl")
    profile: NoProfile | TraceProfile | MemoryProfile = key(
        NoProfile, "detailed recording of a few steps, into run_dir/profile"
    )
    timeline: Timeline = key(Timeline, "a few steps as they were computed, rank by rank")
    hardware: NoHardware | Hardware = key(
        NoHardware, "devices and links that a plan assumes (titanlike plan)"
    )
    launch: Launch = key(Launch, "launching and monitoring the workers")
    sweep: Sweep = key(Sweep, "many runs from one command (-m)")

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
        for some, size, length in self.ramp_stages():
            more = min(some, -(-left // (size * length)))
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
        for some, size, length in self.ramp_stages():
            total += min(steps, some) * size * length
            steps = max(0, steps - some)
        return total

    def batch_shape(self, step: int) -> tuple[int, int]:
        """Return (sequences, tokens per sequence) of the global batch of a step, counted from 1."""
        for some, size, length in self.ramp_stages():
            if step <= some:
                return size, length
            step -= some
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
    "split": _by_name(EvenSplit, PointSplit, TraceSplit, BalanceSplit, AutoSplit),
    "schedule": {
        **dict.fromkeys(("gpipe", "1f1b"), Schedule),
        **dict.fromkeys(("interleaved1f1b", "loopedbfs"), LoopedSchedule),
        "interleavedzerobubble": LoopedZeroBubbleSchedule,
        **dict.fromkeys(("zbh1", "zbh2", "vhalf", "vmin"), ZeroBubbleSchedule),
        **dict.fromkeys(("zbvzerobubble", "dualpipev"), ZeroBubbleSchedule),
        **_by_name(CsvSchedule, AutoSchedule),
    },
    "data": _by_name(TextData, HFData, TokenData, MixtureData, ChatData, StreamData, SyntheticData),
    "optimizer": optimizer_kinds(),
    "lr": {"constant": ConstantLr, "linear": DecayLr, "cosine": DecayLr, "wsd": WsdLr},
    "loss": _by_name(CrossEntropy, ChunkedCrossEntropy, Mse),
    "precision": {
        "fp32": Precision,
        "bf16": Precision,
        **_by_name(Float8Precision, Mxfp8Precision),
    },
    "activation_checkpoint": {
        **dict.fromkeys(("none", "full"), ActivationCheckpoint),
        **_by_name(SelectiveActivationCheckpoint, EveryActivationCheckpoint),
        **_by_name(FitActivationCheckpoint),
    },
    "numerics": dict.fromkeys(("fast", "exact"), Numerics),
    "verify": dict.fromkeys(("auto", "required", "off"), Verify),
    "logger": _by_name(Wandb, TensorBoard, NoLogger),
    "profile": _by_name(NoProfile, TraceProfile, MemoryProfile),
    "hardware": {
        **_by_name(NoHardware),
        **dict.fromkeys(("a100_40g", "a100_80g", "h100_sxm", "h100_pcie", "h200"), Hardware),
        **dict.fromkeys(("b200", "gb200", "mi300x"), Hardware),
        "cpu": CpuHardware,
    },
}

# groups whose `name` may be an import path of the user's own
OPEN_GROUPS = ("model", "schedule", "data", "optimizer", "lr", "loss")
