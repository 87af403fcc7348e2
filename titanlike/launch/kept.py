"""What stays where torchrun starts failed ranks again (`--max-restarts`): its store does.

The default run directory has the time in its name: a restart writes to that of the first start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


class Kept:
    """Values by key, set once, in torchrun's store; without one, nothing is kept."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    @classmethod
    def of_one_process(cls) -> Kept:
        """For a process that is not one of many: torchrun may have started it all the same."""
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
            return cls()
        import torch.distributed as dist

        return cls(next(dist.rendezvous("env://"))[0])

    def keep(self, key: str, value: str) -> None:
        """Keep `value`, unless an earlier start has kept one."""
        if self._store is not None and self.get(key) is None:
            self._store.set(f"titanlike/{key}", value)

    def get(self, key: str) -> str | None:
        """What was kept, by an earlier start or this one."""
        if self._store is None or not self._store.check([f"titanlike/{key}"]):
            return None
        return self._store.get(f"titanlike/{key}").decode()
