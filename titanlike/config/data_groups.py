"""The choices of the group `data`: one dataclass for each, see `schema.VARIANTS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titanlike.config.keys import Paths, key, required

# --- keys that several choices have


def _text_key() -> Any:
    return key("text", "field (JSONL) or column (Parquet) that holds the text")


def _tokenizer() -> Any:
    return key(
        "bytes",
        "'bytes' (built in), or the path of a tokenizer.json, a folder with one, or a sentencepiece model",
    )


def _documents() -> Any:
    return key(
        False, "attention stays within each document of a sequence, where positions begin at 0"
    )


def _cache() -> Any:
    return key(None, "folder for tokenized files; null = ~/.cache/titanlike")


def _workers() -> Any:
    return key(0, "loader processes per rank; 0 = load in the training process")


def _changed() -> Any:
    return key(False, "resume although the data are not those of the checkpoint; for one start")


@dataclass
class TextData:
    """Text files, JSONL or Parquet, tokenized once into a cache and packed into sequences."""

    name: str = key("text", "choice")
    path: str | None = key(
        None, "file or folder (.txt .py .md ..., .jsonl, .parquet); null = this Python's sources"
    )
    text_key: str = _text_key()
    tokenizer: str = _tokenizer()
    validation_fraction: float = key(0.05, "share of the documents for validation")
    cache: str | None = _cache()
    documents: bool = _documents()
    workers: int = _workers()
    changed: bool = _changed()


@dataclass(kw_only=True)
class HFData:
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
    text_key: str = _text_key()
    tokenizer: str = _tokenizer()
    validation_fraction: float = key(0.05, "share of the rows for validation")
    cache: str | None = _cache()
    documents: bool = _documents()
    workers: int = _workers()
    changed: bool = _changed()


@dataclass(kw_only=True)
class TokenData:
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
    )
    validation_fraction: float = key(0.05, "share at the end of the file for validation")
    boundary: int | None = key(
        None, "token id that begins (or ends) every document; null = as a folder's index says"
    )
    documents: bool = key(
        False, "attention stays within each document of a sequence; needs data.boundary"
    )
    workers: int = _workers()
    changed: bool = _changed()


@dataclass(kw_only=True)
class MixtureData:
    """Several corpora, mixed by weights."""

    name: str = key("mixture", "choice")
    sources: dict[str, Any] = required(
        "name -> {path: of tokens or text, weight: a number, or [[step, weight], ...] between which it "
        "is interpolated}"
    )
    text_key: str = _text_key()
    tokenizer: str = key(
        "bytes", "of sources of text, as for data=text; of tokens their index has it"
    )
    validation_fraction: float = key(0.05, "share of each source for validation")
    cache: str | None = _cache()
    documents: bool = _documents()
    workers: int = _workers()
    changed: bool = _changed()


@dataclass(kw_only=True)
class ChatData:
    """Conversations, with loss on the answers alone."""

    name: str = key("chat", "choice")
    path: str = required("JSONL file, or folder of them (.jsonl, .jsonl.gz, .jsonl.zst)")
    messages_key: str = key("messages", "field with the list of messages: {role, content}")
    template: str | None = key(
        None, "Jinja file; null = the chat template that is with the tokenizer, else a built-in one"
    )
    tokenizer: str = key("bytes", "as for data=text; of a folder also its chat template is taken")
    validation_fraction: float = key(0.05, "share of the conversations for validation")
    cache: str | None = _cache()
    documents: bool = key(True, "attention stays within each conversation of a sequence")
    workers: int = _workers()
    changed: bool = _changed()


@dataclass
class SyntheticData:
    """Random tokens from (seed, position): for benchmarks, costs nothing to load."""

    name: str = key("synthetic", "choice")
    vocab_size: int = key(256, "number of token ids")
    changed: bool = _changed()
