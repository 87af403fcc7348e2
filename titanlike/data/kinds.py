"""The kinds of data, each a module that is imported when a config asks for it.

Such a module has (synthetic.py is the smallest one):

    CHECKS                   functions as `open_data`, each of which yields Problems that are quick
                             to find, or raises a DataError
    vocabulary(data)         of a section of the config, `config.data`. Raises DataError
    open_data(data, config)  `sources.Data`: the training and the validation source. Raises
    DataError

Importing this file does not import torch.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, NamedTuple

from titanlike.config.errors import Refused
from titanlike.config.schema import (
    ChatData,
    Config,
    Custom,
    HFData,
    MixtureData,
    StreamData,
    SyntheticData,
    TextData,
    TokenData,
)

KINDS = {
    TextData: "text",
    HFData: "hf_dataset",
    TokenData: "tokens",
    MixtureData: "mixture",
    ChatData: "chat",
    StreamData: "stream",
    SyntheticData: "synthetic",
    Custom: "custom",
}


class Vocabulary(NamedTuple):
    size: int | None  # None = known only when the data are open
    tokenizer: str | None = None  # name or path; None = there is none
    boundary: int | None = None  # id between documents


class DataError(Refused):
    """An error in a key of the data, or in a file that it names."""


def missing_package(key: str, value: object, package: str, extra: str) -> DataError:
    """The error for a package of an optional extra that is not installed."""
    fix = f"install it with: pip install 'titanlike[{extra}]'"
    return DataError(key, value, f"the package {package} is not installed", fix)


def kind_of(data: object) -> Any:
    """The module of a section of the config."""
    return importlib.import_module(f"titanlike.data.{KINDS[type(data)]}")


def of_all(config: Config, section: Any = None) -> Config:
    """The config of a section of which nothing is held out, the training data's if none is given:
    what it validates on is all of it."""
    data = config.data if section is None else section
    if hasattr(data, "validation_fraction"):
        data = replace(data, validation_fraction=0.0)
    every = 0 if section is None else 1  # of a stream the first are held out
    # {}: what the user's own function returns is not divided, either
    validation = replace(config.validation, data={}, every=every)
    return replace(config, data=data, validation=validation)


def vocabulary(data: Any) -> Vocabulary:
    """The vocabulary of a config's section, whose code is not run. Raises DataError."""
    return kind_of(data).vocabulary(data)


def option(data: Any, name: str, default: Any) -> Any:
    """A key that data of every kind may have, by a section of the config."""
    return (
        data.args.get(name, default) if isinstance(data, Custom) else getattr(data, name, default)
    )


def loader_workers(data: Any) -> int:
    """Loader processes of each rank, by a section of the config."""
    return option(data, "workers", 0)


def data_changed(data: Any) -> bool:
    """Whether a start with this section may resume on other data than the checkpoint's."""
    return option(data, "changed", False)
