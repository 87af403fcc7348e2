"""Points of a job that all ranks reach, and what they tell each other there, in few requests.

The store is one process for all ranks. So a rank never asks for the others one by one: each appends
to one value, and the last to arrive reads it and publishes what they said in the key that all wait
for. A rank makes at most five requests a barrier, however many ranks there are, and reads next to
nothing where the others have nothing to say.
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
    store: Store,
    rank: int,
    world_size: int,
    name: str,
    timeout: float,
    message: str = "",
    listens: bool = False,
) -> dict[int, str]:
    """Wait for all ranks at a named point; returns the message of each rank that has one.

    name: new in this store. listens: whether this rank wants the messages; else it gets none.
    Raises BarrierTimeout after `timeout` seconds, with the ranks that are missing.
    """
    arrived, complete = f"{name}/arrived", f"{name}/complete"
    # torch's stub lacks `append`
    store.append(arrived, f"{json.dumps([rank, message])},")  # type: ignore[attr-defined]
    if store.add(f"{name}/count", 1) == world_size:
        messages = {each: text for each, text in _arrived(store, arrived).items() if text}
        store.set(complete, json.dumps(list(messages.items())))
        return messages if listens else {}
    try:
        store.wait([complete], timedelta(seconds=timeout))
    except RuntimeError:
        missing = sorted({*range(world_size)} - _arrived(store, arrived).keys())
        who = f"rank {in_words(missing)} did not reach"
        if not missing:
            who = "a rank ended while it reached"
        raise BarrierTimeout(
            f"{who} the job's {name} in {timeout:g} s (launch.timeout); see their logs, and check "
            "that their machines are up"
        ) from None
    return dict(json.loads(store.get(complete))) if listens else {}


def meet_in_groups(
    store: Store,
    rank: int,
    world_size: int,
    name: str,
    timeout: float,
    group: str,
    message: str,
) -> list[str]:
    """Wait for all ranks like `meet`; returns the messages of the ranks in this one's group.

    group: such as a machine: what each rank reads does not grow with the number of machines.
    message: a line.
    """
    key = f"{name}/of/{group}"
    store.append(key, f"{message}\n")  # type: ignore[attr-defined]  # as above
    meet(store, rank, world_size, name, timeout)
    return store.get(key).decode().splitlines()


def _arrived(store: Store, key: str) -> dict[int, str]:
    return dict(json.loads(f"[{store.get(key).decode().rstrip(',')}]"))


def in_words(ranks: list[int]) -> str:
    """ "1, 2, 3", or the first of many and the number of the others."""
    more = len(ranks) - _NAMED
    return ", ".join(map(str, ranks[:_NAMED])) + (f" and {more} more" if more > 0 else "")
