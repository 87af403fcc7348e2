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
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlike.config.errors import Problem, Refused
from titanlike.config.schema import (
    ChatData,
    Config,
    Custom,
    HFData,
    MixtureData,
    SyntheticData,
    TextData,
    TokenData,
)

if TYPE_CHECKING:
    from titanlike.data.sources import Data

KINDS = {
    TextData: "text",
    HFData: "hf_dataset",
    TokenData: "tokens",
    MixtureData: "mixture",
    ChatData: "chat",
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


def open_data(config: Config) -> Data:
    """The training and validation sources of the config.

    Text is tokenized on the first call; several processes may call this concurrently, but then each
    tokenizes. Raises DataError for files that cannot be read, and for a part shorter than one
    sequence of `seq_len`.
    """
    return kind_of(config.data).open_data(config.data, config)


def problems(config: Config) -> list[Problem]:
    """Every error that is quick to find before a worker starts."""
    errors: list[Problem] = []
    for check in kind_of(config.data).CHECKS:
        try:
            errors += check(config.data, config) or ()
        except DataError as error:
            errors.append(error.problem)
    return [error for at, error in enumerate(errors) if error not in errors[:at]]


def vocab_size(config: Config) -> int:
    """The number of token ids in the data, without tokenizing the corpus.

    A user's own data (Custom) is opened. Raises DataError where that fails.
    """
    size = kind_of(config.data).vocabulary(config.data).size
    return open_data(config).vocab_size if size is None else size


def vocabulary(data: Any) -> Vocabulary:
    """The vocabulary of a config's section, whose code is not run. Raises DataError."""
    return kind_of(data).vocabulary(data)


def loader_workers(config: Config) -> int:
    """Loader processes of each rank."""
    data = config.data
    return data.args.get("workers", 0) if isinstance(data, Custom) else getattr(data, "workers", 0)


def data_changed(config: Config) -> bool:
    """Whether this start may resume on other data than the checkpoint's."""
    data = config.data
    return data.args.get("changed", False) if isinstance(data, Custom) else data.changed
