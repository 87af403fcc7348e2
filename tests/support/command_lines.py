"""Command lines with mistakes: what is said about them, and the fixes, applied."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from titanlike.core.config import validate
from titanlike.core.config.errors import Problem
from titanlike.core.config.overrides import key_of
from titanlike.core.data import registry as data
from titanlike.run.argv import complete_args, parse_argv
from titanlike.run.overrides import CheckedOverrides, check_overrides


def examined(*words: str) -> CheckedOverrides:
    """What the driver finds in a command line's words, before the values are checked together."""
    args = parse_argv(words)
    complete_args(args)
    return check_overrides(args)


def problems_of(words: Sequence[str]) -> list[Problem]:
    """The same, and every problem that is found without torch."""
    checked = examined(*words)
    if checked.config is None:
        return checked.problems
    found = validate.problems(checked.config) + data.problems(checked.config)
    known = {problem.key for problem in checked.problems}
    return [*checked.problems, *(problem for problem in found if problem.key not in known)]


def proposals(fix: str) -> list[list[str]]:
    """The command words that a fix proposes; several for alternatives, none for a sentence."""
    found: list[list[str]] = []
    adjacent = False
    try:
        tokens = shlex.split(fix)
    except ValueError:  # an apostrophe
        tokens = fix.split()
    for token in tokens:
        word = token.removeprefix("(").rstrip(",;.")
        word = word.removesuffix(")") if word.count(")") > word.count("(") else word
        if re.match(r"\+?[a-z][\w./]*=.|-m$", word):
            found[-1:] = [[*found[-1], word]] if adjacent else [*found[-1:], [word]]
        adjacent = bool(re.match(r"\+?[a-z][\w./]*=.|-m$", word)) and word == token
    return found


def with_fix(words: Sequence[str], problem: Problem, fix: Sequence[str]) -> list[str]:
    """The command with a problem's words replaced by what a fix proposes."""
    kept = list(words)
    spans = [(i, j) for i in range(len(kept)) for j in range(i + 1, len(kept) + 1)]
    for i, j in spans:
        if " ".join(kept[i:j]) == problem.key:
            del kept[i:j]
            break
    new = {key_of(word) for word in fix} | {problem.key.lstrip("+~")}
    kept = [word for word in kept if "=" not in word.lstrip("=") or key_of(word) not in new]
    if problem.key.startswith("~"):
        kept = [word for word in kept if word != problem.key]
    return [*kept, *fix]


def applied(words: Sequence[str], rounds: int = 6) -> tuple[list[str], list[Problem]]:
    """(the command with every proposed fix applied, what is still wrong with it).

    A fix may show the next mistake, which has one, too. Where nothing is proposed, the words that
    are wrong are left out.
    """
    words = list(words)
    for _ in range(rounds):
        problems = problems_of(words)
        if not problems:
            break
        for problem in problems:
            words = with_fix(words, problem, next(iter(proposals(problem.fix)), []))
    return words, problems_of(words)
