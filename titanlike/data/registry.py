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
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlike.config.errors import Problem, Refused
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
from titanlike.metrics.units import size

if TYPE_CHECKING:
    from titanlike.data.sources import Data

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


def open_data(config: Config) -> Data:
    """The training and validation sources of the config.

    Text is tokenized on the first call; several processes may call this concurrently, but then each
    tokenizes. Raises DataError for files that cannot be read, and for a part shorter than one
    sequence of `seq_len`.
    """
    if not config.validation.data:
        return kind_of(config.data).open_data(config.data, config)
    from titanlike.data.validation_sets import open_sets  # imports torch

    trained = of_all(config)
    return open_sets(kind_of(config.data).open_data(trained.data, trained), config)


def of_all(config: Config, section: Any = None) -> Config:
    """The config of a section of which nothing is held out, the training data's if none is given:
    what it validates on is all of it."""
    data = config.data if section is None else section
    if hasattr(data, "validation_fraction"):
        data = replace(data, validation_fraction=0.0)
    every = 0 if section is None else config.validation.every  # of a stream the first are held out
    # {}: what the user's own function returns is not divided, either
    validation = replace(config.validation, data={}, every=every)
    return replace(config, data=data, validation=validation)


def problems(config: Config) -> list[Problem]:
    """Every error that is quick to find before a worker starts."""
    errors: list[Problem] = []
    trained = of_all(config) if config.validation.data else config
    for check in kind_of(config.data).CHECKS:
        try:
            errors += check(trained.data, trained) or ()
        except DataError as error:
            errors.append(error.problem)
    errors += _shared_memory_problem(config)
    if config.validation.data:
        from titanlike.data.validation_sets import problems_of_sets

        errors += problems_of_sets(config)
    return [error for at, error in enumerate(errors) if error not in errors[:at]]


def warnings(config: Config) -> Iterator[str]:
    """What is no error, and hardly meant, of a config without problems."""
    if config.validation.data:
        from titanlike.data.validation_sets import warnings_of_sets

        yield from warnings_of_sets(config)


SHARED_MEMORY = "/dev/shm"  # in which Linux has the batches of loader processes
_IN_FLIGHT = 2  # batches of each loader process: torch's `prefetch_factor`
_RANKS = 8  # of a machine, where it is not known


def _shared_memory_problem(config: Config) -> Iterator[Problem]:
    """Where the batches that are on their way to the ranks do not fit into shared memory. Of a
    user's own data, whose samples may have any fields, a batch tells when it is sent."""
    workers = loader_workers(config.data)
    if not workers or isinstance(config.data, Custom) or not os.path.isdir(SHARED_MEMORY):
        return
    fields = 3 if getattr(config.data, "documents", False) else 2
    tokens = max(rows * length for _, rows, length in config.ramp_stages()) // config.dp
    batch = 8 * fields * tokens
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or min(config.world_size, _RANKS))
    needed, free = batch * workers * _IN_FLIGHT * ranks, free_shared_memory()
    if needed > free:
        reason = f"a batch takes {size(batch)}, and {_IN_FLIGHT} of each loader process "
        reason += f"are on their way to {ranks} rank{'s' * (ranks > 1)} of a machine: "
        reason += f"{size(needed)} in {SHARED_MEMORY}, which has {size(free)}"
        fix = "data.workers=0, or more shared memory (docker run --shm-size=1g)"
        yield Problem("data.workers", workers, reason, fix)


def free_shared_memory() -> int:
    """Bytes."""
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


def vocab_size(config: Config) -> int | None:
    """The number of token ids in the data, without tokenizing the corpus.

    A user's own data (Custom) is opened. Raises DataError where that fails.
    """
    known = kind_of(config.data).vocabulary(config.data).size
    return open_data(config).vocab_size if known is None else known


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
