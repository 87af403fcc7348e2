"""Instruction data (`data=chat`): conversations in files, with the loss on assistant messages
alone.

1. Each row is a list of messages ({"role": "user", "content": "..."}), or is converted to one by
   conversation_forms.py. A chat template renders it as text, which is tokenized as transformers
   does it. The tokens of an answer are found by their character offsets.
2. Conversations are packed into sequences of seq_len in file order, as many as fit without cutting;
   a longer one is truncated at its end. The rest of a sequence is padding without loss.
3. Attention stays within a conversation, where positions begin at 0 (`document_ids`).

The result is written to the cache (`data.cache`) once, and memory-mapped from there.

A template is that of transformers' tokenizer_config.json: it receives `messages`, `tools`,
`add_generation_prompt`, `bos_token` and `eos_token`. It may come from a stranger's tokenizer, so it
is rendered in a sandbox. Its `strftime_now` is the day of the run's first start (`first_day`): ids
must not depend on the day of a resume, nor on the clock of a node.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titanlike.core.config.files import atomic_write_text, open_regular, read_object
from titanlike.core.config.groups.data import ChatData
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError
from titanlike.core.data.order import held_out
from titanlike.core.data.sources import IGNORE, REAL, Data
from titanlike.formats.conversation_forms import (
    Message,
    conversation,
    is_learned,
    with_text_arguments,
    without_nulls,
)
from titanlike.formats.tables import TABLES
from titanlike.formats.text import (
    BadRow,
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
from titanlike.formats.tokenizer import Span, Tokenizer, open_tokenizer, read_beside

__all__ = ["CHECKS", "ChatTemplate", "find_template", "open_data", "vocabulary"]

FORMAT = 3  # part of the key of a cache entry
_SUFFIXES = (".jsonl", ".json", *TABLES)
_SECONDS = 5  # time limit for rendering a conversation
_MOST_TEXT = 1 << 20  # characters that a template adds to a conversation

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


# --- the template -------------------------------------------------------------------------------


class BadConversation(BadRow):
    """A conversation that the template refuses."""

    fix = "fix or delete it, or give a data.template=FILE with {% generation %} around answers"


class NoEnd(BadConversation):
    fix = "write {{ eos_token }} behind the answer, within {% generation %} if there is such, in a "
    fix += "data.template=FILE, and name the tokenizer's eos_token in its tokenizer_config.json"


# Noncharacters that mark, in rendered text, message content that spells a special token, and
# the {% generation %} blocks. Texts do not contain them.
_SPELLED, _SPELLED_END, _ANSWER, _ANSWER_END = "\ufdd0\ufdd1\ufdd2\ufdd3"
_ANSWERS = f"[{_ANSWER}{_ANSWER_END}]"


class ChatTemplate:
    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        ends: frozenset[int] = frozenset(),
        parse_special: bool = False,
        day: str = "",
    ) -> None:
        """ends: ids known to end an answer; day: YYYY-MM-DD, "" = today; parse_special: text that
        spells a special token becomes that token in every message, not in answers alone. Raises
        ValueError for an invalid template."""
        from jinja2 import TemplateSyntaxError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """{% generation %}: transformers' mark for answers."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                def mark(text: str) -> nodes.Node:
                    return nodes.Output([nodes.TemplateData(text)], lineno=line)

                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return [mark(_ANSWER), nodes.Scope(body, lineno=line), mark(_ANSWER_END)]

        self.source, self.tokenizer, self._ends = source, tokenizer, ends
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        now = datetime.fromisoformat(day or first_day())
        environment.globals |= {"raise_exception": _refuse, "strftime_now": now.strftime}
        try:
            with _limited():  # constants are computed
                self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
        self._has_marks = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        controls = [] if parse_special else sorted(tokenizer.controls, key=len, reverse=True)
        spelled = "|".join(map(re.escape, controls)) or "(?!)"
        self._spelled = re.compile(spelled)
        self._marked = re.compile(f"{_SPELLED}({spelled}){_SPELLED_END}|[{_SPELLED}{_SPELLED_END}]")

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids that end an answer: eos_token, the special token that follows an answer in the
        template, and those of the folder's generation_config.json."""
        end, _ = self.tokenizer.located(self.tokenizer.names.get("eos_token", ""))
        end_ids = [*end] if len(end) == 1 else []
        with contextlib.suppress(BadConversation):  # the template may accept other conversations
            text, answers = self._answers(EXAMPLE, None)
            ids, spans = self._encode(text)
            known = zip(ids, spans, _within(spans, answers), strict=True)
            after, special = text.rfind(EXAMPLE[-1]["content"]), {*self.tokenizer.controls.values()}
            behind = [i for i, span, learned in known if learned and span[0] > after]
            end_ids += [i for i in behind if i in special][:1]
        return frozenset({*self._ends, self.tokenizer.boundary, *end_ids})

    def render(self, messages: Sequence[Message], tools: Any = None, *, ask: bool = False) -> str:
        """Render a conversation; ask: up to where the next answer begins. Raises BadConversation."""
        return re.sub(_ANSWERS, "", self._render(messages, tools, ask))

    def _render(self, messages: Sequence[Message], tools: Any, ask: bool = False) -> str:
        # null keys are dropped, as in transformers
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        names = {**self.tokenizer.names, "tools": tools, "documents": None}
        try:
            with _limited():
                text = self._template.render(messages=given, add_generation_prompt=ask, **names)
            if len(text) > _MOST_TEXT + 20 * len(str([given, tools])):
                raise ValueError(f"it makes {len(text):,} characters of a conversation")
        except Exception as error:  # a template's expressions may raise anything
            if (plain := [*map(with_text_arguments, given)]) != given:
                return self._render(plain, tools, ask)
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise BadConversation(f"the chat template fails: {reason}") from None
        calls = [call for message in given for call in message.get("tool_calls") or ()]
        called = Counter(str(call.get("function", call).get("name", "")) for call in calls)
        others = ""  # what names tools besides the calls, as questions may
        with contextlib.suppress(BadConversation):  # as results without a call may be for it
            if called:
                bare = [{k: v for k, v in m.items() if k != "tool_calls"} for m in given]
                others = self._render(bare, tools, ask)
        for name, count in called.items():
            if text.count(name) < others.count(name) + count:
                raise BadConversation(f"the chat template does not write the call of {name}")
        return text

    def encode(self, text: str) -> list[int]:
        """Encode a text that is already rendered."""
        return self.tokenizer.located(text)[0]

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Encode a conversation up to where the next answer begins. Raises BadConversation."""
        return self._encode(self.render(self._mark(messages), self._mark(tools), ask=True))[0]

    def learned(
        self, messages: Sequence[Message], tools: Any = None
    ) -> tuple[list[int], np.ndarray]:
        """Return a conversation's ids, and for each whether it belongs to an answer and so has a
        loss.

        Raises BadConversation where the answers cannot be located, or where none has an end.
        """
        text, answers = self._answers(messages, tools)
        ids, spans = self._encode(text)
        mask = _within(spans, answers)
        if mask.any() and not self.ends & {*np.array(ids)[mask].tolist()}:
            raise NoEnd("its answers would be learned without a token that ends them")
        return ids, mask

    def _answers(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        """Return a conversation's text and the character spans of its answers: the {% generation %}
        blocks, or else from each generation prompt to the end of the answer that follows."""
        messages, tools = self._mark(messages), self._mark(tools)
        text, answers = self._render(messages, tools), list[Span]()
        if self._has_marks:
            matches = re.finditer(_ANSWERS, text)
            places = [mark.start() - number for number, mark in enumerate(matches)]
            answers = [*zip(places[::2], places[1::2], strict=True)]
            every = [message for message in messages if message.get("role") == "assistant"]
            if not all(map(is_learned, every)):
                if len(every) != len(answers):
                    raise BadConversation("the chat template does not mark each answer by itself")
                answers = [at for at, of in zip(answers, every, strict=True) if is_learned(of)]
            return re.sub(_ANSWERS, "", text), answers
        for number, message in enumerate(messages):
            if not is_learned(message):
                continue
            before = self._render(messages[:number], tools, ask=True)
            after = self._render(messages[: number + 1], tools)
            if not after.startswith(before) or not text.startswith(after):
                raise BadConversation(
                    f"the chat template changes the text before answer {number + 1} of "
                    f"{len(messages)} messages when more follow, so it is not known what is the answer"
                )
            answers.append((len(before), len(after)))
        return text, answers

    def _mark(self, value: Any, answer: bool = False) -> Any:
        """Mark text that spells a special token, except in answers."""
        if isinstance(value, str):
            text = re.sub(f"[{_SPELLED}-{_ANSWER_END}]", "", value)
            text = text.encode(errors="replace").decode()  # lone surrogates, as in `text_of`
            marked = f"{_SPELLED}\\g<0>{_SPELLED_END}"
            return text if answer else self._spelled.sub(marked, text)
        if isinstance(value, list | tuple):
            return [self._mark(item, answer) for item in value]
        if isinstance(value, dict):
            answer = answer or value.get("role") == "assistant"
            return {key: self._mark(item, answer) for key, item in value.items()}
        return value

    def _encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of a rendered text and their character spans; marked parts are encoded as
        plain text. After a mark encoding resumes behind a newline, since many tokenizers treat the
        beginning of a text differently."""
        located, ids, spans, offset = self.tokenizer.located, list[int](), list[Span](), 0
        for number, part in enumerate(self._marked.split(text)):
            plain = number % 2 == 1  # odd parts are between marks; None = a lone mark
            begin = offset + plain
            line, _ = located("\n") if begin else ([], [])
            tokens, places = located("\n" * (begin > 0) + (part or ""), plain=plain)
            if tokens[: len(line)] == line:
                tokens, places = tokens[len(line) :], places[len(line) :]
                begin -= begin > 0
            else:
                tokens, places = located(part or "", plain=plain)
            ids += tokens
            spans += [(begin + first, begin + last) for first, last in places]
            offset += plain if part is None else len(part) + 2 * plain
        return ids, spans


