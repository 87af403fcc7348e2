"""Instruction data (`data=chat`): conversations in JSONL, loss on the answers alone.

1. Each line is an object with a list of messages ({"role": "user", "content": "..."}). A chat
   template makes a text of it; the pieces between its answers are tokenized one by one.
2. Conversations are put into sequences of seq_len in their order, as many whole ones as fit; one
   that is longer is cut at its end. The rest of a sequence is padding without loss.
3. Attention stays within a conversation, where positions begin at 0 (`document_ids`).

All of it is done once, into the cache (`data.cache`), and then mapped into memory.

A template is that of transformers' tokenizer_config.json: it gets `messages`,
`add_generation_prompt`, `bos_token` and `eos_token`. It is rendered in a sandbox: it may come with
a tokenizer of others.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlike.config.files import read_object
from titanlike.config.schema import ChatData, Config
from titanlike.data.order import is_for_validation
from titanlike.data.registry import DataError
from titanlike.data.sources import IGNORE, Data
from titanlike.data.text import (
    PARTS,
    cache_key,
    cached,
    check_tokenizer,
    file_states,
    files_under,
    no_files,
    opened,
    read_failure,
    vocabulary,
)
from titanlike.data.tokenizer import Tokenizer, open_tokenizer

__all__ = ["CHECKS", "ChatTemplate", "find_template", "open_data", "vocabulary"]

Message = dict[str, Any]  # role, content

FORMAT = 1  # part of the key of a cache entry
_FIX = "fix or delete that line"

# each message after its role; an answer ends with the token that ends a text
BUILT_IN = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

EXAMPLE: list[Message] = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer 17."},
]


def open_data(data: ChatData, config: Config) -> Data:
    """Raises DataError for what cannot be read, and for a part without answers."""
    tokenizer = open_tokenizer(data.tokenizer)
    template = find_template(data.template, data.tokenizer)
    files = _find_files(data.path)
    common = ("workers", "changed", "cache")  # do not change the entry
    kept = {key: value for key, value in asdict(data).items() if key not in common}
    content = [FORMAT, file_states(files), kept, config.seq_len, tokenizer.fingerprint]
    folder, about = cached(
        data.cache,
        f"chat-{cache_key([*content, template.render(EXAMPLE)])}",
        lambda folder: (folder, read_object(meta)) if (meta := folder / _META).is_file() else None,
        lambda folder: _write(folder, files, data, config.seq_len, tokenizer, template),
    )
    parts = {part: ChatSource(folder / part, config.seq_len, data.documents) for part in PARTS}
    for part, source in parts.items():
        if not len(source):
            reason = f"the {part} part has no conversation with an answer"
            fix = "give more, or another validation_fraction"
            raise DataError("data.path", data.path, reason, fix)
    train, validation = (len(parts[part]) for part in PARTS)
    text = f"{data.path}: {about['conversations']:,} conversations in {train:,} sequences for training, "
    text += f"{validation:,} for validation; loss on {about['answers']:,} tokens of answers"
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


def _check_conversations(data: ChatData, config: Config) -> None:
    _find_files(data.path)
    find_template(data.template, data.tokenizer)


CHECKS = (check_tokenizer, _check_conversations)


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


# --- the cache ----------------------------------------------------------------------------------

_META = "meta.json"


def _write(
    folder: Path,
    files: list[Path],
    data: ChatData,
    seq_len: int,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> None:
    about = {"conversations": 0, "answers": 0, "cut": 0}
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {part: [] for part in PARTS}
    for number, (place, messages) in enumerate(_conversations(files, data.messages_key)):
        try:
            pieces = template.pieces(messages)
        except BadConversation as error:
            fix = "fix or delete it, or give another data.template"
            raise DataError("data.path", place, str(error), fix) from None
        encoded = [(tokenizer.encode_template(text), is_answer) for text, is_answer in pieces]
        ids = np.array([token for tokens, _ in encoded for token in tokens], np.uint32)
        learned = np.array([is_answer for tokens, is_answer in encoded for _ in tokens], bool)
        about["cut"] += len(ids) > seq_len + 1
        ids, learned = ids[: seq_len + 1], learned[: seq_len + 1]
        if not learned[1:].any():
            continue  # no answer, or not within seq_len
        is_held = is_for_validation(number, data.validation_fraction)
        parts["validation" if is_held else "train"].append((ids, learned))
        about["conversations"] += 1
        about["answers"] += int(learned[1:].sum())
    if not parts["validation"] and len(parts["train"]) > 1:
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
            "padding": np.array(tokenizer.boundary),
        }
        for name, array in arrays.items():
            np.save(folder / part / f"{name}.npy", array)
    (folder / _META).write_text(json.dumps(about))


def _packed(lengths: list[int], seq_len: int) -> list[int]:
    """The first conversation of each sequence, and the number of all."""
    firsts, room = list[int](), 0
    for number, length in enumerate(lengths):
        if length > room:
            firsts.append(number)
            room = seq_len
        room -= length
    return [*firsts, len(lengths)] if lengths else [0]


def _find_files(path: str) -> list[Path]:
    """The JSONL files of `data.path`, sorted. Raises DataError."""
    root = Path(path).expanduser().resolve()
    if files := files_under(root, (".jsonl",), compressed=True):
        return files
    raise no_files("data.path", path, root, (".jsonl", ".jsonl.gz", ".jsonl.zst"))


def _conversations(files: list[Path], key: str) -> Iterator[tuple[str, list[Message]]]:
    """(where it is, messages) of each line. Raises DataError."""
    for file in files:
        try:
            with opened(file) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        place = f"{file}, line {number}"
                        yield place, _messages(line, place, key)
        except DataError:
            raise
        except Exception as error:
            raise DataError("data.path", file, read_failure(error), "fix or delete it") from None


def _messages(line: bytes, place: str, key: str) -> list[Message]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError("data.path", place, f"is not JSON ({error})", _FIX) from None
    messages = row.get(key) if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        names = ", ".join(row) if isinstance(row, dict) else "no object"
        reason = f"has no list of messages with a role and a content in {key} ({names})"
        fix = f"name the field, data.messages_key=conversations; or {_FIX}"
        raise DataError("data.path", place, reason, fix)
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


# --- the template -------------------------------------------------------------------------------


class BadConversation(ValueError):
    """A conversation that the template does not take."""


class ChatTemplate:
    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """tokens: bos_token and eos_token; ends: ids that are known to end an answer. Raises
        ValueError for what is no template."""
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.source, self._ends = source, ends
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        # transformers' mark for answers: they are found below without it
        source = re.sub(r"{%-? (end)?generation -?%}", "", source)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
        self._tokens = {"bos_token": "", "eos_token": ""} | dict(tokens or {})

    def ends(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids that end an answer: eos_token, the special token that the template writes after an
        answer, and those of the folder's generation_config.json."""
        texts = [self._tokens["eos_token"]]
        with contextlib.suppress(BadConversation):  # of a template that takes other conversations
            _, answer, after = self.render(EXAMPLE).rpartition(EXAMPLE[-1]["content"])
            texts += [after.lstrip()] if answer else []
        first = {i for text in texts for i in tokenizer.encode_template(text)[:1]}
        return self._ends | tokenizer.special & first

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """The text of a conversation; ask: up to where the next answer begins. Raises
        BadConversation."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=ask, **self._tokens
            )
        except Exception as error:  # whatever a template's expressions raise
            reason = " ".join(str(error).split())[:200]
            raise BadConversation(f"the chat template fails: {reason}") from None

    def pieces(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The text of a conversation, cut where answers begin and end: (text, whether it is an
        answer, which the model is to learn). Raises BadConversation where the template writes
        earlier messages otherwise once others follow."""
        text, pieces, at = self.render(messages), list[tuple[str, bool]](), 0
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:number], ask=True)
            after = self.render(messages[: number + 1])
            if not after.startswith(before) or not text.startswith(after):
                raise BadConversation(
                    f"the chat template changes the text before answer {number + 1} of "
                    f"{len(messages)} messages when more follow, so it is not known what is the answer"
                )
            pieces += [(text[at : len(before)], False), (text[len(before) : len(after)], True)]
            at = len(after)
        return [piece for piece in [*pieces, (text[at:], False)] if piece[0]]


