"""The choices of the group `data`: one dataclass for each, see `schema.VARIANTS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titanlike.config.keys import Paths, key, required


@dataclass
class TextData:
    """Text files, JSONL or Parquet, tokenized once into a cache and packed into sequences."""

    name: str = key("text", "choice")
    path: str | None = key(
        None, "file or folder (.txt .py .md ..., .jsonl, .parquet); null = this Python's sources"
    )
    text_key: str = key("text", "field (JSONL) or column (Parquet) that holds the text")
    tokenizer: str = key(
        "bytes",
        "'bytes' (built in), or the path of a tokenizer.json, a folder with one, or a sentencepiece model",
    )
    validation_fraction: float = key(0.05, "share of the documents for validation")
    cache: str | None = key(None, "folder for tokenized files; null = ~/.cache/titanlike")
    documents: bool = key(
        False, "attention stays within each document of a sequence, where positions begin at 0"
    )
    workers: int = key(0, "loader processes per rank; 0 = load in the training process")
    changed: bool = key(
        False, "resume although the data are not those of the checkpoint; for one start"
    )


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
    workers: int = key(0, "loader processes per rank; 0 = load in the training process")
    changed: bool = key(
        False, "resume although the data are not those of the checkpoint; for one start"
    )


@dataclass(kw_only=True)
class MixtureData:
    """Several corpora, mixed by weights."""

    name: str = key("mixture", "choice")
    sources: dict[str, Any] = required(
        "name -> {path: of tokens or text, weight: a number, or [[step, weight], ...] between which it "
        "is interpolated}"
    )
    text_key: str = key("text", "field (JSONL) or column (Parquet) that holds the text")
    tokenizer: str = key(
        "bytes", "of sources of text, as for data=text; of tokens their index has it"
    )
    validation_fraction: float = key(0.05, "share of each source for validation")
    cache: str | None = key(None, "folder for tokenized text; null = ~/.cache/titanlike")
    documents: bool = key(
        False, "attention stays within each document of a sequence, where positions begin at 0"
    )
    workers: int = key(0, "loader processes per rank; 0 = load in the training process")
    changed: bool = key(
        False, "resume although the data are not those of the checkpoint; for one start"
    )


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
    cache: str | None = key(None, "folder for tokenized files; null = ~/.cache/titanlike")
    documents: bool = key(True, "attention stays within each conversation of a sequence")
    workers: int = key(0, "loader processes per rank; 0 = load in the training process")
    changed: bool = key(
        False, "resume although the data are not those of the checkpoint; for one start"
    )


@dataclass
class SyntheticData:
    """Random tokens from (seed, position): for benchmarks, costs nothing to load."""

    name: str = key("synthetic", "choice")
    vocab_size: int = key(256, "number of token ids")
    changed: bool = key(
        False, "resume although the data are not those of the checkpoint; for one start"
    )
