"""Many ranks meet in few requests, and for no longer than they are told: nobody asks one by one."""

from __future__ import annotations

import collections
import itertools
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from support.cells import slow
from support.models import tiny
from support.waiting import until
from support.world import run_world
from titanlike import library
from titanlike.core.config.schema import Config
from titanlike.core.distributed.collectives import gather_objects, scatter_objects
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.failures import describe
from titanlike.core.launch.rendezvous import DATA_TIMEOUT, BarrierTimeout, barrier, start_together
from titanlike.core.launch.torchrun import start_id
from titanlike.core.launch.worker import Worker

MACHINE = 4  # ranks of one


class Counted:
    """A store that counts its requests, and takes no wait without a limit."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.requests = store, collections.Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any) -> Any:
            assert name != "wait" or len(arguments) == 2, "a wait without a limit"
            self.requests[name] += 1
            return getattr(self._store, name)(*arguments)

        return request


def client(port: int) -> Counted:
    server = ("127.0.0.1", port, None, False, timedelta(seconds=60), False)
    return Counted(dist.TCPStore(*server, multi_tenant=False, use_libuv=True))


@pytest.fixture
def port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def ranks(port: int, world_size: int, task: Any, absent: int = 0) -> list[Any]:
    """What `task(store, rank)` returns on each rank, which is a thread with its own connection."""
    size = threading.stack_size(1 << 18)
    try:
        with ThreadPoolExecutor(world_size) as pool:
            stores = list(pool.map(client, [port] * (world_size - absent)))
            return list(pool.map(task, stores, range(world_size - absent)))
    finally:
        threading.stack_size(size)


def start(world_size: int, store: Counted, rank: int) -> tuple[str, int]:
    """All that ranks agree on in a job; the most requests that one of its points took."""
    if rank == 0:  # the last to come: the others have greeted
        until(lambda: len(store.get("titanlike/hello").split()) >= world_size)
        store.requests.clear()
    found = start_id(store, rank, world_size, 100)
    if rank == 0:  # it looks again until all have confirmed, and answers all of them at once
        assert store.requests["multi_set"] == 1
        del store.requests["get"], store.requests["check"]
    most = store.requests.total()
    store.requests.clear()

    def counted(answer: Any) -> Any:
        nonlocal most
        most = max(most, store.requests.total())
        store.requests.clear()
        return answer

    prefixed = Counted(dist.PrefixStore(found, store._store))
    prefixed.requests = store.requests
    worker = Worker(rank, world_size, 0, 1, Path(), prefixed, [])

    def everywhere(name: str, message: str = "", listens: bool = False) -> dict[int, str]:
        return counted(barrier(worker, name, 100, message, listens))

    processes = counted(start_together(worker, 100, f"machine {rank // MACHINE}"))
    first = rank // MACHINE * MACHINE
    mine = [(other, os.getpid()) for other in range(first, first + MACHINE)]
    assert sorted(processes) == mine, "those on this machine alone"
    assert everywhere("data") == {}
    compiled = everywhere("compile", f"compiled {rank}", listens=rank == 0)
    assert compiled == {other: f"compiled {other}" for other in range(world_size) if rank == 0}
    ended = everywhere("end", "failed" if rank % 16 == 3 else "", listens=True)
    assert ended == dict.fromkeys(range(3, world_size, 16), "failed")
    return found, most


@pytest.mark.parametrize("world_size", [8, *slow(1024)])
def test_rendezvous_of_many_ranks_takes_few_requests_each(port: int, world_size: int) -> None:
    client(port).append("titanlike/hello", "dead\n")  # of a rank that has never got an answer
    ids = set()
    for number in (1, 2):  # the store keeps the keys of the first start
        found, requests = zip(*ranks(port, world_size, partial(start, world_size)), strict=True)
        ids |= {*found}
        assert len(ids) == number and max(requests) <= 6
        client(port).append("titanlike/hello", "dead\n")


def test_missing_ranks_are_named_in_few_requests(port: int) -> None:
    def late(store: Counted, rank: int) -> tuple[str, int]:
        with pytest.raises(BarrierTimeout) as error:
            barrier(Worker(rank, 32, 0, 1, Path(), store, []), "data", 1, "x")
        failure = describe(rank, error.value)
        assert failure.names_rank and not failure.transport and not failure.users
        return str(error.value), store.requests.total()

    texts, requests = zip(*ranks(port, 32, late, absent=28), strict=True)
    named = ", ".join(map(str, range(4, 20)))
    assert all(
        text.startswith(f"rank {named} and 12 more did not reach the job's data") for text in texts
    )
    assert max(requests) <= 4


@pytest.mark.parametrize("seconds", [60.0, DATA_TIMEOUT])
def test_the_limit_of_a_barrier_is_the_one_that_is_named(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = partial(next, itertools.count(0.0, seconds))
    clock = SimpleNamespace(monotonic=ticks, sleep=lambda _: None)
    monkeypatch.setattr("titanlike.core.launch.rendezvous.time", clock)

    class Passed(Counted):
        def wait(self, *args: Any) -> None:
            raise RuntimeError("wait timeout")

    store = Passed(dist.HashStore())
    with pytest.raises(BarrierTimeout) as error:
        barrier(Worker(0, 2, 0, 2, Path(), store, []), "data", seconds)
    limit = "60 s (launch.timeout)" if seconds == 60 else "86400 s (a day, which no key changes)"
    assert f"rank 1 did not reach the job's data in {limit}" in str(error.value)


def sockets() -> set[int]:
    """Inodes of this process's sockets."""
    opened = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    found = (os.stat(one) for one in opened if os.path.exists(one))
    return {status.st_ino for status in found if stat.S_ISSOCK(status.st_mode)}


