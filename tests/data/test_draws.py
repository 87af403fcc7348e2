"""Samples that draw random numbers draw the same on every rank, in every layout, with any loader
processes, and after a resume; data that differ by rank, process or reading are refused by name."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, Subset, get_worker_info, random_split
from torchdata.nodes import IterableWrapper, Mapper

from support.cells import cells
from support.models import tiny
from support.runs import trained
from support.world import RankError, run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError
from titanlike.core.data.loader import batches, validation_batches
from titanlike.core.data.registry import open_data
from titanlike.core.data.sources import Data, VariableLength
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.training.loop import train
from titanlike.core.training.same_data import refuse_other_data
from titanlike.proof.verification import compare_with_one_process

COUNT = 40  # samples of an epoch


def sample(n: int, seq_len: int, drawn: int) -> dict[str, torch.Tensor]:
    ids = (torch.arange(seq_len + 1) * 3 + n + drawn) % 64
    return {"inputs": ids[:-1], "targets": ids[1:]}


def drawn_by_all() -> int:
    return int(torch.randint(0, 64, ())) + np.random.randint(64) + random.randrange(64)


class Mapped:
    """A map-style dataset. draw: called for each sample with its index."""

    def __init__(self, seq_len: int, draw: Callable[[int], int], count: int = COUNT) -> None:
        self._args, self._count = (seq_len, draw), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        seq_len, draw = self._args
        return sample(i, seq_len, draw(i))


class Streamed(IterableDataset[Any]):
    """Divided by get_worker_info, or by reader and readers."""

    def __init__(self, seq_len: int, draw: Callable[[int], int], part: Any = None) -> None:
        self._args = seq_len, draw, part

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        seq_len, draw, part = self._args
        info: Any = get_worker_info()
        reader, readers = (info.id, info.num_workers) if part is None else part
        for n in range(reader, COUNT, readers):
            yield sample(n, seq_len, draw(n))


class Counted(Streamed):
    """With a state. late: counted behind the yield; buffer: of samples, not in the state."""

    late, buffer, at = False, 1, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        seq_len, draw, (reader, readers) = self._args
        waiting: list[int] = []
        while (n := reader + self.at * readers) < COUNT:
            self.at += not self.late
            waiting.append(n)
            if len(waiting) >= self.buffer:
                yield sample(waiting.pop(random.randrange(len(waiting))), seq_len, draw(n))
            self.at += self.late
        yield from (sample(n, seq_len, draw(n)) for n in waiting)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _any(_: int) -> int:
    return drawn_by_all()


def mapped(seq_len: int) -> Data:
    return Data(Mapped(seq_len, _any), Mapped(seq_len, _any, 16), 64, "")


class Reusing:
    """Has each sample in the memory of the one before."""

    def __init__(self, seq_len: int) -> None:
        self._memory = torch.zeros(seq_len, dtype=torch.int64)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._memory.copy_(sample(i, len(self._memory), 0)["inputs"])
        return self._memory, self._memory


def nodes_reusing(seq_len: int, reader: int, readers: int) -> Any:
    return Mapper(IterableWrapper(range(reader, COUNT, readers)), Reusing(seq_len).__getitem__)


def lengths(seq_len: int) -> Data:
    return replace(mapped(seq_len), variable=VariableLength(bucket=1, lengths=[seq_len] * COUNT))


def shuffled_at_opening(seq_len: int) -> Any:
    every: Any = Subset(Mapped(seq_len, int, COUNT + 16), range(COUNT + 16))
    return random_split(every, [COUNT, 16])


def dividing(seq_len: int) -> Any:
    return Streamed(seq_len, _any)


def generator(seq_len: int, reader: int, readers: int) -> Any:
    return iter(Streamed(seq_len, _any, (reader, readers)))


def stateful(seq_len: int, reader: int, readers: int) -> Data:
    stream: Any = Counted(seq_len, _any, (reader, readers))
    return Data(stream, None, 64, "")  # type: ignore[arg-type]


def counted_late(seq_len: int, reader: int, readers: int) -> Any:
    stream = Counted(seq_len, _any, (reader, readers))
    stream.late = True
    return stream


def own_buffer(seq_len: int, reader: int, readers: int) -> Any:
    stream = Counted(seq_len, _any, (reader, readers))
    stream.buffer = 4
    return stream


def nodes(seq_len: int, reader: int, readers: int) -> Any:
    return Mapper(
        IterableWrapper(range(reader, COUNT, readers)), lambda n: sample(n, seq_len, _any(n))
    )


def hugging_face(seq_len: int) -> Any:
    """Shuffled in a buffer, which its state does not have."""
    import datasets

    rows = datasets.Dataset.from_dict({"n": [*range(COUNT)]}).to_iterable_dataset(num_shards=4)
    mapped = rows.shuffle(seed=0, buffer_size=8).map(lambda row: sample(row["n"], seq_len, _any(0)))
    return mapped.remove_columns("n").with_format("torch")


class Wrapped:
    """A dataset of `datasets` with its state, in a class of one's own, as many have it."""

    def __init__(self, data: Any) -> None:
        self._data, self.load_state_dict = data, data.load_state_dict
        self.state_dict = data.state_dict

    def __iter__(self) -> Iterator[Any]:
        yield from self._data


