"""The kinds of data. Each is a module, imported when a config names it.

Such a module has (synthetic.py is the smallest example):

    CHECKS                   functions (data, config) that yield Problems which are quick to find,
                             or raise a DataError
    vocabulary(data)         `Vocabulary` of a config section. Raises DataError
    open_data(data, config)  `sources.Data`: the training and validation sources. Raises DataError

Importing this file does not import torch.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, NamedTuple

from titanlike.core.config.errors import Refused
from titanlike.core.config.groups.data import (
    ChatData,
    HFData,
    MixtureData,
    StreamData,
    SyntheticData,
    TextData,
    TokenData,
)
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config

KINDS = {
    TextData: "formats.text",
    HFData: "formats.hf_dataset",
    TokenData: "formats.tokens",
    MixtureData: "formats.mixture",
    ChatData: "formats.chat",
    StreamData: "formats.stream",
    SyntheticData: "core.data.synthetic",
    Custom: "core.data.custom",
}

READERS = "data.reader."  # prefix of the states of a stream's readers in a checkpoint


class Vocabulary(NamedTuple):
    size: int | None  # None = unknown until the data are open
    tokenizer: str | None = None  # name or path; None = no tokenizer
    boundary: int | None = None  # id that separates documents


class DataError(Refused):
    """An error in a data key of the config, or in a file that it names."""


def missing_package(key: str, value: object, package: str, extra: str) -> DataError:
    """Return the error for a missing package of an optional extra."""
    fix = f"install it with: pip install 'titanlike[{extra}]'"
    return DataError(key, value, f"the package {package} is not installed", fix)


def kind_of(data: object) -> Any:
    """Import the module that reads a data section."""
    return importlib.import_module(f"titanlike.{KINDS[type(data)]}")


def of_all(config: Config, section: Any = None) -> Config:
    """Return the config with `section` (None = the training data) as its data and nothing held out,
    so that validation reads all of it."""
    data = config.data if section is None else section
    if hasattr(data, "validation_fraction"):
        data = replace(data, validation_fraction=0.0)
    every = 0 if section is None else 1  # a stream validates on its held-out samples
    # {}: a dataset that a user's function returns is not split, either
    validation = replace(config.validation, data={}, every=every)
    return replace(config, data=data, validation=validation)


def vocabulary(data: Any) -> Vocabulary:
    """Return the vocabulary of a data section, without running a user's code. Raises DataError."""
    return kind_of(data).vocabulary(data)


def option(data: Any, name: str, default: Any) -> Any:
    """Return the value of a key that sections of several kinds have, or the default."""
    return (
        data.args.get(name, default) if isinstance(data, Custom) else getattr(data, name, default)
    )


def loader_workers(data: Any) -> int:
    """Return the number of loader processes per rank."""
    return option(data, "workers", 0)


def data_changed(data: Any) -> bool:
    """Return whether a run may resume although the data are not those of the checkpoint."""
    return option(data, "changed", False)
