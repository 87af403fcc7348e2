"""Instruction data (`data=chat`): conversations in files, with the loss on assistant messages
alone.

1. Each row is a list of messages ({"role": "user", "content": "..."}), or is converted to one by
   conversation_forms.py. A chat template renders it as text, which is tokenized as transformers
   does it. The tokens of an answer are found by their character offsets.
2. Conversations are packed into sequences of seq_len in file order, as many as fit without cutting;
   a longer one is truncated at its end. The rest of a sequence is padding without loss.
3. Attention stays within a conversation, where positions begin at 0 (`document_ids`).

The result is written to the cache (`data.cache`) once, and memory-mapped from there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlike.core.config.files import read_object
from titanlike.core.config.groups.data import ChatData
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError
from titanlike.core.data.order import held_out
from titanlike.core.data.sources import IGNORE, REAL, Data
from titanlike.formats.chat_template import (
    EXAMPLE,
    BadConversation,
    ChatTemplate,
    NoEnd,
    find_template,
    first_day,
)
from titanlike.formats.conversation_forms import (
    conversation,
    without_nulls,
)
from titanlike.formats.tables import TABLES
from titanlike.formats.text import (
    check_tokenizer,
    file_states,
    find_files,
    first_files,
    kind_of_file,
    records,
    rows_of,
    vocabulary,
)
from titanlike.formats.token_files import read_array
from titanlike.formats.token_folder import PARTS, cache_key, cached

__all__ = ["CHECKS", "open_data", "vocabulary"]

FORMAT = 3  # part of the key of a cache entry
_SUFFIXES = (".jsonl", ".json", *TABLES)


def open_data(data: ChatData, config: Config) -> Data:
    """Open or write the cache entry. Raises DataError: unreadable files, a part without answers."""

    def read(folder: Path) -> tuple[dict[str, ChatSource], _About] | None:
        used = PARTS if data.validation_fraction else PARTS[:1]  # 0 = nothing is held out
        # of an entry that is missing, or is not what `_write` writes
        with contextlib.suppress(OSError, ValueError, TypeError, IndexError):
            about = read_object(folder / _META, _About)
            return {n: ChatSource(folder / n, config.seq_len, data.documents) for n in used}, about
        return None

    day = first_day(config.run_dir)
    template = find_template(data.template, data.tokenizer, data.parse_special, day)
    tokenizer = template.tokenizer
    files = find_files(data.path, _SUFFIXES)
    common = ("workers", "changed", "cache")  # not part of the entry's key
    settings = {key: value for key, value in asdict(data).items() if key not in common}
    content = [FORMAT, file_states(files), settings, config.seq_len, tokenizer.fingerprint]
    content += [tokenizer.names, sorted(template.ends)]
    content += [day] if "strftime_now" in template.source else []
    parts, about = cached(
        data.cache,
        f"chat-{cache_key([*content, template.source])}",
        read,
        lambda folder: _write(folder, files, data, config.seq_len, template),
    )
    for part, source in parts.items():
        if not len(source):
            reason = f"the {part} part has no conversation with an answer in "
            fix = "give more, a larger seq_len, or another validation_fraction"
            raise DataError("data.path", data.path, f"{reason}{config.seq_len} tokens", fix)
    train, held = parts["train"], parts.get("validation", parts["train"])
    text = f"{data.path}: {about.conversations:,} conversations in {len(train):,} sequences"
    text += f" for training, {len(held):,} for validation" if data.validation_fraction else ""
    text += f"; loss on {about.answers:,} tokens of answers"
    text += f"; read as {', '.join(about.forms)}" if about.forms else ""
    if about.cut:
        text += f"; {about.cut:,} conversations are longer than seq_len and were cut"
    if about.dropped:
        text += f"; {about.dropped:,} have no answer within seq_len and were left out"
    return Data(
        train,
        held,
        vocab_size=tokenizer.vocab_size,
        description=text,
        boundary=tokenizer.boundary,
        ends=template.ends,
        decode=tokenizer.decode,
        encode=template.encode,
        tokenizer=tokenizer.fingerprint,
    )


def _check_conversations(data: ChatData, config: Config) -> None:
    template = find_template(data.template, data.tokenizer)
    try:
        template.learned(EXAMPLE)
    except NoEnd as error:
        raise DataError("data.template", data.template, str(error), error.fix) from None
    except BadConversation:
        pass  # a template may refuse this conversation and accept others
    for file in first_files(find_files(data.path, _SUFFIXES)):
        next(_learned(file, data, template), None)


def _learned(
    file: Path, data: ChatData, template: ChatTemplate, forms: set[str] | None = None
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the token ids of a file's conversations, and whether each has a loss. forms: receives
    the names of their formats. Raises DataError with file and line."""

    of_table = kind_of_file(file) in TABLES

    def read(row: Any) -> tuple[list[int], np.ndarray]:
        row = without_nulls(row) if of_table else row
        form, messages, tools = conversation(row, data.messages_key)
        if forms is not None:
            forms.update({form} - {""})
        return template.learned(messages, tools)

    return records(file, rows_of(file), read)


