"""Where the ranks of a job wait for each other without a process group: through its store.

The job's store is there before torch's process groups are, and lives as long as the job. All ranks
start together and end together; between, they meet at named points (`barrier`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from titanlike.config.errors import some_names
from titanlike.launch.failures import (
    Failure,
    PeerFailed,
    error_path,
    peer_failed,
    write_failure,
)
from titanlike.launch.signals import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

_NAMED = 16  # missing ranks that an error names
FIRST_WAIT, LONGEST_WAIT, LONGER = 0.02, 0.5, 1.5  # seconds between two looks at the store; factor


class Rank(Protocol):
    """What is read of a `Worker`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def store(self) -> Store | None: ...
    @property
    def stop_request(self) -> StopRequest: ...


class BarrierTimeout(RuntimeError):
    """Some ranks did not reach a barrier in time: those of `missing`."""

    def __init__(self, text: str, missing: list[int]) -> None:
        super().__init__(text)
        self.missing = missing


def barrier(
    worker: Rank, name: str, timeout: float, message: str = "", listens: bool = False
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


def forget(worker: Rank, name: str) -> None:
    """Remove what the store keeps of a barrier that all ranks have left. On rank 0."""
    if worker.store is not None and worker.rank == 0 and name:
        for part in ("arrived", "count", "complete"):
            worker.store.delete_key(f"{name}/{part}")


def _arrived(store: Store, key: str) -> dict[int, str]:
    return dict(json.loads(f"[{store.get(key).decode().rstrip(',')}]"))


def wait_for_rank_0(store: Store, worker: Rank, name: str) -> None:
    """Wait until rank 0 has come to a named point, however long it works alone: the watchdog ends a
    run whose rank 0 stands still. Raises PeerFailed once another rank has failed."""
    wait = FIRST_WAIT
    if worker.rank == 0:
        store.set(name, "")
    while not store.check([name]):
        if worker.stop_request.peer_failed():
            raise PeerFailed
        time.sleep(wait)
        # of all ranks together some thousand requests a second
        wait = min(wait * LONGER, max(LONGEST_WAIT, worker.world_size / 1000))


def in_words(ranks: list[int]) -> str:
    """ "1, 2, 3", or the first of many and the number of the others."""
    return some_names([*map(str, ranks)], _NAMED)


def start_together(
    worker: Rank, timeout: float, machine: str | None = None
) -> list[tuple[int, int]]:
    """Wait for all ranks to start; those on this machine, and their process ids.

    What a rank reads does not grow with the number of machines. machine: its name; None = this
    one's.
    """
    assert worker.store is not None
    if machine is None:
        machine = socket.gethostname()
        with contextlib.suppress(OSError):  # containers number their processes separately
            machine += f"/{os.stat('/proc/self/ns/pid').st_ino}"
    key = f"start/of/{machine}"
    worker.store.append(key, f"{worker.rank} {os.getpid()}\n")  # type: ignore[attr-defined]
    barrier(worker, "start", timeout)
    pairs = (line.split() for line in worker.store.get(key).decode().splitlines())
    return [(int(rank), int(pid)) for rank, pid in pairs]


def peer_ended(run_dir: Path, rank: int, pids: list[tuple[int, int]]) -> bool:
    """Whether another rank failed or was killed: otherwise none ends before the last barrier. What
    ended without an error gets one.

    pids: of the ranks on this machine.
    """
    for other, pid in pids:
        if has_ended(pid) and not error_path(run_dir, other).exists():
            text = f"its process ({socket.gethostname()}, pid {pid}) ended and wrote no error"
            with contextlib.suppress(OSError):
                write_failure(run_dir, Failure(other, text, "", False, time.time(), by_peer=True))
    return peer_failed(run_dir, rank)


def has_ended(pid: int) -> bool:
    """Whether a process of this machine has ended or is ending, though its parent may not know."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[20] == "0"  # its memory
    except ProcessLookupError:
        return True
    except (OSError, IndexError):  # another user's, or this is no Linux
        return False
