"""The choices of the config groups: one dataclass for each set of keys, see `schema.VARIANTS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titanlike.config.keys import MAX_VOCAB, Bytes, Custom, Paths, key, required


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
    points: list[str] = key(
        [], "modules where a new stage begins, e.g. [model.layers.3,model.layers.6]"
    )


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
    cost: Literal["params", "flops", "time", "memory", "run"] = key(
        "flops",
        "params; flops of a training step; time, measured on the device; memory of state and "
        "activations; run = what `split.run` has measured",
    )
    run: str | None = key(
        None, "directory of a run with timeline=true; split.cost=RUN is short for both"
    )


# --- schedule: the order of a pipeline's computations ------------------------------------------


@dataclass
class Schedule:
    """A schedule with whole backwards and one stage on each pipeline rank."""

    name: str = key("1f1b", "choice")
    microbatches: int | None = key(
        None, "number per dp rank and step; null = derived and printed", le=100_000
    )


@dataclass
class LoopedSchedule(Schedule):
    """A schedule with several stages on each pipeline rank."""

    name: str = key("interleaved1f1b", "choice")
    stages_per_rank: int = key(2, "stages (model chunks) on each pipeline rank", ge=1, le=256)


_WEIGHT_GRADIENTS = (
    "deferred = of linear layers in W, which fills the bubble; together = all in I, with the least "
    "memory"
)


@dataclass
class ZeroBubbleSchedule(Schedule):
    """A schedule that splits the backward, of one stage a rank (zbh1, zbh2) or of two in a V."""

    name: str = key("zbvzerobubble", "choice")
    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)


@dataclass
class LoopedZeroBubbleSchedule(LoopedSchedule):
    """A schedule with several stages on each pipeline rank that splits the backward."""

    name: str = key("interleavedzerobubble", "choice")
    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)


@dataclass(kw_only=True)
class CsvSchedule:
    """An order read from a file: a row a pipeline rank, cells like 0F0, 0B0, 0I0, 0W0."""

    name: str = key("csv", "choice")
    path: str = required("CSV file; microbatches and stages are counted in it")
    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)


@dataclass
class AutoSchedule:
    """An order made for the costs of this model's stages: kept as order.csv in run_dir."""

    name: str = key("auto", "choice")
    microbatches: int | None = key(
        None, "number per dp rank and step; null = derived and printed", le=100_000
    )
    stages_per_rank: int = key(
        2, "stages on each pipeline rank; search=placement|split: the most", ge=1, le=256
    )
    placement: Literal["v", "loop"] = key(
        "v", "where the stages of a rank are: loop = 0 1 2 0 1 2; v = 0 1 2 2 1 0 (two a rank)"
    )
    search: Literal["order", "placement", "split"] = key(
        "placement",
        "what is chosen: order, for stages_per_rank, placement and split as they are said; placement = "
        "and stages a rank and placement; split = and where stages begin",
    )
    memory: float | None = key(
        None,
        "what activations of a rank may take, as a share of what they take under 1f1b; null = 1.0, or "
        "what memory_bytes and in_flight say; of several limits each holds",
    )
    memory_bytes: Bytes | None = key(
        None, "what activations of a rank may take, in bytes, such as 40GiB; null = no such limit"
    )
    in_flight: float | None = key(
        None,
        "microbatches whose activations a rank may hold, each in all of its stages; null = no such limit",
    )
    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)
    path: str | None = key(None, "CSV of an order that was found; null = search, or order.csv")


@dataclass
class OwnSchedule(Custom):
    """The user's own order: a function (pp, microbatches, **args) -> Order."""

    weight_gradients: Literal["deferred", "together"] = key("deferred", _WEIGHT_GRADIENTS)


# --- optimization ------------------------------------------------------------------------------


_STATE_DTYPE = "dtype of the two running means; bf16 = half the memory, rounded stochastically"


@dataclass
class AdamW:
    """torch.optim.AdamW, fused."""

    name: str = key("adamw", "choice")
    lr: float = key(3e-3, "peak learning rate", ge=0)
    betas: list[float] = key([0.9, 0.95], "decay of the two running means", ge=0, lt=1)
    eps: float = key(1e-8, "added to the denominator", gt=0)
    weight_decay: float = key(
        0.1, "decoupled decay of matrices; vectors (norms, biases) have none", ge=0
    )
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping", gt=0)
    state_dtype: Literal["fp32", "bf16"] = key("fp32", _STATE_DTYPE)