def _refuse(reason: str) -> None:
    raise ValueError(reason)


def find_template(template: str | None, tokenizer: str) -> ChatTemplate:
    """`data.template`: a path; None = what is with the tokenizer, else the built-in one.

    Raises DataError.
    """
    folder = Path(tokenizer).expanduser()
    folder = folder if folder.is_dir() else folder.parent

    def read(name: str) -> dict[str, Any]:
        if tokenizer == "bytes" or not (folder / name).is_file():
            return {}
        try:
            return read_object(folder / name)
        except (OSError, ValueError) as error:
            fix = "give another folder, or data.tokenizer=bytes"
            raise DataError("data.tokenizer", tokenizer, str(error), fix) from None

    settings = read("tokenizer_config.json")
    end = read("generation_config.json").get("eos_token_id")  # an id, or a list
    ends = [i for i in (end if isinstance(end, list) else [end]) if type(i) is int]
    tokens = {}
    for name in ("bos_token", "eos_token"):
        token = settings.get(name) or ""
        tokens[name] = token["content"] if isinstance(token, dict) else token
    if tokenizer == "bytes":
        tokens["eos_token"] = "<|endoftext|>"  # that of `ByteTokenizer`
    source, where = BUILT_IN, "built-in"
    beside = folder / "chat_template.jinja"
    if template is not None:
        path, where = Path(template).expanduser(), template
        if not path.is_file():
            fix = "give the path of a Jinja file, or data.template=null"
            raise DataError("data.template", template, "there is no such file", fix)
        source = path.read_text(encoding="utf-8")
    elif tokenizer != "bytes" and beside.is_file():
        source, where = beside.read_text(encoding="utf-8"), str(beside)
    elif isinstance(settings.get("chat_template"), str):
        source, where = settings["chat_template"], str(folder / "tokenizer_config.json")
    try:
        return ChatTemplate(source, tokens, frozenset(ends))
    except ValueError as error:
        reason = f"is no Jinja template: {error}"
        raise DataError("data.template", where, reason, "Correct it, or give another") from None