def _within(spans: list[Span], answers: list[Span]) -> np.ndarray:
    """Return for each token whether it is in an answer: from the token with the answer's first
    character to the one with its last."""
    places = np.array(spans, np.int64).reshape(-1, 2)
    mask = np.zeros(len(spans), bool)
    for begin, end in answers:
        mask[np.searchsorted(places[:, 1], begin, "right") : np.searchsorted(places[:, 0], end)] = 1
    return mask


def _refuse(reason: str) -> None:
    raise ValueError(reason)


_BEGUN: dict[str, str] = {}  # run_dir -> day, of runs of this process that have kept nothing yet


def begin_on(run_dir: str | Path, day: str) -> None:
    """Let a run's first day be this one, without writing it."""
    _BEGUN[str(run_dir)] = day


def first_day(run_dir: str | Path = "", keep: str = "") -> str:
    """The day of a run's first start, YYYY-MM-DD: that kept in run_dir, or in its parent for a job
    on a run, else `keep`, which is then kept there, else that of `begin_on`, else today."""
    for folder in (Path(run_dir), Path(run_dir).parent) if run_dir else ():
        with contextlib.suppress(OSError, ValueError), open_regular(folder / "first_day") as file:
            return str(datetime.fromisoformat(file.read(10).decode()).date())
    if keep:
        atomic_write_text(Path(run_dir) / "first_day", keep)
    return keep or _BEGUN.get(str(run_dir)) or str(datetime.now().date())


