"""Where the ranks of a job wait for each other without a process group: through its store.

The job's store is there before torch's process groups are, and lives as long as the job. All ranks
start together and end together; between, they meet at named points (`barrier`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.config.errors import some_names
from titanlike.launch.failures import peer_failed

if TYPE_CHECKING:
    from torch.distributed import Store

    from titanlike.launch.worker import Worker

_NAMED = 16  # missing ranks that an error names


class BarrierTimeout(RuntimeError):
    """Some ranks did not reach a barrier in time."""

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = missing


def barrier(
    worker: Worker, name: str, timeout: float, message: str = "", listens: bool = False
) -> dict[int, str]:
    """Wait for all ranks at a named point of a job; returns the message of each rank that has one.

    name: new in this job. listens: whether this rank wants the messages; else it gets none.
    Raises BarrierTimeout after `timeout` seconds, with the ranks that are missing.

    The store is one process for all ranks. So a rank never asks for the others one by one: each
    appends to one value, and the last to arrive reads it and publishes what they said in the key
    that all wait for. A rank makes at most five requests, however many ranks there are, and reads
    next to nothing where the others have nothing to say.
    """
    store, rank = worker.store, worker.rank
    if store is None:
        return {rank: message} if message and listens else {}
    arrived, complete = f"{name}/arrived", f"{name}/complete"
    # torch's stub lacks `append`
    store.append(arrived, f"{json.dumps([rank, message])},")  # type: ignore[attr-defined]
    if store.add(f"{name}/count", 1) == worker.world_size:
        messages = {other: text for other, text in _arrived(store, arrived).items() if text}
        store.set(complete, json.dumps([*messages.items()]))
        return messages if listens else {}
    try:
        store.wait([complete], timedelta(seconds=timeout))
    except RuntimeError:
        missing = sorted({*range(worker.world_size)} - _arrived(store, arrived).keys())
        who = f"rank {in_words(missing)} did not reach"
        if not missing:
            who = "a rank ended while it reached"
        raise BarrierTimeout(
            f"{who} the job's {name} in {timeout:g} s (launch.timeout); see their logs, and check "
            "that their machines are up",
            missing,
        ) from None
    return dict(json.loads(store.get(complete))) if listens else {}


def _arrived(store: Store, key: str) -> dict[int, str]:
    return dict(json.loads(f"[{store.get(key).decode().rstrip(',')}]"))


def in_words(ranks: Sequence[int]) -> str:
    """ "1, 2, 3", or the first of many and the number of the others."""
    return some_names([*map(str, ranks)], _NAMED)


def start_together(worker: Worker, timeout: float, machine: str | None = None) -> list[int]:
    """Wait for all ranks to start; the process ids of those on this machine.

    What a rank reads does not grow with the number of machines. machine: its name; None = this
    one's.
    """
    assert worker.store is not None
    machine = machine or _this_machine()
    key = f"start/of/{machine}"
    worker.store.append(key, f"{os.getpid()}\n")  # type: ignore[attr-defined]  # as above
    barrier(worker, "start", timeout)
    return [int(pid) for pid in worker.store.get(key).decode().splitlines()]


def _this_machine() -> str:
    name = socket.gethostname()
    with contextlib.suppress(OSError):  # containers number their processes separately
        name += f"/{os.stat('/proc/self/ns/pid').st_ino}"
    return name


def peer_ended(run_dir: Path, rank: int, pids: list[int]) -> bool:
    """Whether another rank failed or was killed: otherwise none ends before the last barrier.

    pids: of the ranks on this machine.
    """
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it exists, but is another user's
            continue
    return peer_failed(run_dir, rank)
