"""Errors in a config, in one form: key, value, reason, and what to write instead."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from titanlike.core.config.credentials import REDACTED, redact, redact_value

_LONGEST = 1000  # characters shown of a value


@dataclass(frozen=True)
class Problem:
    """One error in a config. `str()` gives `pp=3: <reason>; write <fix>`, with secrets replaced by
    ***.

    value: "" = none to show. fix: an override that works (`pp=2`), a sentence, or "".
    """

    key: str
    value: Any
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        value, reason, fix = redact_value(self.key, self.value), self.reason, self.fix
        if [value] != [self.value]:  # a secret, which the reason may quote
            reason, fix = reason.replace(str(self.value), REDACTED), ""
        text = printable(override_text(value), "")
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}... ({len(text)} characters)"
        shown = self.key if self.value == "" else f"{self.key}={text}"
        # an override, or a sentence
        write = "write " if re.match(r"['\"]?(-m )?[~+]*[\w./@]+=", fix) else ""
        return redact(printable(f"{shown}: {reason}" + (f"; {write}{fix}" if fix else "")))

    def hiding(self, values: Mapping[str, str]) -> Problem:
        """Replace each of these values by its text; values from the environment may be secret."""

        def hide(text: str) -> str:
            for value, name in values.items():
                if text == value or len(value) > 3:
                    text = text.replace(value, name)
            return text

        text = override_text(self.value)
        value = self.value if hide(text) == text else hide(text)
        return Problem(self.key, value, hide(self.reason), hide(self.fix))

    @classmethod
    def parse(cls, key: str, text: str) -> Problem:
        """Parse a ValueError's text in the form that `str()` gives; any other text is the reason of
        a problem of `key`."""
        match = re.fullmatch(r"([\w.]+)=(.*?): (.*?)(?:; write (.*))?", text, re.DOTALL)
        return cls(*match.groups(default="")) if match else cls(key, "", text)


class Refused(ValueError):
    """A key's value that cannot be used: one `Problem`."""

    def __init__(self, key: str, value: Any, reason: str, fix: str = "") -> None:
        self.problem = Problem(key, value, reason, fix)
        super().__init__(str(self.problem))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), astuple(self.problem)  # pickle rebuilds exceptions from their arguments


class ConfigError(ValueError):
    """All problems of a config, a line each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.problems,)


def printable(text: str, but: str = "\n") -> str:
    """Escape ESC and other control characters as Python does, except those in `but`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else repr(c)[1:-1] for c in text)


def as_typed(words: Iterable[str]) -> str:
    """Join overrides as they are typed in a shell."""

    def typed(word: str) -> str:
        try:
            expanded = re.search(r"[*?]|\{.*,.*\}", word)
            if shlex.split(word, comments=False) == [word] and not expanded:
                return word
        except ValueError:
            pass
        return shlex.quote(word) if any(char in word for char in '"$`\\!') else f'"{word}"'

    return " ".join(map(typed, words))


def as_override(key: str, value: Any) -> str:
    """Return the override that sets a key, quoted for a shell."""

    def text(word: str) -> str:
        plain = re.fullmatch(r"[A-Za-z_/*][\w/.*%+@:-]*", word, re.ASCII)
        read = word.lower() in ("null", "true", "false", "nan", "inf")  # parsed as another type
        return word if plain and not read else quoted(word)

    return as_typed([f"{key}={override_text(value, text)}"])


def override_text(value: Any, text: Callable[[str], str] = str) -> str:
    """Write a value in the syntax of overrides: null, true, [1,2], {a:1}; strings by `text`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(override_text(item, text) for item in value) + "]"
    if isinstance(value, dict):
        items = (f"{key}:{override_text(item, text)}" for key, item in value.items())
        return "{" + ",".join(items) + "}"
    return text(value) if isinstance(value, str) else str(value)


def quoted(text: str) -> str:
    """Quote any text for the syntax of overrides."""
    # Hydra unescapes a backslash only before a quote
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", text)
    return "'" + escaped.replace("'", r"\'") + "'"


def similar(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that a word may stand for: those that are, begin with or contain it,
    shortest first, else the one most alike, if the numbers in both are the same (llama_7b is no
    llama3_70b, gpt2_xl no gpt2)."""

    def plain(text: str) -> str:
        return re.sub(r"[-_ ]", "", text.lower())

    def numbers(text: str) -> set[str]:
        sizes = re.findall(r"(?:^|[-_ ])(\d+[bm]|medium|large|xl)(?=[-_ ]|$)", text.lower())
        return {*re.findall(r"\d+", text), *sizes}

    def similarity(other: str) -> tuple[float, bool]:
        ratio = difflib.SequenceMatcher(None, word.lower(), other.lower()).ratio()
        return ratio, other[:1] == word[:1]  # for dpp: dp, not pp

    typed, names = plain(word), sorted(known, key=len)
    same = [name for name in names if plain(name) == typed]
    begin = [n for n in names if len(typed) > 2 and f".{plain(n)}".rpartition(typed)[0][-1:] == "."]
    contain = [name for name in names if len(typed) > 3 and typed in plain(name)]
    if found := same or begin or contain:
        return found
    alike = [name for name in names if numbers(word) <= numbers(name)]
    best = max(alike, key=similarity, default=None)
    return [best] if best is not None and similarity(best)[0] >= 0.6 else []


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that a word most likely stands for, or None."""
    return next(iter(similar(word, known)), None)


def some_names(names: Sequence[str], most: int = 3) -> str:
    """Join the first names of a list, and the number of the others."""
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + others


def abbreviates(short: str, word: str) -> bool:
    """Return whether `short` is `word`'s first letter and later ones in order (hf, huggingface)."""
    letters = iter(word.lower())
    return short[:1].lower() == word[:1].lower() != "" and all(c in letters for c in short.lower())
