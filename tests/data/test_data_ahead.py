"""The next batch is made while a step runs: the same batches, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.models import tiny
from support.waiting import until
from support.world import run_world
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.heartbeat import DATA_THREAD, innermost_frames
from titanlike.core.launch.worker import Worker
from titanlike.core.training.build import build
from titanlike.core.training.copy_ahead import copied_ahead, one_ahead
from titanlike.core.training.device_batches import batches_for, to_device


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == DATA_THREAD]


def test_batches_are_prefetched_in_order() -> None:
    taken, used = list[int](), list[int]()

    def source() -> Iterator[int]:
        for number in range(5):
            assert number <= len(used) + 1, "it takes no more than one ahead"
            taken.append(number)
            yield number

    for number in one_ahead(source()):
        used.append(number)
        until(lambda: len(taken) == min(5, len(used) + 1), 10)
    assert used == taken == [0, 1, 2, 3, 4]
    assert threads() == []


def test_an_error_comes_in_the_step_whose_batch_it_is() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("data.path=x: token id 9 is outside of the vocabulary")

    stream = one_ahead(source())
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ValueError, match="^data.path=x: token id 9"):
        next(stream)
    assert threads() == []


@pytest.mark.parametrize("end", ["close", "drop", "error"])
def test_an_abandoned_iterator_leaves_no_thread(end: str) -> None:
    stream = one_ahead(iter(range(10**9)))
    assert next(stream) == 0 and len(threads()) == 1
    if end == "close":
        stream.close()
    elif end == "drop":
        del stream
    else:
        with pytest.raises(ZeroDivisionError):
            for _ in stream:
                _ = 1 / 0
        del stream
    assert threads() == []


def test_a_hang_in_the_data_is_reported_where_it_is() -> None:
    """Not where training waits for the thread."""
    go_on, main = threading.Event(), threading.get_ident()

    def hangs() -> Iterator[int]:
        go_on.wait(20)
        yield 1

    def look() -> None:
        until(lambda: "in hangs" in innermost_frames(main)[0], 10)
        found.append(innermost_frames(main)[0])
        go_on.set()

    found: list[str] = []
    watcher = threading.Thread(target=look)
    watcher.start()
    assert next(one_ahead(hangs())) == 1
    watcher.join()
    assert "go_on.wait(20)" in found[0]


class RecordedStreams:
    """Stands for a device's streams; events are numbers of copies."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.threads: set[str] = set()

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.log.append("copy")
        self.threads.add(threading.current_thread().name)
        yield
        self.log.append("end of copy")

    def copied(self) -> int:
        return self.log.count("copy")

    def hand_over(self, event: int, values: list[torch.Tensor]) -> None:
        self.log.append((event, len(values)))


@pytest.mark.parametrize("in_thread", [True, False])
def test_each_batch_waits_for_the_event_of_its_own_copy(
    monkeypatch: pytest.MonkeyPatch, in_thread: bool
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())  # needs a GPU
    config, mesh = tiny(), SimpleNamespace(device=torch.device("cpu"))
    source = open_data(config).train
    streams = RecordedStreams()
    plain = batches(source, config, dp_rank=0)
    copied = copied_ahead(
        batches(source, config, dp_rank=0),
        mesh.device,
        partial(to_device, mesh=mesh, config=config),
        streams,
        in_thread=in_thread,
    )
    for number in range(1, 4):
        batch, expected = next(copied), next(plain)
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
        handed = [entry for entry in streams.log if isinstance(entry, tuple)]
        assert handed[-1] == (number, 2) and len(handed) == number
        where = streams.log.index(handed[-1])
        assert streams.log[:where].count("end of copy") >= number
    assert streams.threads == {DATA_THREAD if in_thread else "MainThread"}


def test_a_rank_copies_only_the_fields_its_stages_read(tmp_path: Path) -> None:
    found = run_world(_fields, tiny(pp=3, layers=3, batch_size=12), tmp_path)
    assert found == [{"inputs"}, set(), {"targets"}]


def _fields(config: Config, worker: Worker) -> set[str]:
    """Fields whose values a rank gets; the step has the others' shapes, too."""
    data, mesh = open_data(config), open_mesh(config, worker)
    run = build(config, mesh, data)
    batch = next(batches_for(run, config, batches(data.train, config, dp_rank=mesh.dp_rank)))
    assert {tuple(value.shape) for value in batch.values()} == {(12, 16)}
    moved = to_device(batch, mesh, config)
    _, count = run.pipeline.train(moved)
    assert count.item() == 12 * 16
    return {name for name, value in moved.items() if not value.is_meta}
