"""The data of a run, opened on every rank."""

from __future__ import annotations

from titanlike.config.schema import Config
from titanlike.data.loader import open_data
from titanlike.data.sources import Data
from titanlike.launch.worker import Worker, barrier

DATA_TIMEOUT = 24 * 3600.0  # seconds for one process to tokenize while the others wait


def open_data_on_every_rank(config: Config, worker: Worker) -> Data:
    """Open the data; one process a machine prepares it (tokenizes) before the others read.

    Called before there is a process group: preparing may take longer than its timeout.
    """
    if worker.local_rank == 0:
        data = open_data(config)
    barrier(worker, "data", DATA_TIMEOUT)
    return data if worker.local_rank == 0 else open_data(config)
