"""Find where the host synchronizes with a device, which then becomes idle."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def waits_by_place(device: torch.device) -> Iterator[Counter[str] | None]:
    """A context that counts host synchronizations with a CUDA device by file:line."""
    if device.type != "cuda":
        yield None
        return
    places: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
            for w in caught:
                if "synchronizing CUDA operation" in str(w.message):
                    places[f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}"] += 1
