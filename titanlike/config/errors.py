"""What a user got wrong, in one form for every room: key, value, reason, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from titanlike.config.credentials import REDACTED, redact, redact_value


@dataclass(frozen=True)
class Problem:
    """One mistake in a config: `str()` gives `pp=3: <reason>; write <fix>`, secrets as ***.

    `value` may be "" where there is none to show; `fix` is an override that works (`pp=2`), or "".
    """

    key: str
    value: Any
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        value, reason, fix = redact_value(self.key, self.value), self.reason, self.fix
        if [value] != [self.value]:  # a secret: what is said of it may quote it
            reason, fix = reason.replace(str(self.value), REDACTED), ""
        shown = self.key if self.value == "" else f"{self.key}={override_text(value)}"
        write = "write " if "=" in fix else ""  # an override, or a sentence
        return redact(f"{shown}: {reason}" + (f"; {write}{fix}" if fix else ""))

    @classmethod
    def parse(cls, key: str, text: str) -> Problem:
        """The problem that a ValueError's text tells, best written as `str()` above would.

        A text of another form becomes the reason of a problem of `key`.
        """
        found = re.fullmatch(r"([\w.]+)=(.*?): (.*?)(?:; write (.*))?", text, re.DOTALL)
        if found is None:
            return cls(key, "", text)
        named, value, reason, fix = found.groups(default="")
        return cls(named, value, reason, fix)


class ConfigError(ValueError):
    """Every problem that was found in a config, a line each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.problems,)  # exceptions are rebuilt from their arguments


def override_text(value: Any) -> str:
    """A value as it is written on the command line: null, true, [1,2], {a:1}."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(override_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def quoted(text: str) -> str:
    """A text as the value of an override, whatever is in it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None where nothing is near."""

    def likeness(other: str) -> tuple[float, bool]:
        ratio = difflib.SequenceMatcher(None, word.lower(), other.lower()).ratio()
        return ratio, other[:1] == word[:1]  # dpp: dp, and not pp

    found = max(known, key=likeness, default=None)
    return found if found is not None and likeness(found)[0] >= 0.6 else None