@dataclass
class Muon:
    """Muon (arXiv 2502.16982) for the matrices of the blocks, AdamW for everything else."""

    name: str = key("muon", "choice")
    lr: float = key(3e-3, "peak learning rate of the matrices that Muon updates", ge=0)
    momentum: float = key(0.95, "decay of the running mean of gradients", ge=0, lt=1)
    nesterov: bool = key(True, "look ahead by one more step of the momentum")
    ns_steps: int = key(5, "iterations that orthogonalize a matrix", ge=1, le=20, example=5)
    adjust_lr: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "lr of a matrix: match_rms_adamw = 0.2 sqrt(longer side), so that AdamW's lr fits; original "
        "= sqrt(rows / columns), at least 1",
    )
    weight_decay: float = key(
        0.1, "decoupled decay of matrices; vectors (norms, biases) have none", ge=0
    )
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping", gt=0)
    adamw_lr: float | None = key(None, "peak learning rate of all others; null = lr", ge=0)
    betas: list[float] = key([0.9, 0.95], "of AdamW: decay of the two running means", ge=0, lt=1)
    eps: float = key(1e-8, "of AdamW: added to the denominator", gt=0)
    state_dtype: Literal["fp32", "bf16"] = key("fp32", f"of AdamW: {_STATE_DTYPE}")
    adamw: list[str] = key(
        [], "matrices of blocks that AdamW updates too, by patterns of names: ['*.router.weight']"
    )


@dataclass
class Sgd:
    """torch.optim.SGD."""

    name: str = key("sgd", "choice")
    lr: float = key(0.1, "peak learning rate", ge=0)
    momentum: float = key(0.0, "momentum factor", ge=0, lt=1)
    weight_decay: float = key(0.0, "L2 decay of matrices; vectors (norms, biases) have none", ge=0)
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping", gt=0)


@dataclass
class ConstantLr:
    """Warm-up, then the peak."""

    name: str = key("constant", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)


@dataclass
class DecayLr:
    """Warm-up, then a decay (linear or cosine) over all steps that remain."""

    name: str = key("cosine", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)
    final: float = key(0.1, "learning rate of the last step, as a share of the peak", ge=0, le=1)


@dataclass
class WsdLr:
    """Warm-up, stable, decay (arXiv 2404.06395): the peak until the last part of the run."""

    name: str = key("wsd", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)
    decay: float = key(
        0.2, "share of all steps, at the end, in which it falls linearly", gt=0, le=1
    )
    final: float = key(0.05, "learning rate of the last step, as a share of the peak", ge=0, le=1)


@dataclass
class CrossEntropy:
    """Token cross entropy in nats: summed, over the global number of valid tokens."""

    name: str = key("cross_entropy", "choice")


@dataclass
class ChunkedCrossEntropy:
    """The same, a few tokens at a time: logits of the whole batch are never in memory."""

    name: str = key("chunked_cross_entropy", "choice")
    chunk: int = key(2048, "tokens of a microbatch whose logits are in memory at a time", ge=1)


@dataclass
class Mse:
    """Squared differences of output and targets: their mean over all elements of the batch."""

    name: str = key("mse", "choice")


# --- precision ----------------------------------------------------------------------------------


@dataclass
class Precision:
    """fp32, or bf16: compute and activations in bf16, master weights and reductions in fp32."""

    name: Literal["fp32", "bf16", "float8"] = key("fp32", "choice")

    @property
    def low(self) -> bool:
        """Whether activations are in bf16, and weights cast to it."""
        return self.name != "fp32"


@dataclass
class Float8Precision(Precision):
    """bf16, and the matrix products of linear layers in float8 by torchao (titanlike[float8])."""

    name: Literal["float8"] = key("float8", "choice")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = key(
        "tensorwise",
        "of torchao: one scale for a tensor, one for each row, or rows and weight gradients in bf16",
    )
    skip: list[str] = key(
        [], "linear layers that stay in bf16, by patterns of their names: [*.layers.0.*,*.o_proj]"
    )
    min_features: int = key(
        64, "linear layers with fewer inputs or outputs stay in bf16, too", ge=1
    )


# --- activation checkpointing -------------------------------------------------------------------


@dataclass
class ActivationCheckpoint:
    """Activations are kept for the backward (none), or computed again in it (full)."""

    name: str = key("none", "choice")


@dataclass
class SelectiveActivationCheckpoint(ActivationCheckpoint):
    """Every block is recomputed but for what takes longest: matrix products, attention, exchanges."""

    name: str = key("selective", "choice")
    save: list[str] = key(
        ["aten.*mm", "aten.convolution", "titanlike.*_tokens", "*attention*", "*_attn*"],
        "operators whose results are kept, by patterns of their names",
    )


@dataclass
class EveryActivationCheckpoint(ActivationCheckpoint):
    """One block in so many is recomputed."""

    name: str = key("every", "choice")
    every: int = key(2, "1 = every block, 2 = every second one, ...", ge=1)


@dataclass
class FitActivationCheckpoint(ActivationCheckpoint):
    """As few blocks are recomputed as fit into memory, on each rank its own number."""

    name: str = key("fit", "choice")
    memory: Bytes | None = key(
        None, "what training may take on a device, such as 75GiB; null = what it has, less 8%"
    )


# --- logger -------------------------------------------------------------------------------------


