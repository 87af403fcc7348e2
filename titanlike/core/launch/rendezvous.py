"""Barriers between the ranks of a job through its store, without a process group.

The job's store exists before torch's process groups and as long as the job. All ranks start
together and end together; in between they meet at named barriers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from titanlike.core.config.errors import some_names
from titanlike.core.launch import failures
from titanlike.core.launch.signals import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

DATA_TIMEOUT = 24 * 3600.0  # seconds for a rank to tokenize or read while the others wait
_NAMED = 16  # missing ranks listed in an error
FIRST_WAIT, LONGEST_WAIT, LONGER = 0.02, 0.5, 1.5  # seconds between polls of the store; factor


class Rank(Protocol):
    """The attributes of a `Worker` that are used here."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def store(self) -> Store | None: ...
    @property
    def stop_request(self) -> StopRequest: ...


class BarrierTimeout(RuntimeError):
    """The ranks in `missing` did not reach a barrier in time."""

    def __init__(self, text: str, missing: list[int]) -> None:
        super().__init__(text)
        self.missing = missing


def barrier(
    worker: Rank,
    name: str,
    timeout: float,
    message: str = "",
    listens: bool = False,
    failed_come: bool = False,
) -> dict[int, str]:
    """Wait for all ranks at a named point of a job; returns rank -> message where one has one.

    name: unique in this job. listens: whether this rank receives the messages, else it gets {}.
    failed_come: whether to wait for a rank that has failed, too. Raises BarrierTimeout after
    `timeout` seconds, with the missing ranks. PeerFailed soon after a different rank has failed, if
    `timeout` is a day: where rank 0 works alone the others poll, elsewhere whoever watches them
    ends them.

    The store is one process for all ranks, so ranks do not query each other one by one: each
    appends to one value, and the last to arrive publishes all messages under the key that the
    others wait for. That is at most five requests per rank, whatever the number of ranks, besides
    polls.
    """
    store, rank = worker.store, worker.rank
    if store is None:
        return {rank: message} if message and listens else {}
    arrived, complete = f"{name}/arrived", f"{name}/complete"
    # torch's type stub lacks `append`
    store.append(arrived, f"{json.dumps([rank, message])},")  # type: ignore[attr-defined]
    if store.add(f"{name}/count", 1) == worker.world_size:
        messages = {other: text for other, text in _arrived(store, arrived).items() if text}
        store.set(complete, json.dumps([*messages.items()]))
        return messages if listens else {}
    if failed_come or timeout < DATA_TIMEOUT:
        came = False
        # one wait, not several short ones: torch warns twice of each that ends by its time
        with contextlib.suppress(RuntimeError):
            store.wait([complete], timedelta(seconds=timeout))
            came = True
    else:
        came = _poll(worker, complete, timeout)
    if not came:
        missing = sorted({*range(worker.world_size)} - _arrived(store, arrived).keys())
        who = f"rank {in_words(missing)} did not reach"
        if not missing:
            who = "a rank ended while it reached"
        of_config = timeout < DATA_TIMEOUT  # data, and a reference for verify, have a day
        limit = "launch.timeout" if of_config else "a day, which no key changes"
        raise BarrierTimeout(
            f"{who} the job's {name} in {timeout:g} s ({limit}); see their logs, and check "
            "that their machines are up",
            missing,
        )
    return dict(json.loads(store.get(complete))) if listens else {}


def _poll(worker: Rank, key: str, timeout: float = math.inf) -> bool:
    """Poll the store until a key is set; returns whether it is in time. Raises PeerFailed once a
    different rank has failed."""
    assert worker.store is not None
    end, wait = time.monotonic() + timeout, FIRST_WAIT
    while not worker.store.check([key]):
        # the key: else the rank has ended since
        if worker.stop_request.peer_failed() and not worker.store.check([key]):
            raise failures.PeerFailed
        if time.monotonic() > end:
            return False
        time.sleep(wait)
        # limits all ranks together to about a thousand requests per second
        wait = min(wait * LONGER, max(LONGEST_WAIT, worker.world_size / 1000))
    return True


def forget(worker: Rank, name: str) -> None:
    """Delete the store's keys of a barrier that all ranks have left. Only rank 0 does."""
    if worker.store is not None and worker.rank == 0 and name:
        for part in ("arrived", "count", "complete"):
            worker.store.delete_key(f"{name}/{part}")


def _arrived(store: Store, key: str) -> dict[int, str]:
    return dict(json.loads(f"[{store.get(key).decode().rstrip(',')}]"))


def wait_for_rank_0(store: Store, worker: Rank, name: str) -> None:
    """Wait until rank 0 reaches a named point, however long that takes (the watchdog ends a run
    whose rank 0 hangs). Raises PeerFailed if a different rank has failed."""
    if worker.rank == 0:
        store.set(name, "")
    _poll(worker, name)


def in_words(ranks: list[int]) -> str:
    """List ranks: "1, 2, 3", or the first few of many and the number of the others."""
    return some_names([*map(str, ranks)], _NAMED)


def start_together(
    worker: Rank, timeout: float, machine: str | None = None
) -> list[tuple[int, int]]:
    """Wait for all ranks to start. Returns (rank, process id) of those on this machine.

    machine: a name that is the same on all its ranks; None = this host's. The amount of data read
    per rank does not grow with the number of machines.
    """
    assert worker.store is not None
    if machine is None:
        machine = socket.gethostname()
        with contextlib.suppress(OSError):  # containers have separate process ids
            machine += f"/{os.stat('/proc/self/ns/pid').st_ino}"
    key = f"start/of/{machine}"
    worker.store.append(key, f"{worker.rank} {os.getpid()}\n")  # type: ignore[attr-defined]
    barrier(worker, "start", timeout)
    pairs = (line.split() for line in worker.store.get(key).decode().splitlines())
    return [(int(rank), int(pid)) for rank, pid in pairs]


def peer_ended(run_dir: Path, rank: int, pids: list[tuple[int, int]]) -> bool:
    """Whether a different rank failed or was killed, as no rank ends before the last barrier.
    Writes an error file for a process that ended without one.

    pids: (rank, process id) of the ranks on this machine.
    """
    for other, pid in pids:
        if has_ended(pid) and not failures.error_path(run_dir, other).exists():
            text = f"its process ({socket.gethostname()}, pid {pid}) ended and wrote no error"
            failure = failures.Failure(other, text, "", False, time.time(), by_peer=True)
            with contextlib.suppress(OSError):
                failures.write_failure(run_dir, failure)
    return failures.peer_failed(run_dir, rank)


def has_ended(pid: int) -> bool:
    """Whether a process on this machine has ended or is ending, even if it is not reaped yet."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[20] == "0"  # no memory is left
    except ProcessLookupError:
        return True
    except (OSError, IndexError):  # a different user's, or not Linux
        return False
