"""Chat templates: conversations as text and as ids, and which ids belong to answers.

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
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from titanlike.core.config.files import atomic_write_text, open_regular
from titanlike.core.data.kinds import DataError
from titanlike.formats.conversation_forms import Message, is_learned, with_text_arguments
from titanlike.formats.text import BadRow
from titanlike.formats.tokenizer import Span, Tokenizer, open_tokenizer, read_beside

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
