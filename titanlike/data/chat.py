"""Instruction data (`data=chat`): conversations in JSONL, loss on the answers alone.

1. Each line is an object with a list of messages ({"role": "user", "content": "..."}). A chat template
   makes a text of it; the pieces between its answers are tokenized one by one.
2. Conversations are put into sequences of seq_len in their order, as many whole ones as fit; one that
   is longer is cut at its end. The rest of a sequence is padding without loss.
3. Attention stays within a conversation, where positions begin at 0 (`document_ids`).

All of it is done once, into the cache (`data.cache`), and then mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlike.config.files import read_object
from titanlike.config.schema import ChatData
from titanlike.data.chat_template import (
    EXAMPLE,
    BadConversation,
    ChatTemplate,
    Message,
    find_template,
)
from titanlike.data.errors import DataError
from titanlike.data.records import COMPRESSED, kind_of, opened
from titanlike.data.shuffle import splitmix64
from titanlike.data.sources import IGNORE, Data
from titanlike.data.tokenizer import Tokenizer, open_tokenizer

FORMAT = 1  # part of the key of a cache entry
_FIX = "Fix or delete that line"


def open_chat(data: ChatData, seq_len: int) -> Data:
    """Raises DataError for what cannot be read, and for a part without answers."""
    tokenizer, template = (
        open_tokenizer(data.tokenizer),
        find_template(data.template, data.tokenizer),
    )
    folder = _cached(data, seq_len, tokenizer, template)
    about = read_object(folder / "meta.json")
    parts = {
        part: ChatSource(folder / part, seq_len, data.documents) for part in ("train", "validation")
    }
    for part, source in parts.items():
        if not len(source):
            reason = f"the {part} part has no conversation with an answer"
            raise DataError(
                "data.path", data.path, reason, "Give more, or another validation_fraction"
            )
    train = len(parts["train"])
    text = f"{data.path}: {about['conversations']:,} conversations in {train:,} sequences for training, "
    text += f"{len(parts['validation']):,} for validation; loss on {about['answers']:,} tokens of answers"
    if about["cut"]:
        text += f"; {about['cut']:,} conversations are longer than seq_len and were cut"
    return Data(
        parts["train"],
        parts["validation"],
        vocab_size=tokenizer.vocab_size,
        description=text,
        boundary=tokenizer.boundary,
        ends=template.ends(tokenizer),
        decode=tokenizer.decode,
        encode=tokenizer.encode_template,
        tokenizer=tokenizer.fingerprint,
    )


class ChatSource:
    """Sequences of conversations, from the cache.

    ids, learned: of all conversations one after the other; ends: of each; firsts: the first
    conversation of each sequence, and the number of all at the end.
    """

    def __init__(self, folder: Path, seq_len: int, documents: bool) -> None:
        self._arguments = folder, seq_len, documents
        self._seq_len, self._documents = seq_len, documents
        names = ("ids", "learned", "ends", "firsts")
        self._ids, self._learned, self._ends, self._firsts = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in names
        )
        self._padding = int(np.load(folder / "padding.npy"))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments  # a spawned loader process maps the files again

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        length = self._seq_len
        inputs = np.full(length, self._padding, np.int64)
        targets = np.full(length, IGNORE, np.int64)
        numbers = np.zeros(length, np.int64)
        at = 0
        for number in range(int(self._firsts[i]), int(self._firsts[i + 1])):
            start, stop = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
            ids = self._ids[start:stop].astype(np.int64)
            learned = self._learned[start + 1 : stop]
            here = slice(at, at + len(ids) - 1)
            inputs[here] = ids[:-1]
            targets[here] = np.where(learned, ids[1:], IGNORE)
            numbers[here] = number - int(self._firsts[i])
            at += len(ids) - 1
        numbers[at:] = length  # padding is by itself
        sample = {"inputs": inputs, "targets": targets}
        if self._documents:
            sample["document_ids"] = numbers
        return {name: torch.from_numpy(value) for name, value in sample.items()}


# --- the cache ------------------------------------------------------------------------------------


def _cached(data: ChatData, seq_len: int, tokenizer: Tokenizer, template: ChatTemplate) -> Path:
    files = find_conversations(data.path)
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kept = {
        key: value
        for key, value in asdict(data).items()
        if key not in ("workers", "changed", "cache")
    }
    content = [FORMAT, stats, kept, seq_len, tokenizer.fingerprint, template.render(EXAMPLE)]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    cache = Path(data.cache or "~/.cache/titanlike").expanduser().resolve()
    folder = cache / f"chat-{key}"
    if (folder / "meta.json").is_file():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache) as parent:
            made = Path(parent, "entry")
            _write(made, files, data, seq_len, tokenizer, template)
            shutil.rmtree(folder, ignore_errors=True)  # what a crash has left
            os.rename(made, folder)
    except OSError as error:
        if not (folder / "meta.json").is_file():  # another process has been faster
            reason = f"the folder cannot be written ({error.strerror or error})"
            raise DataError("data.cache", cache, reason, "Give a writable folder") from None
    return folder


def _write(
    folder: Path,
    files: list[Path],
    data: ChatData,
    seq_len: int,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> None:
    about = {"conversations": 0, "answers": 0, "cut": 0}
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"train": [], "validation": []}
    for number, (place, messages) in enumerate(_conversations(files, data.messages_key)):
        try:
            pieces = template.pieces(messages)
        except BadConversation as error:
            fix = "Fix or delete it, or give another data.template"
            raise DataError("data.path", place, str(error), fix) from None
        each = [(tokenizer.encode_template(piece.text), piece.answer) for piece in pieces]
        ids = np.array([token for tokens, _ in each for token in tokens], np.uint32)
        learned = np.array([answer for tokens, answer in each for _ in tokens], bool)
        about["cut"] += len(ids) > seq_len + 1
        ids, learned = ids[: seq_len + 1], learned[: seq_len + 1]
        if not learned[1:].any():
            continue  # no answer, or not within seq_len
        hashed = int(splitmix64(np.array([number + 1], np.uint64))[0])
        part = "validation" if hashed < data.validation_fraction * 2.0**64 else "train"
        parts[part].append((ids, learned))
        about["conversations"] += 1
        about["answers"] += int(learned[1:].sum())
    if not parts["validation"] and len(parts["train"]) > 1:
        parts["validation"].append(parts["train"].pop())
    for part, conversations in parts.items():
        (folder / part).mkdir(parents=True)
        lengths = [len(ids) for ids, _ in conversations]
        empty = np.empty(0, np.uint32)
        arrays = {
            "ids": np.concatenate([empty, *(ids for ids, _ in conversations)]),
            "learned": np.concatenate([empty.astype(bool), *(one for _, one in conversations)]),
            "ends": np.cumsum(lengths, dtype=np.int64),
            "firsts": np.array(_packed([length - 1 for length in lengths], seq_len), np.int64),
            "padding": np.array(tokenizer.boundary),
        }
        for name, array in arrays.items():
            np.save(folder / part / f"{name}.npy", array)
    (folder / "meta.json").write_text(json.dumps(about))


def _packed(lengths: list[int], seq_len: int) -> list[int]:
    """The first conversation of each sequence, and the number of all."""
    firsts, room = list[int](), 0
    for number, length in enumerate(lengths):
        if length > room:
            firsts.append(number)
            room = seq_len
        room -= length
    return [*firsts, len(lengths)] if lengths else [0]


def find_conversations(path: str) -> list[Path]:
    """The JSONL files of `data.path`, sorted. Raises DataError."""
    root = Path(path).expanduser().resolve()
    if root.is_file():
        return [root]
    every = (one for one in root.rglob("*") if one.is_file() and not one.name.startswith("."))
    if found := sorted(one for one in every if kind_of(one) == ".jsonl"):
        return found
    reason = "there is no such file or folder" if not root.exists() else "no .jsonl file in it"
    fix = (
        f"Give a file of conversations, or a folder with .jsonl files (also {' '.join(COMPRESSED)})"
    )
    raise DataError("data.path", path, reason, fix)


def _conversations(files: list[Path], key: str) -> Iterator[tuple[str, list[Message]]]:
    """(where it is, messages) of each line. Raises DataError."""
    for file in files:
        with opened(file) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{file}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError("data.path", place, f"is not JSON ({error})", _FIX) from None
                messages = row.get(key) if isinstance(row, dict) else None
                if not isinstance(messages, list) or not all(map(_is_message, messages)):
                    names = ", ".join(row) if isinstance(row, dict) else "no object"
                    reason = f"has no list of messages with a role and a content in {key} ({names})"
                    fix = f"Name the field, data.messages_key=conversations; or {_FIX.lower()}"
                    raise DataError("data.path", place, reason, fix)
                yield place, messages


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