def find_template(
    template: str | None, tokenizer: str, parse_special: bool = False, day: str = ""
) -> ChatTemplate:
    """Find the chat template: the path `data.template`; None = the tokenizer's, else the built-in
    one. day: see `ChatTemplate`. Raises DataError."""
    path = Path(tokenizer).expanduser()
    beside = (path if path.is_dir() else path.parent) / "chat_template.jinja"
    opened, known, end = open_tokenizer(tokenizer), None, None
    source, where = BUILT_IN, "built-in"
    if tokenizer != "bytes":
        known = read_beside(beside, "tokenizer_config.json").get("chat_template")
        # an id or a list of ids
        end = read_beside(beside, "generation_config.json").get("eos_token_id")
        if isinstance(known, list):  # several templates, by name
            known = {one["name"]: one["template"] for one in known}.get("default")
    ends = [i for i in (end if isinstance(end, list) else [end]) if type(i) is int]
    if template is not None:
        path, where = Path(template).expanduser(), template
        if not path.is_file():
            fix = "give the path of a Jinja file, or data.template=null"
            raise DataError("data.template", template, "there is no such file", fix)
        source = path.read_text(encoding="utf-8")
    elif tokenizer != "bytes" and beside.is_file():
        source, where = beside.read_text(encoding="utf-8"), str(beside)
    elif isinstance(known, str):
        source, where = known, str(beside.with_name("tokenizer_config.json"))
    make = partial(ChatTemplate, source, opened, frozenset(ends), parse_special, day)
    if not dist.is_initialized() and not _is_bounded(make):  # workers: checked by the launcher
        reason = f"takes more than {_SECONDS} s or 1 GiB for a short conversation"
        raise DataError("data.template", where, reason, "give another, data.template=FILE.jinja")
    try:
        return make()
    except ValueError as error:
        reason = f"is no Jinja template: {error}"
        raise DataError("data.template", where, reason, "Correct it, or give another") from None


def _is_bounded(make: Callable[[], ChatTemplate]) -> bool:
    """Return whether the template compiles and renders a short conversation within limits of time
    and memory, tried in a separate process."""
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_SECONDS)
        try:
            with _limited(_SECONDS + 1):
                make().render(EXAMPLE)
        except (MemoryError, ValueError) as error:
            os._exit(isinstance(error.__context__ or error, MemoryError))
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def _limited(seconds: int = _SECONDS) -> Iterator[None]:
    """Limit what a rendering takes: 1 GiB more than now (MemoryError), and in the main thread
    `seconds` (ValueError)."""

    def late(*_: Any) -> None:
        raise ValueError(f"it takes more than {seconds} s")

    timed = threading.current_thread() is threading.main_thread()
    timed = timed and not any(signal.getitimer(signal.ITIMER_REAL))  # else another's limit holds
    before = signal.signal(signal.SIGALRM, late) if timed else None
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # a lower one is there already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, limits[1]))
    try:
        if timed:
            signal.alarm(seconds)
        yield
    finally:
        if timed:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
