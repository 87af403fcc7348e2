"""Where training data come from, and how batches begin smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titanlike.core.config.keys import MAX_VOCAB, Paths, key, required


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


@dataclass(kw_only=True)
class RampStage:
    """Smaller batches or shorter sequences at the beginning of a run."""

    tokens: int = required("tokens of the run after which the stage ends", gt=0)
    batch_size: int | None = key(None, "sequences per step over all of dp; null = as later", ge=1)
    seq_len: int | None = key(None, "tokens in a sequence; null = as later", ge=1, example=64)
