"""Conversations as text by a Jinja chat template, and which of it are answers.

A template is that of transformers' tokenizer_config.json: it gets `messages`, `add_generation_prompt`,
`bos_token` and `eos_token`. It is rendered in a sandbox: it may come with a tokenizer of others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlike.config.files import read_object
from titanlike.data.errors import DataError
from titanlike.data.tokenizer import Tokenizer

Message = dict[str, Any]  # role, content

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


class BadConversation(ValueError):
    """A conversation that the template does not take."""


@dataclass(frozen=True)
class Piece:
    """A part of a conversation's text. answer: the model is to learn it."""

    text: str
    answer: bool


class ChatTemplate:
    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """ends: ids that are known to end an answer. Raises ValueError for what is no template."""
        self.source, self._ends = source, ends
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(
            value, ensure_ascii=False, **how
        )
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        # transformers' mark for answers: they are found below without it
        for tag in ("generation", "endgeneration"):
            for form in (
                f"{{% {tag} %}}",
                f"{{%- {tag} %}}",
                f"{{% {tag} -%}}",
                f"{{%- {tag} -%}}",
            ):
                source = source.replace(form, "")
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def ends(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids that end an answer: eos_token, the special token that the template writes after an
        answer, and those of the folder's generation_config.json."""
        texts = [self._tokens["eos_token"]]
        with contextlib.suppress(BadConversation):  # of a template that takes other conversations
            _, found, after = self.render(EXAMPLE).rpartition(EXAMPLE[-1]["content"])
            texts += [after.lstrip()] if found else []
        first = {i for text in texts for i in tokenizer.encode_template(text)[:1]}
        return self._ends | tokenizer.special & first

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """The text of a conversation; ask: up to where the next answer begins. Raises BadConversation."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=ask, **self._tokens
            )
        except Exception as error:  # whatever a template's expressions raise
            reason = " ".join(str(error).split())[:200]
            raise BadConversation(f"the chat template fails: {reason}") from None

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """The text of a conversation, cut where answers begin and end. Raises BadConversation where
        the template writes earlier messages otherwise once others follow."""
        whole, found, at = self.render(messages), list[Piece](), 0
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:number], ask=True)
            after = self.render(messages[: number + 1])
            if not after.startswith(before) or not whole.startswith(after):
                raise BadConversation(
                    f"the chat template changes the text before answer {number + 1} of "
                    f"{len(messages)} messages when more follow, so it is not known what is the answer"
                )
            found += [
                Piece(whole[at : len(before)], False),
                Piece(whole[len(before) : len(after)], True),
            ]
            at = len(after)
        return [piece for piece in [*found, Piece(whole[at:], False)] if piece.text]


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
            fix = "Give another folder, or data.tokenizer=bytes"
            raise DataError("data.tokenizer", tokenizer, str(error), fix) from None

    settings = read("tokenizer_config.json")
    found = read("generation_config.json").get("eos_token_id")  # an id, or a list
    ends = [one for one in (found if isinstance(found, list) else [found]) if type(one) is int]
    tokens = {}
    for name in ("bos_token", "eos_token"):
        token = settings.get(name) or ""
        tokens[name] = token["content"] if isinstance(token, dict) else token
    if tokenizer == "bytes":
        tokens["eos_token"] = "<|endoftext|>"  # that of `ByteTokenizer`
    source, where = BUILT_IN, "built-in"
    if template is not None:
        path = Path(template).expanduser()
        if not path.is_file():
            fix = "Give the path of a Jinja file, or data.template=null"
            raise DataError("data.template", template, "there is no such file", fix)
        source, where = path.read_text(encoding="utf-8"), template
    elif tokenizer != "bytes" and (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
        source, where = path.read_text(encoding="utf-8"), str(path)
    elif isinstance(settings.get("chat_template"), str):
        source, where = settings["chat_template"], str(folder / "tokenizer_config.json")
    try:
        return ChatTemplate(source, **tokens, ends=frozenset(ends))
    except ValueError as error:
        reason = f"is no Jinja template: {error}"
        raise DataError("data.template", where, reason, "Correct it, or give another") from None
