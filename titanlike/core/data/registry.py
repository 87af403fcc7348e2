"""Checks and opens the training and validation data of a config.

Importing this file does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError, kind_of, loader_workers, of_all
from titanlike.core.metrics.units import size

if TYPE_CHECKING:
    from titanlike.core.data.sources import Data


def open_data(config: Config) -> Data:
    """Open the config's training and validation sources.

    Text is tokenized on the first call; concurrent processes each tokenize. Raises DataError for
    unreadable files, and for a part shorter than one sequence of `seq_len`.
    """
    if not config.validation.data:
        return kind_of(config.data).open_data(config.data, config)
    from titanlike.formats.validation_sets import open_sets  # imports torch

    trained = of_all(config)
    return open_sets(kind_of(config.data).open_data(trained.data, trained), config)


def problems(config: Config) -> list[Problem]:
    """Return every error that is quick to find before a worker starts."""
    errors: list[Problem] = []
    trained = of_all(config) if config.validation.data else config
    for check in kind_of(config.data).CHECKS:
        try:
            errors += check(trained.data, trained) or ()
        except DataError as error:
            errors.append(error.problem)
        except OSError as error:  # a name that no file can have, or a folder that may not be read
            errors.append(Problem("data", trained.data.name, str(error)[:200], "another name"))
    errors += _shared_memory_problem(config)
    if config.validation.data:
        from titanlike.formats.validation_sets import problems_of_sets

        errors += problems_of_sets(config)
    return [error for index, error in enumerate(errors) if error not in errors[:index]]


def warnings(config: Config) -> Iterator[str]:
    """Yield what is allowed but hardly intended, for a config without problems."""
    if config.validation.data:
        from titanlike.formats.validation_sets import warnings_of_sets

        yield from warnings_of_sets(config)


SHARED_MEMORY = "/dev/shm"  # where Linux keeps the batches of loader processes
_IN_FLIGHT = 2  # batches of each loader process: torch's `prefetch_factor`
_RANKS = 8  # ranks per machine, if unknown


def _shared_memory_problem(config: Config) -> Iterator[Problem]:
    """Yield an error if the batches in flight do not fit into shared memory. A user's own samples
    may have any fields; for these the error comes when a batch is sent."""
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
    """Return the free bytes of shared memory."""
    stats = os.statvfs(SHARED_MEMORY)
    return stats.f_bavail * stats.f_frsize


def vocab_size(config: Config) -> int | None:
    """Return the number of token ids in the data, without tokenizing the corpus.

    A user's own data (Custom) are opened. Raises DataError if that fails.
    """
    known = kind_of(config.data).vocabulary(config.data).size
    return open_data(config).vocab_size if known is None else known
