"""An id that all ranks of one start agree on, through a store that outlives restarts.

The store keeps the keys of all earlier starts, and torchrun counts restarts per machine. So each
rank publishes a new id; rank 0 answers every id that it sees with its own (dead ranks never read
theirs) until all ranks have confirmed. Rank 0 reads and answers many ranks at a time, and waits
longer the longer it takes: tens of requests however many ranks there are, six of each other rank.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

from titanlike.launch.barrier import in_words

_HELLO = "titanlike/hello"
_FIRST_WAIT, _LONGEST_WAIT, _LONGER = 0.02, 0.5, 1.5  # seconds between two looks of rank 0; factor


def start_id(store: Any, rank: int, world_size: int, timeout: float) -> str:
    """This start's id. Raises RuntimeError with the ranks that did not start in time."""
    own = uuid.uuid4().hex
    if rank > 0:
        store.append(_HELLO, f"{own}\n")
        answer = f"titanlike/answer/{own}"
        store.wait([answer], timedelta(seconds=timeout))
        start = store.get(answer).decode()
        _confirm(store, start, rank, world_size)
        return start
    store.append(_HELLO, "\n")  # exists from now on: to read a missing key blocks
    _confirm(store, own, rank, world_size)
    answered: set[str] = set()
    deadline, wait = time.monotonic() + timeout, _FIRST_WAIT
    while True:
        seen = store.get(_HELLO)
        new = {*seen.decode().split()} - answered
        if new:
            store.multi_set([f"titanlike/answer/{other}" for other in new], [own] * len(new))
            answered |= new
        # not a wait that times out, which torch reports on stderr
        if store.check([f"titanlike/confirmed/{own}/all"]):
            # what the next start reads; unless one of its ranks is there already
            store.compare_set(_HELLO, seen.decode(), "\n")
            return own
        if time.monotonic() > deadline:
            there = map(int, store.get(f"titanlike/confirmed/{own}").decode().split())
            missing = sorted({*range(world_size)} - {*there})
            raise RuntimeError(f"rank {in_words(missing)} did not start in {timeout:g} s")
        time.sleep(wait)
        wait = min(wait * _LONGER, _LONGEST_WAIT)


def _confirm(store: Any, start: str, rank: int, world_size: int) -> None:
    key = f"titanlike/confirmed/{start}"
    store.append(key, f"{rank}\n")
    if store.add(f"{key}/count", 1) == world_size:
        store.set(f"{key}/all", "")