def sockets_of_groups(config: Config, worker: Worker, port: int | None) -> int:
    """port: the caller of the library has made no process group, and torchrun has started it."""
    tested = worker
    if port is not None:
        place = {"RANK": worker.rank, "WORLD_SIZE": worker.world_size, "MASTER_PORT": port}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": True}  # of its agent
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        worker = library._worker(config, ())
    before = sockets() if port is None else set[int]()
    open_mesh(config, worker)
    opened = len(sockets() - before)
    barrier(tested, "counted", 60)  # no peer ends, and closes its sockets, before they are counted
    return opened


@pytest.mark.parametrize("by_library", [False, True])
def test_a_rank_connects_only_to_its_peers(tmp_path: Path, port: int, by_library: bool) -> None:
    """Else each of 1,024 ranks has 1,023 sockets for each group of all: more than it may."""
    of_four, of_six = (
        run_world(
            sockets_of_groups,
            tiny(pp=2, dp=dp, batch_size=12),
            tmp_path / str(dp),
            port if by_library else None,
        )[-1]
        for dp in (2, 3)
    )
    assert of_six == of_four


def by_way_of_rank_0(_: Config, worker: Worker) -> tuple[list[list[Any]], list[Any], int]:
    """What groups of 1, 2, ... ranks gather, what this rank is handed out in each, and the sockets
    that it has opened for the last."""
    open_mesh(_, worker)
    gathered, handed_out, opened = [], [], 0
    for size in range(1, worker.world_size + 1):
        group = dist.new_group([*range(size)])
        before = sockets()
        dist.barrier()  # no peer connects before it is counted
        if worker.rank < size:
            gathered.append(gather_objects(("of", worker.rank), group))
            handed_out.append(scatter_objects([f"to {rank}" for rank in range(size)], group))
            opened = len(sockets() - before)
        dist.barrier()  # no peer ends, and closes its sockets, before they are counted
    return gathered, handed_out, opened


def test_objects_are_gathered_and_broadcast_in_a_tree(tmp_path: Path) -> None:
    """A save's plans and files. torch's gather and scatter open sockets on rank 0 for each rank."""
    results = run_world(by_way_of_rank_0, tiny(pp=2, dp=3, batch_size=12), tmp_path)
    gathered, _, opened = results[0]
    assert gathered == [[("of", rank) for rank in range(size)] for size in range(1, 7)]
    for rank, (_, handed_out, _) in enumerate(results):
        assert handed_out == [f"to {rank}"] * (6 - rank)
    assert opened == 3, "to ranks 1, 2 and 4"
