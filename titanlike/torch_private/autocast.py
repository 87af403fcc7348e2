"""torch.autocast: whether a model's own forward turns it on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def watch_autocast(off: bool = False) -> Iterator[list[Any]]:
    """Within it, the autocasts that a model turns on are listed; with `off` they stay off."""
    used: list[Any] = []
    patched: Any = torch.autocast
    enter = patched.__enter__

    def watched(self: torch.autocast) -> Any:
        if self._enabled:
            used.append(self)
            self._enabled = not off
        return enter(self)

    patched.__enter__ = watched
    try:
        yield used
    finally:
        patched.__enter__ = enter
