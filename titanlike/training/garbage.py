"""Python's garbage collection at fixed steps, the same on all ranks.

Python collects when enough objects were made: at another step on each rank, and all others wait for
the one that does. Objects in cycles are rare in a step; the others are freed at once in any case.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Within it garbage is collected when the function that it gives is called with a step that is a
    multiple of `steps`. 0: as Python does by itself. Afterwards it is as before.

    What exists at the beginning, the model and torch itself, is not looked through again.
    """
    if not steps:
        yield lambda step: None
        return

    def collect(step: int) -> None:
        if step % steps == 0:
            gc.collect()

    enabled = gc.isenabled()
    gc.disable()
    gc.collect()  # what is frozen is never freed
    gc.freeze()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
