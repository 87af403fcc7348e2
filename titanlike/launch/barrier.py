"""Points of a job that all ranks reach, and what they tell each other there, in few requests.

The store is one process for all ranks. So a rank never asks for the others one by one: each appends
to one value, the last to arrive sets the key that all wait for, and who wants to know reads the one
value. A rank makes at most five requests a barrier, however many ranks there are.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_NAMED = 16  # missing ranks that an error names


class BarrierTimeout(RuntimeError):
    """Some ranks did not reach a barrier in time."""


def meet(
    store: Store, rank: int, world_size: int, name: str, timeout: float, message: str = ""
) -> list[str]:
    """Wait for all ranks at a named point; returns each rank's `message`.

    name: new in this store. message: of every rank, or of none. Raises BarrierTimeout after
    `timeout` seconds, with the ranks that are missing.
    """
    arrived, complete = f"{name}/arrived", f"{name}/complete"
    store.append(arrived, f"{json.dumps([rank, message])},")
    if store.add(f"{name}/count", 1) == world_size:
        store.set(complete, "")
    else:
        try:
            store.wait([complete], timedelta(seconds=timeout))
        except RuntimeError:
            missing = sorted({*range(world_size)} - _messages(store, arrived).keys())
            who = f"rank {in_words(missing)} did not reach"
            if not missing:
                who = "a rank ended while it reached"
            raise BarrierTimeout(
                f"{who} the job's {name} in {timeout:g} s (launch.timeout); see their logs, and check "
                "that their machines are up"
            ) from None
    if not message:
        return [""] * world_size
    messages = _messages(store, arrived)
    return [messages[each] for each in range(world_size)]


def _messages(store: Store, key: str) -> dict[int, str]:
    return dict(json.loads(f"[{store.get(key).decode().rstrip(',')}]"))


def in_words(ranks: list[int]) -> str:
    """ "1, 2, 3", or the first of many and the number of the others."""
    more = len(ranks) - _NAMED
    return ", ".join(map(str, ranks[:_NAMED])) + (f" and {more} more" if more > 0 else "")