CHECKS = (check_tokenizer, _check_conversations)


class ChatSource:
    """Packed conversations, read from the cache.

    ids, learned: the concatenated tokens of all conversations and whether each has a loss; ends:
    the end of each conversation in these; firsts: the first conversation of each sequence, and last
    their total number.
    """

    def __init__(self, folder: Path, seq_len: int, documents: bool) -> None:
        self._arguments = folder, seq_len, documents
        self._seq_len, self._documents = seq_len, documents
        names = ("ids", "learned", "ends", "firsts")
        self._ids, self._learned, self._ends, self._firsts = (
            read_array(folder / f"{name}.npy") for name in names
        )
        self._padding = int(read_array(folder / "padding.npy"))
        lengths = np.diff(self._ends, prepend=0), np.diff(self._firsts)
        sizes = [(self._ends, len(self._ids)), (self._firsts, len(self._ends))]
        if (
            len(self._learned) != len(self._ids)
            or any(part.size and part.min() < 0 for part in lengths)
            or any(one.ndim != 1 or (one.size and one[-1] != size) for one, size in sizes)
        ):
            raise ValueError("the files of the entry do not belong together")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments  # a spawned loader process maps the files again

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        length = self._seq_len
        inputs = np.full(length, self._padding, np.int64)
        targets = np.full(length, IGNORE, np.int64)
        numbers = np.zeros(length, np.int64)
        filled = 0
        for number in range(int(self._firsts[i]), int(self._firsts[i + 1])):
            start, stop = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
            ids = self._ids[start:stop].astype(np.int64)
            learned = self._learned[start + 1 : stop]
            here = slice(filled, filled + len(ids) - 1)
            inputs[here] = ids[:-1]
            targets[here] = np.where(learned, ids[1:], IGNORE)
            numbers[here] = number - int(self._firsts[i])
            filled += len(ids) - 1
        numbers[filled:] = length  # padding is a document by itself
        sample = {"inputs": inputs, "targets": targets, REAL: np.arange(length) < filled}
        if self._documents:
            sample["document_ids"] = numbers
        return {name: torch.from_numpy(value) for name, value in sample.items()}


# --- the cache ----------------------------------------------------------------------------------

_META = "meta.json"


@dataclass
class _About:
    """What meta.json says of an entry."""

    conversations: int = 0
    answers: int = 0  # tokens with a loss
    cut: int = 0
    dropped: int = 0
    forms: list[str] = field(default_factory=list)


def _write(
    folder: Path, files: list[Path], data: ChatData, seq_len: int, template: ChatTemplate
) -> None:
    about, ended, forms = _About(), False, set[str]()
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {part: [] for part in PARTS}

    every = (_learned(file, data, template, forms) for file in files)
    held = held_out(data.validation_fraction)
    for is_held, (tokens, mask) in zip(held, chain.from_iterable(every), strict=False):
        ids, learned = np.array(tokens[: seq_len + 1], np.uint32), mask[: seq_len + 1]
        if not learned[1:].any():
            about.dropped += 1
            continue
        about.cut += len(tokens) > seq_len + 1
        parts["validation" if is_held else "train"].append((ids, learned))
        about.conversations += 1
        about.answers += int(learned[1:].sum())
        ended = ended or not template.ends.isdisjoint(ids[learned].tolist())
    if about.conversations and not ended:
        reason = "no answer has its end within so many tokens, so it would not be learned"
        raise DataError("seq_len", seq_len, reason, f"give more, seq_len={2 * seq_len}")
    if data.validation_fraction and not parts["validation"] and len(parts["train"]) > 1:
        parts["validation"].append(parts["train"].pop())
    for part, conversations in parts.items():
        (folder / part).mkdir()
        lengths = [len(ids) for ids, _ in conversations]
        empty = np.empty(0, np.uint32)
        arrays = {
            "ids": np.concatenate([empty, *(ids for ids, _ in conversations)]),
            "learned": np.concatenate([empty.astype(bool), *(mask for _, mask in conversations)]),
            "ends": np.cumsum(lengths, dtype=np.int64),
            "firsts": np.array(_packed([length - 1 for length in lengths], seq_len), np.int64),
            "padding": np.array(template.tokenizer.boundary),
        }
        for name, array in arrays.items():
            np.save(folder / part / f"{name}.npy", array)
    (folder / _META).write_text(json.dumps(asdict(about) | {"forms": sorted(forms)}))


def _packed(lengths: list[int], seq_len: int) -> list[int]:
    """Return the first conversation of each sequence, followed by the number of conversations."""
    firsts, room = list[int](), 0
    for number, length in enumerate(lengths):
        if length > room:
            firsts.append(number)
            room = seq_len
        room -= length
    return [*firsts, len(lengths)] if lengths else [0]
