"""Validation sets of one's own, `validation.data`: sections as `data` is one, whose keys are those of
the training data where they are of the same kind and do not say otherwise.

A set is all that its section has, or what a function of the user's own holds out. It must have the
training data's vocabulary, and samples of the same form. Importing this file does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config.errors import Problem
from titanlike.config.parse import section_of, to_plain
from titanlike.config.schema import VARIANTS, Config, Custom, MixtureData, SyntheticData
from titanlike.data import registry
from titanlike.data.registry import DataError

if TYPE_CHECKING:
    from titanlike.data.sources import Data, Source

ENDLESS = "has no end", "validation.batches=100"
_SHARED = ("tokenizer", "documents", "cache")  # with a set of another kind
_PARTS = ("split", "subset", "rows")  # of what is at one path


def sections(config: Config) -> dict[str, Any]:
    """The section of each set by its name, "" of a single one. Raises DataError."""
    given = config.validation.data or {}
    several = bool(given) and all(isinstance(value, dict) for value in given.values())
    return {
        name: _section(config, key_of(name), own)
        for name, own in (given.items() if several else [("", given)] if given else ())
    }


def key_of(name: str) -> str:
    return f"validation.data.{name}" if name else "validation.data"


def _section(config: Config, key: str, own: dict[str, Any]) -> Any:
    base = to_plain(config.data)
    kind = own.get("name", base["name"])
    if not re.fullmatch(r"[\w-]*", key.removeprefix("validation.data").removeprefix(".")):
        raise DataError(key, own, "a name has letters, digits, _ and -", "another name for it")
    if isinstance(config.data, MixtureData) and "name" not in own and set(own) == {"path"}:
        from titanlike.data.mixture import section_of_source

        return section_of_source(config.data, own)
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
    """A problem of a section, as one of the set at `key`."""
    fix = re.sub(r"\bdata\.(?=\w+=)", f"{key}.", problem.fix)
    return replace(problem, key=re.sub(r"^data\b", key, problem.key), fix=fix)


def problems_of_sets(config: Config) -> Iterator[Problem]:
    """What is quick to find of each set before a worker starts."""
    try:
        every = sections(config)
    except DataError as error:
        yield error.problem
        return
    for name, section in every.items():
        key, of_set = key_of(name), registry.of_all(config, section)
        found: list[Problem] = []
        try:
            if isinstance(section, SyntheticData) and not config.validation.batches:
                raise DataError("validation.batches", "all", f"{key} {ENDLESS[0]}", ENDLESS[1])
            for check in registry.kind_of(section).CHECKS:
                found += check(of_set.data, of_set) or ()
            if not found:
                ours, own = (registry.vocabulary(each) for each in (config.data, section))
                tokenizers = (_fingerprint(ours.tokenizer), _fingerprint(own.tokenizer))
                check_vocabulary(key, section, (ours.size, own.size), tokenizers)
        except DataError as error:
            found.append(error.problem)
        yield from (_of_set(problem, key) for problem in found)


def _fingerprint(tokenizer: str | None) -> str | None:
    from titanlike.data.tokenizer import open_tokenizer

    return None if tokenizer is None else open_tokenizer(tokenizer).fingerprint


def check_vocabulary(
    key: str, section: Any, sizes: tuple[int | None, int | None], tokenizers: tuple[Any, Any]
) -> None:
    """sizes, tokenizers: of the training data, of the set. Raises DataError where ids differ."""
    value, same = getattr(section, "path", section.name), "tokenize it with the same one"
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:
        fix = f"{same}, and leave out {key}.tokenizer"
        raise DataError(key, value, "has another tokenizer than the training data", fix)
    ours, own = sizes
    if ours is not None and own is not None and own > ours:
        reason = f"has {own:,} token ids, and the training data have {ours:,}"
        raise DataError(key, value, reason, same)


def warnings_of_sets(config: Config) -> Iterator[str]:
    """What is in training, too, as paths tell; see `open_sets` for copies of it."""
    for name, section in sections(config).items():
        ours, own = (
            [Path(path).expanduser().resolve() for path in _paths(each)]
            for each in (config.data, section)
        )
        differs = any(getattr(section, p, 0) != getattr(config.data, p, 0) for p in _PARTS)
        shared = (one for one in own for other in ours if one == other or other in one.parents)
        if not differs and (path := next(shared, None)):
            yield f"{key_of(name)}: {path} is trained on, too: its loss says nothing of new data"


def _paths(section: Any) -> list[str]:
    """The paths of a section and of what it mixes."""
    if isinstance(section, MixtureData):
        return [path for one in section.sources.values() for path in _listed(one.get("path"))]
    return _listed(getattr(section, "path", None))


def _listed(path: Any) -> list[str]:
    return [path] if isinstance(path, str) else list(path or ())


def open_sets(data: Data, config: Config) -> Data:
    """The training data with the sets of `validation.data`. Raises DataError."""
    from titanlike.data.sources import ENDLESS as NO_END

    sets: dict[str, Source] = {}
    for name, section in sections(config).items():
        key, of_set = key_of(name), registry.of_all(config, section)
        try:
            opened = registry.kind_of(section).open_data(of_set.data, of_set)
        except DataError as error:
            raise DataError(*astuple(_of_set(error.problem, key))) from None
        sizes = (data.vocab_size, opened.vocab_size)
        check_vocabulary(key, section, sizes, (data.tokenizer, opened.tokenizer))
        if len(opened.validation) >= NO_END and not config.validation.batches:
            raise DataError("validation.batches", "all", f"{key} {ENDLESS[0]}", ENDLESS[1])
        _check_form(key, section, data, opened)
        sets[name] = opened.validation
    shown = ", ".join(f"{name} {len(each):,}".strip() for name, each in sets.items())
    text = f"{data.description}; samples for validation: {shown}"
    first = next(iter(sets.values()))
    return replace(data, validation=first, validation_sets=sets, description=text)


def _check_form(key: str, section: Any, data: Data, opened: Data) -> None:
    """Raise DataError for samples unlike those of training."""
    from titanlike.data.sources import random_state_kept

    if not hasattr(data.train, "__getitem__"):  # of a stream none is known yet
        return
    with random_state_kept():
        ours, own = data.train[0], opened.validation[0]
    variable = (opened.variable is None, data.variable is None)
    forms = [
        {n: (str(v.dtype), list(v.shape) if all(variable) else 0) for n, v in each.items()}
        for each in (ours, own)
    ]
    if forms[0] != forms[1] or len(set(variable)) > 1:
        reason = f"has samples of {forms[1]}, and the training data of {forms[0]}"
        raise DataError(key, section.name, reason, "the same fields, dtypes and shapes in both")