@dataclass
class Wandb:
    """Weights & Biases: online where a key is found, else offline into run_dir/wandb."""

    name: str = key("wandb", "choice")
    project: str = key("titanlike", "project")
    entity: str | None = key(None, "user or team; null = the key's default")
    run_name: str | None = key(
        None, "name of the run; null = its overrides, else its folder's name"
    )
    group: str | None = key(None, "group of the run")
    tags: list[str] = key([], "tags of the run: [a,b]")
    notes: str | None = key(None, "description of the run")
    mode: Literal["auto", "online", "offline"] = key("auto", "auto = online if a key is found")
    timeout: float = key(30.0, "seconds to wait for the server before going offline", gt=0, le=1e6)


@dataclass
class TensorBoard:
    """TensorBoard event files in run_dir/tensorboard (needs the extra titanlike[tensorboard])."""

    name: str = key("tensorboard", "choice")


@dataclass
class NoLogger:
    """metrics.jsonl alone."""

    name: str = key("none", "choice")


# --- data ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Data:
    """What every choice has."""

    name: str = key("synthetic", "choice")
    changed: bool = key(
        False, "resume although the data are not those of the checkpoint; for one start"
    )


@dataclass(kw_only=True)
class SyntheticData(Data):
    """Random tokens from (seed, position): for benchmarks, costs nothing to load."""

    vocab_size: int = key(256, "number of token ids", le=MAX_VOCAB)


@dataclass(kw_only=True)
class Corpus(Data):
    """What every choice has that is read from files."""

    validation_fraction: float = key(
        0.05,
        "share for validation: of the documents (rows, conversations), or the end of token files",
    )
    documents: bool = key(
        False, "attention stays within each document of a sequence, where positions begin at 0"
    )
    workers: int = key(0, "loader processes per rank; 0 = load in the training process")


@dataclass(kw_only=True)
class Tokenized(Corpus):
    """What every choice has that is tokenized into a cache."""

    tokenizer: str = key(
        "bytes",
        "'bytes' (built in), or the path of a tokenizer.json, a folder with one, or a sentencepiece model",
    )
    cache: str | None = key(None, "folder for tokenized files; null = ~/.cache/titanlike")


_TEXT_KEY = "field (JSONL) or column (Parquet) that holds the text"


@dataclass(kw_only=True)
class TextData(Tokenized):
    """Text files, JSONL or Parquet, tokenized once into a cache and packed into sequences."""

    name: str = key("text", "choice")
    path: str | None = key(
        None, "file or folder (.txt .py .md ..., .jsonl, .parquet); null = this Python's sources"
    )
    text_key: str = key("text", _TEXT_KEY)


@dataclass(kw_only=True)
class HFData(Tokenized):
    """A Hugging Face dataset, read once in its order, tokenized into a cache as text is."""

    name: str = key("hf", "choice")
    path: str = required(
        "folder of save_to_disk, folder or file of Parquet, Arrow, JSON or CSV, or a name on the hub"
    )
    subset: str | None = key(None, "configuration of a dataset that has several")
    split: str = key("train", "which of the dataset's splits; validation is a share of it")
    revision: str | None = key(None, "of a name on the hub: branch, tag or commit")
    streaming: bool = key(
        True, "read without a copy in datasets' own cache; false = download first"
    )
    rows: int | None = key(None, "the first rows alone; null = all")
    text_key: str = key("text", _TEXT_KEY)


@dataclass(kw_only=True)
class TokenData(Corpus):
    """Files of token ids, memory-mapped."""

    name: str = key("tokens", "choice")
    path: Paths = required(
        "folder that titanlike tokenize wrote, or token file: .npy, or raw little-endian integers "
        "(.bin); or a list of them"
    )
    dtype: Literal["uint16", "uint32"] = key("uint16", "integer type of a raw .bin file")
    vocab_size: int | None = key(
        None,
        "number of token ids; every id in the files is smaller; null = as a folder's index says",
        le=MAX_VOCAB,
    )
    boundary: int | None = key(
        None,
        "token id that begins (or ends) every document, which data.documents needs; "
        "null = as a folder's index says",
    )


@dataclass(kw_only=True)
class MixtureData(Tokenized):
    """Several corpora, mixed by weights; of tokens, their index has the tokenizer."""

    name: str = key("mixture", "choice")
    sources: dict[str, Any] = required(
        "name -> {path: of tokens or text, weight: a number, or [[step, weight], ...] between which it "
        "is interpolated}"
    )
    text_key: str = key("text", _TEXT_KEY)


@dataclass(kw_only=True)
class ChatData(Tokenized):
    """Conversations, with loss on the answers alone; of a tokenizer's folder its chat template, too."""

    name: str = key("chat", "choice")
    path: str = required("JSONL file, or folder of them (.jsonl, .jsonl.gz, .jsonl.zst)")
    messages_key: str = key("messages", "field with the list of messages: {role, content}")
    template: str | None = key(
        None, "Jinja file; null = the chat template that is with the tokenizer, else a built-in one"
    )
    documents: bool = key(True, "attention stays within each conversation of a sequence")
