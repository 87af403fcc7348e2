"""Sets `torch.utils.data.get_worker_info`, by which an `IterableDataset` chooses its shard.

torch sets it only in loader processes. But a reader of a stream is a shard in any process: users'
and Hugging Face's datasets would shard by processes, and so by layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data._utils import worker

# torchdata 0.11 on torch 2.13 and later, each time that a reader is opened
warnings.filterwarnings("ignore", "'set_vital' is deprecated")


@contextmanager
def read_as_part(part: int, parts: int, seed: int, dataset: Dataset[Any] | None) -> Iterator[None]:
    """A context in which `get_worker_info()` has `id=part` and `num_workers=parts`; None without a
    dataset, as outside of loader processes."""
    before = worker._worker_info
    worker._worker_info = None
    if dataset is not None:
        info = worker.WorkerInfo(id=part, num_workers=parts, seed=seed, dataset=dataset)
        worker._worker_info = info
    try:
        yield
    finally:
        worker._worker_info = before
