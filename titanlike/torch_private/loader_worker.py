"""Which part of an `IterableDataset` is read: what `torch.utils.data.get_worker_info` answers.

torch sets it in loader processes alone. But a reader of a stream is a part in any process: the
datasets of users, and Hugging Face's, would divide themselves by processes, and so by the layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data._utils import worker

# of torchdata 0.11's loader on torch 2.13 and above, each time that a reader is opened
warnings.filterwarnings("ignore", "'set_vital' is deprecated")


@contextmanager
def read_as_part(part: int, parts: int, seed: int, dataset: Dataset[Any] | None) -> Iterator[None]:
    """A context in which `get_worker_info()` has this part as its `id`, and these as `num_workers`;
    without a dataset it is None, as outside of loader processes."""
    before = worker._worker_info
    worker._worker_info = None
    if dataset is not None:
        own = worker.WorkerInfo(id=part, num_workers=parts, seed=seed, dataset=dataset)
        worker._worker_info = own
    try:
        yield
    finally:
        worker._worker_info = before
