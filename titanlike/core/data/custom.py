"""Data from a user's function, which returns `sources.Data`, (training, validation), or one
dataset, part of which is held out. Samples are checked and padded by checked.py."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset, Subset

from titanlike.core.config.errors import Problem, nearest, override_text
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.imports import import_fix, import_object, of_a_library
from titanlike.core.config.schema import Config
from titanlike.core.data.checked import Call, checked_source
from titanlike.core.data.kinds import (
    DataError,
    Vocabulary,
    data_changed,
    loader_workers,
    missing_package,
)
from titanlike.core.data.readers import default_readers
from titanlike.core.data.sources import Data

# keys of all kinds of data or streams; not passed to the user's function
_COMMON_KEYS = ("workers", "changed", "validation_fraction", "readers", "prefetch", "repeat")
_HELD_OUT = 0.05  # share of a single dataset, the default of `data.validation_fraction`


def open_data(data: Custom, config: Config) -> Data:
    """Call the user's function; samples are checked when they are read.

    The function receives `data.args` without `_COMMON_KEYS`, and `seq_len` if it has that
    parameter. Raises DataError if the result is not data, is empty, or has an invalid `variable`.
    """
    function = _function(data)
    arguments = {name: value for name, value in data.args.items() if name not in _COMMON_KEYS}
    sizes = {"seq_len": config.seq_len}
    # a function of a stream may have the parameters reader, readers and seed
    readers = data.args.get("readers") or default_readers(config)
    reader_arguments = {"reader": 0, "readers": readers, "seed": config.seed}
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled code has no signature
        signature = None
    if signature is not None:
        parameters = signature.parameters
        any_name = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        if not any_name and "seq_len" not in parameters:
            sizes = {}
        taken = parameters.keys() - arguments.keys() if "reader" in parameters else ()
        reader_arguments = {n: value for n, value in reader_arguments.items() if n in taken}
        for name in arguments.keys() - parameters.keys() if not any_name else ():
            names = sorted({*parameters} - {*sizes, *reader_arguments} | {*_COMMON_KEYS})
            fix = f"one of its arguments: {', '.join(f'data.{key}' for key in names)}"
            if near := nearest(name, names):
                fix = f"data.{near}={override_text(arguments[name])}"
            reason = f"{data.name} has no such argument"
            raise DataError(f"data.{name}", arguments[name], reason, fix)
        try:
            signature.bind(**arguments, **sizes, **reader_arguments)
        except TypeError as error:
            fix = "give its arguments as data.NAME"
            raise DataError("data.name", data.name, f"cannot be called ({error})", fix) from None
    call = Call(function, {**arguments, **sizes}, reader_arguments, config.seed)
    opened = call()
    if not isinstance(opened, Data):
        held_out = data.args.get("validation_fraction", _HELD_OUT)
        opened = _data_of(opened, data.name, held_out if config.validation.data is None else 0.0)
    if is_stream(opened.train):
        if importlib.util.find_spec("torchdata") is None:
            raise missing_package("data.name", data.name, "torchdata", "stream")
        from titanlike.formats.own_stream import open_stream

        return open_stream(opened, call, data, config)
    return checked(opened, data.name, config)


def _data_of(returned: Any, name: str, held_out: float) -> Data:
    """Wrap datasets without a vocabulary as Data. held_out: share of a single dataset for
    validation."""
    listed = isinstance(returned, list) and len(returned) == 2
    if listed and isinstance(returned[0], Dataset):  # as random_split returns them
        returned = tuple(returned)
    if isinstance(returned, tuple) and len(returned) == 2:
        train, validation = returned
    elif is_stream(returned):
        train, validation = returned, cast(Any, None)
    elif hasattr(returned, "__getitem__") and not isinstance(returned, Mapping):
        train = validation = cast(Any, returned)
        if held_out and hasattr(returned, "__len__") and (size := len(returned)) > 1:
            cut = size - min(size - 1, max(1, round(size * held_out)))
            train, validation = (Subset(returned, r) for r in (range(cut), range(cut, size)))
    else:
        reason = f"the function returned {type(returned).__name__}"
        if isinstance(returned, Mapping):  # as a DatasetDict
            reason += f" of {', '.join(map(str, returned))}"
        fix = "let it return a dataset, (training, validation), or a titanlike.Data"
        raise DataError("data.name", name, reason, fix)
    parts = [f"{len(part):,}" if hasattr(part, "__len__") else "" for part in (train, validation)]
    text = name if is_stream(train) else f"{name}: {parts[0]} samples"
    text += f", {parts[1]} for validation" * (train is not validation and validation is not None)
    return Data(train, validation, None, text)


def checked(opened: Data, name: str, config: Config) -> Data:
    """Wrap the map-style sources that function `name` returned, so that samples are checked when
    read. Raises DataError."""
    variable = opened.variable
    train = checked_source(opened.train, "training", name, config, variable)
    train.lengths = None if variable is None else variable.lengths
    validation = checked_source(opened.validation, "validation", name, config, variable)
    return replace(opened, train=train, validation=validation)


def vocabulary(data: Custom) -> Vocabulary:
    return Vocabulary(None)


def _check(data: Custom, config: Config) -> Iterator[Problem]:
    workers, changed = loader_workers(config.data), data_changed(config.data)
    if not isinstance(workers, int) or workers < 0:
        yield Problem("data.workers", workers, "must be a number >= 0", "data.workers=0")
    held_out = data.args.get("validation_fraction", _HELD_OUT)
    if not isinstance(held_out, float) or not 0 < held_out < 1:
        key, fix = "data.validation_fraction", "data.validation_fraction=0.05"
        yield Problem(key, held_out, "must be a share of 1", fix)
    if not isinstance(changed, bool):
        yield Problem("data.changed", changed, "must be true or false", "data.changed=true")
    _function(data)


CHECKS = (_check,)


def _function(data: Custom) -> Callable[..., Any]:
    remedy = "name a function as package.module.function, on the Python path"
    try:
        function = import_object(data.name)
    except ValueError as error:
        fix = import_fix("data.name", error, remedy)
        raise DataError("data.name", data.name, str(error), fix) from None
    if not callable(function):
        raise DataError("data.name", data.name, "is not a function", remedy)
    if kind := of_a_library(data.name, function, Data):
        raise DataError("data.name", data.name, f"is a {kind}", "name a function of your own")
    return function


def is_stream(part: Any) -> bool:
    """Return whether an object is iterable but has no random access."""
    indexed = hasattr(part, "__getitem__") and not isinstance(part, IterableDataset)
    return not indexed and isinstance(part, Iterable)
