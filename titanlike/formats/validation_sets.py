"""The validation sets of `validation.data`: each is a data section, whose keys default to those of
the training data if it is of the same kind.

A set is all data of its section, or the held-out part that a user's function returns. It must have
the training data's vocabulary, and samples of the same form. Importing this file does not import
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.data import MixtureData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.parse import section_of, to_plain
from titanlike.core.config.schema import VARIANTS, Config
from titanlike.core.data import kinds
from titanlike.core.data.kinds import DataError, Vocabulary

if TYPE_CHECKING:
    from titanlike.core.data.sources import Data, Source

_SHARED = ("tokenizer", "documents", "cache")  # keys that a set of another kind inherits
_PARTS = ("split", "subset", "rows")  # keys that choose a part of the data at a path


def sections(config: Config) -> dict[str, Any]:
    """Return the section of each set by name, "" for a single one. Raises DataError."""
    given = config.validation.data or {}
    several = all(isinstance(own, dict) for own in given.values())
    sets = given if several else {"": given}
    return {name: _section(config, _key(name), own) for name, own in sets.items()}


def _key(name: str) -> str:
    return f"validation.data.{name}" if name else "validation.data"


def _section(config: Config, key: str, own: dict[str, Any]) -> Any:
    if not re.fullmatch(r"validation\.data(\.[\w-]+)?", key):
        raise DataError(key, own, "a name has letters, digits, _ and -", "another name for it")
    if isinstance(config.data, MixtureData) and set(own) == {"path"}:
        from titanlike.formats.mixture import section_of_source

        return section_of_source(config.data, own)
    base = to_plain(config.data)
    kind = own.get("name", base["name"])
    if kind == "mixture":
        reason = "is mixed by weights, for training alone"
        raise DataError(key, own, reason, "validation.data={code:{path:code/},web:{path:web/}}")
    if kind != base["name"]:
        known = {field.name for field in fields(VARIANTS["data"].get(kind, Custom))}
        base = {name: base[name] for name in _SHARED if name in base and name in known}
    section, problems = section_of("data", {**base, "name": kind, **own})
    for problem in problems:
        raise DataError(*astuple(_of_set(problem, key)))
    return section


def _of_set(problem: Problem, key: str) -> Problem:
    """Rewrite a section's problem as that of the set at `key`."""
    fix = re.sub(r"(?<![\w.])data\.(?=\w+=)", f"{key}.", problem.fix)
    return replace(problem, key=re.sub(r"^data\b", key, problem.key), fix=fix)


def problems_of_sets(config: Config) -> list[Problem]:
    """Return errors of the sets that are quick to find before a worker starts."""
    problems: list[Problem] = []
    key = "validation.data"
    try:
        for name, section in sections(config).items():
            key, scoped = _key(name), kinds.of_all(config, section)
            for check in kinds.kind_of(section).CHECKS:
                problems += (_of_set(problem, key) for problem in check(scoped.data, scoped) or ())
            _check_vocabulary(key, section, *map(_vocabulary, (config.data, section)))
    except DataError as error:
        problems.append(_of_set(error.problem, key))
    return problems


def _vocabulary(section: Any) -> Vocabulary:
    """Return a section's vocabulary, with the tokenizer's fingerprint as its tokenizer."""
    from titanlike.formats.tokenizer import open_tokenizer

    vocabulary = kinds.vocabulary(section)
    name = vocabulary.tokenizer
    return vocabulary._replace(tokenizer=None if name is None else open_tokenizer(name).fingerprint)


def _check_vocabulary(key: str, section: Any, ours: Vocabulary, own: Vocabulary) -> None:
    """Raise DataError if a set's token ids do not mean the same as the training data's."""
    reason = ""
    if None not in (ours.tokenizer, own.tokenizer) and ours.tokenizer != own.tokenizer:
        reason = "has another tokenizer than the training data"
    elif ours.size is not None and own.size is not None and own.size > ours.size:
        reason = f"has {own.size:,} token ids, and the training data have {ours.size:,}"
    if reason:
        fix = f"tokenize it with the same one, without {key}.tokenizer"
        raise DataError(key, getattr(section, "path", section.name), reason, fix)


def warnings_of_sets(config: Config) -> Iterator[str]:
    """Yield a warning for each set whose path is also trained on."""
    ours = _places(config.data)
    for name, section in sections(config).items():
        same = all(getattr(section, p, 0) == getattr(config.data, p, 0) for p in _PARTS)
        for place in _places(section):
            if same and ours & {place, *place.parents}:
                yield f"{_key(name)}: {place} is trained on, too: its loss says nothing of new data"


def _places(section: Any) -> set[Path]:
    every = [one.get("path") for one in getattr(section, "sources", {"": vars(section)}).values()]
    paths = [path for one in every for path in ([one] if isinstance(one, str) else one or ())]
    return {Path(path).expanduser().resolve() for path in paths}


def open_sets(data: Data, config: Config) -> Data:
    """Return the training data with the sets of `validation.data`. Raises DataError."""
    from titanlike.core.data.sources import ENDLESS, REAL, Stream

    sets: dict[str, Source] = {}
    for name, section in sections(config).items():
        key, scoped = _key(name), kinds.of_all(config, section)
        try:
            opened = kinds.kind_of(section).open_data(scoped.data, scoped)
        except DataError as error:
            raise DataError(*astuple(_of_set(error.problem, key))) from None
        vocabularies = (Vocabulary(each.vocab_size, each.tokenizer) for each in (data, opened))
        _check_vocabulary(key, section, *vocabularies)
        if len(opened.validation) >= ENDLESS and not config.validation.batches:
            reason = f"{key} has no end"
            raise DataError("validation.batches", "all", reason, "validation.batches=100")
        # a stream's samples are not read yet
        known = [] if isinstance(data.train, Stream) else [data.train, opened.validation]
        same_lengths = data.variable is opened.variable is None
        form = lambda x: f"{list(x.shape) if same_lengths else ''} {x.dtype}"  # noqa: E731, B023
        forms = [{n: form(x) for n, x in one[0].items() if n != REAL} for one in known]
        if (data.variable is None) != (opened.variable is None) or forms[:1] != forms[1:]:
            reason = f"has samples of {forms[-1:]}, and the training data of {forms[:1]}"
            raise DataError(key, section.name, reason, "the same fields, dtypes and shapes in both")
        sets[name] = opened.validation
    shown = ", ".join(f"{name} {len(each):,}".strip() for name, each in sets.items())
    text = f"{data.description}; samples for validation: {shown}"
    first = next(iter(sets.values()))
    return replace(data, validation=first, validation_sets=sets, description=text)
