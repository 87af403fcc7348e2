"""The words of a command line: flags, overrides, and what is neither (`--max-steps 100`, `pp 2`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra._internal.utils import get_args_parser

_CONFIG_FILE = re.compile(r".*\.(py|toml|ya?ml|json|sh)")


@dataclass(frozen=True)
class NoOverride:
    """Words that are not of the form key=value, and what they seem to set."""

    typed: str
    key: str
    value: str


def parser() -> argparse.ArgumentParser:
    """Hydra's, with the flags of this program."""
    made = get_args_parser()
    made.add_argument("--check", action="store_true", help="find errors, start nothing")
    return made


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """The flags, with `overrides` and, as `no_overrides`, the words that are neither.

    Exits with 2 where a flag has a wrong value or none.
    """
    made = parser()
    flags, others, rest = [], [], [*words]
    while rest:
        word = rest.pop(0)
        option = made._option_string_actions.get(word.partition("=")[0])
        if option is None:
            others.append(word)
            continue
        flags.append(word)
        optional = option.nargs == "?" and rest[:1] and rest[0] in (option.choices or ())
        if "=" not in word and rest and (option.nargs is None or optional):
            flags.append(rest.pop(0))
    args = made.parse_args(flags)
    found = [*_overrides(others)]
    args.overrides = [item for item in found if isinstance(item, str)]
    args.no_overrides = [item for item in found if isinstance(item, NoOverride)]
    return args


def _overrides(words: list[str]) -> Iterator[str | NoOverride]:
    while words:
        word = words.pop(0)
        if re.match(r"-+[A-Za-z]", word):  # a flag of another program
            key, equals, value = word.lstrip("-").partition("=")
            if not equals and words and _is_value(words[0]):
                word, value = f"{word} {words[0]}", words.pop(0)
            yield NoOverride(word, key.replace("-", "_"), value or "true")
        elif (count := _unclosed(word, words)) or re.search(r"\s", word.partition("=")[0]):
            # [a, b] without quotes is two words; "steps = 3" in quotes is one
            typed = " ".join([word, *words[:count]])
            del words[:count]
            key, value, *_ = [*re.split(r"\s*=\s*|\s+", typed.strip(), maxsplit=1), "true"]
            yield NoOverride(typed, key, re.sub(r"\s+", "", value))
        elif word.startswith("~") or re.match(r"[+]*[A-Za-z][^=]*=.", word):
            yield word
        else:
            yield _spaced(word, words)


def _spaced(word: str, words: list[str]) -> str | NoOverride:
    """`steps 3`, `steps = 3`, `steps =3`, `steps= 3`, `steps: 3`, or a word by itself."""
    typed, key = [word], word.rstrip("=:")
    if words and (words[0] == "=" or re.fullmatch(r"=\S+", words[0])):
        typed.append(words.pop(0))
    elif not word.endswith((":", "=")) and ":" in word:
        key, _, value = word.partition(":")
        return NoOverride(word, key, value)
    if typed[-1] in ("=", word) and words and _is_value(words[0]) and _is_key(key):
        typed.append(words.pop(0))
    if len(typed) == 1:
        if word.endswith("=") and key:
            return word
        is_file = _CONFIG_FILE.fullmatch(word) is not None
        return NoOverride(word, "config_file" if is_file else word, word if is_file else "true")
    return NoOverride(" ".join(typed), key, typed[-1].removeprefix("="))


def _is_value(word: str) -> bool:
    return "=" not in word and not re.match(r"-+[A-Za-z]|[~+]", word)


def _is_key(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w./-]*", word) is not None and not _CONFIG_FILE.fullmatch(word)


def _unclosed(word: str, following: list[str]) -> int:
    """How many of the following words complete a list or dict that `word` begins; 0 if none."""
    for count in range(len(following) + 1):
        text = " ".join([word, *following[:count]])
        if sum(map(text.count, "[{(")) <= sum(map(text.count, "]})")):
            return count
    return 0
