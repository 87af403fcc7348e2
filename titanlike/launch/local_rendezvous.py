"""The rendezvous of workers that are all on this machine: through memory and a private file.

torch's own rendezvous ("c10d", "static") listens on every network interface, and its agent unpickles
what it reads there, so that whoever reaches the port could execute code. Here nothing listens: the
only agent has nothing to agree on with others, and the workers share a file in the driver's scratch
folder, which no other user can open.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed import FileStore, HashStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "titanlike-local"


class LocalRendezvous(RendezvousHandler):
    """Of one agent, which starts all workers."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        no_port = RendezvousStoreInfo("localhost", 0)  # MASTER_ADDR, MASTER_PORT of the workers
        return RendezvousInfo(HashStore(), 0, 1, no_port)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register() -> str:
    """Make it known to the elastic agent; its name there."""
    rendezvous_handler_registry.register(BACKEND, LocalRendezvous)
    return BACKEND


def workers_store(folder: Path, workers: int) -> Store:
    """The store of the workers of one start. folder: the same in all of them, private, new."""
    return FileStore(str(folder / "store"), workers)