def wrapped(seq_len: int, reader: int, readers: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    return Wrapped(split_dataset_by_node(hugging_face(seq_len), reader, readers))


STREAMS = ["dividing", "generator", "stateful", "counted_late", "own_buffer", "nodes", "wrapped"]
DEFAULT = ["mapped", "shuffled_at_opening", "own_buffer", "wrapped"]
KINDS = ["mapped", "lengths", "shuffled_at_opening", *STREAMS, "hugging_face"]


def of(kind: str, workers: int = 0, **changes: Any) -> Config:
    data = Custom(f"{__name__}.{kind}", {"workers": workers})
    if kind in STREAMS or kind == "hugging_face":
        data.args["readers"] = changes.pop("readers", 4)
    changes.setdefault("validation", Validation(every=0))
    return replace(tiny(layers=2, steps=4, batch_size=8), data=data, **changes)


def read(source: Any, config: Config, start: int, steps: int, dp_rank: int = 0) -> list[Any]:
    stream = batches(source, config, dp_rank=dp_rank, start_step=start)
    return [batch["inputs"] for batch in islice(stream, steps)]


@pytest.mark.parametrize("kind", cells({k: k for k in DEFAULT}, {k: k for k in KINDS}))
def test_a_sample_draws_the_same_wherever_it_is_read(kind: str) -> None:
    """In three epochs: on other ranks, by loader processes, after a resume; others draw as ever."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    own = drawn_by_all()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    config, steps = of(kind), 3 * COUNT // 8
    source: Any = open_data(config).train
    expected = read(source, config, 0, steps)
    assert drawn_by_all() == own
    epochs = [
        {tuple(row.tolist()) for batch in expected[n : n + 5] for row in batch} for n in (0, 5)
    ]
    assert kind == "shuffled_at_opening" or len(epochs[1] - epochs[0]) > 5, "an epoch draws anew"
    for workers, dp in ((0, 2), (1, 1), (2, 2)):
        there = of(kind, workers, dp=dp)
        parts = [read(open_data(there).train, there, 0, steps, rank) for rank in range(dp)]
        for batch, *found in zip(expected, *parts, strict=True):
            assert torch.equal(torch.cat(found), batch), (workers, dp)
    for start, at in ((3, 3), (7, 7), (9, 8)):
        again: Any = open_data(config).train
        if hasattr(source, "saved"):
            before: Any = open_data(config).train
            read(before, config, 0, at)
            saved = before.saved(at)
            wanted = again.wanted({n: x.shape for n, x in saved.items()}, config, 0)
            again.restore({name: saved[name] for name in wanted})
        for batch, found in zip(expected[start:], read(again, config, start, 5), strict=False):
            assert torch.equal(found, batch), f"resumed at {start}"


@pytest.mark.parametrize("kind", ["Reusing", "nodes_reusing"])
def test_samples_in_the_memory_of_those_before_are_all_read(kind: str) -> None:
    config = of(kind)
    rows = torch.cat(read(open_data(config).train, config, 0, 4))
    assert torch.equal(rows[:, 1:], (rows[:, :-1] + 3) % 64)
    assert rows[:, 0].unique().numel() == len(rows) == 32


def test_validation_draws_the_same_each_time() -> None:
    config = of("mapped", validation=Validation(every=1))
    first, second = (
        [b["inputs"] for b in validation_batches(source, config, dp_rank=0, batches=0)]
        for source in [open_data(config).validation] * 2
    )
    assert all(map(torch.equal, first, second)) and len(first) == 2


@pytest.mark.parametrize(
    "layout", cells({"pp=2": {"pp": 2}}, {"dp=2 workers=2": {"dp": 2, "workers": 2}})
)
@pytest.mark.parametrize("kind", cells({"mapped": "mapped"}, {"stateful": "stateful"}))
def test_layouts_train_on_what_one_process_draws(
    kind: str, layout: dict[str, int], tmp_path: Path
) -> None:
    losses = []
    for name, config in (("alone", of(kind)), ("layout", of(kind, **layout))):
        rows = trained(replace(config, run_dir=str(tmp_path / name)))
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], abs=2e-5) and len(losses[0]) == 4


# --- refused -------------------------------------------------------------------------------------


def kept_generator(seq_len: int) -> Any:
    numbers = np.random.default_rng(0)
    return Mapped(seq_len, lambda _: int(numbers.integers(64)))


def by_worker(seq_len: int) -> Any:
    return Mapped(seq_len, lambda _: (i := get_worker_info()) and i.id + 1 or 0)


def streamed_by_the_system(seq_len: int, reader: int, readers: int) -> Any:
    draw = lambda _: random.SystemRandom().randrange(1 << 30)  # noqa: E731
    return Streamed(seq_len, draw, (reader, readers))


def two_streams(seq_len: int) -> Any:
    return Data(Streamed(seq_len, _any), Streamed(seq_len, _any), 64, "")  # type: ignore[arg-type]


def with_a_length(seq_len: int) -> Any:
    sized: Any = type("Sized", (Streamed,), {"__len__": lambda _: COUNT})
    return Data(Mapped(seq_len, _any), sized(seq_len, _any), 64, "")


def data_of_parts(seq_len: int) -> Any:
    return Data(parts(seq_len), Mapped(seq_len, _any), 64, "")


def parts(seq_len: int) -> Any:
    return {"train": Mapped(seq_len, _any), "test": Mapped(seq_len, _any)}


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("kept_generator", "training sample 0 differs each time it is read"),
        ("streamed_by_the_system", "of reader 0 differs each time it is read"),
        ("by_worker", "training sample 0 depends on get_worker_info()"),
        ("two_streams", "its validation part is a Streamed, which is not read by [i]"),
        ("with_a_length", "its validation part is a Sized, which is not read by [i]"),
        ("data_of_parts", "its training part is a dict, which is not read by [i]"),
        ("parts", "the function returned dict of train, test"),
    ],
)
def test_data_that_cannot_be_read_again_are_refused_by_name(kind: str, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        open_data(of(kind))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def by_environment(seq_len: int) -> Any:
    rank, size = (int(os.environ.get(name, n)) for n, name in enumerate(("RANK", "WORLD_SIZE")))
    return Mapped(seq_len, lambda i: i * size + rank)


def by_group(seq_len: int) -> Any:
    return Mapped(seq_len, lambda i: dist.get_rank() if dist.is_initialized() else 0)


def streamed_by_group(seq_len: int, reader: int, readers: int) -> Any:
    draw = lambda n: dist.get_rank() if dist.is_initialized() else 0  # noqa: E731
    return Streamed(seq_len, draw, (reader, readers))


def by_process(seq_len: int) -> Any:
    """As names in a set are in another order in each process."""
    order = sorted(range(COUNT), key=lambda n: hash((os.getpid(), n)))
    return Data(Mapped(seq_len, order.__getitem__), Mapped(seq_len, int), 64, "")


RANKS = "rank 1 reads other data than rank 0"
REFUSED = {
    "by_environment": "they divide themselves by rank",
    "by_group": "they divide themselves by rank",
    "by_process": "depends on the process",
}


def compared(config: Config, worker: Worker) -> str:
    os.environ |= {"RANK": str(worker.rank), "WORLD_SIZE": str(worker.world_size)}
    data = open_data(config)
    mesh = open_mesh(config, worker)
    try:
        refuse_other_data(config, data, mesh, worker)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "case",
    cells(
        {"by_group pp=2": ("by_group", {"pp": 2}), "by_process": ("by_process", {"dp": 2})},
        {
            "by_environment": ("by_environment", {"dp": 2}),
            "streamed_by_group": ("streamed_by_group", {"dp": 2}),
            "mapped": ("mapped", {"pp": 2, "dp": 2}),
            "stateful": ("stateful", {"pp": 2, "dp": 2}),
        },
    ),
)
def test_ranks_that_read_other_data_are_refused_with_the_cause(
    case: tuple[str, dict[str, int]], tmp_path: Path
) -> None:
    kind, layout = case
    found = run_world(compared, of(kind, **layout), tmp_path)
    assert len({*found}) == 1, "all ranks end"
    expected = REFUSED.get(kind.removeprefix("streamed_"), "")
    assert expected in found[0] and bool(found[0]) == bool(expected)
    assert not expected or RANKS in found[0] and "\n" not in found[0]


@pytest.mark.parametrize("begin", [train, compare_with_one_process])
def test_a_start_and_a_proof_refuse_ranks_that_read_other_data(begin: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=RANKS):
        run_world(begin, of("by_process", dp=2), tmp_path)
