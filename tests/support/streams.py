"""Streams as users have them: the same samples in each kind, which of them a reader reads."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from titanlike.data.sources import Data

SAMPLES = 400
Sample = dict[str, torch.Tensor]


def sample(n: int, seq_len: int) -> Sample:
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(0, 64, (seq_len + 1,), generator=generator)
    ids[0] = n % 64
    return {"inputs": ids[:-1], "targets": ids[1:]}


def _data(train: Any) -> Data:
    return Data(train, None, vocab_size=64, description="a stream")


class Dividing(IterableDataset):
    """Divides itself as torch's documentation does."""

    def __init__(self, seq_len: int, samples: int) -> None:
        self._seq_len, self._samples = seq_len, samples

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (sample(n, self._seq_len) for n in range(first, self._samples, step))


class Stateful:
    """An iterable with a state of its own."""

    def __init__(self, seq_len: int, samples: int, reader: int, readers: int) -> None:
        self._args, self._next = (seq_len, samples, reader, readers), 0

    def __iter__(self) -> Iterator[Sample]:
        seq_len, samples, reader, readers = self._args
        while (n := reader + self._next * readers) < samples:
            self._next += 1
            yield sample(n, seq_len)
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class _Numbered:
    """A map-style dataset of a reader's samples."""

    def __init__(self, seq_len: int, samples: int, reader: int, readers: int) -> None:
        self._args = (seq_len, samples, reader, readers)

    def __len__(self) -> int:
        _, samples, reader, readers = self._args
        return len(range(reader, samples, readers))

    def __getitem__(self, i: int) -> Sample:
        seq_len, _, reader, readers = self._args
        return sample(reader + i * readers, seq_len)


def dividing(seq_len: int, samples: int = SAMPLES) -> Data:
    return _data(Dividing(seq_len, samples))


def generator(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    return _data(sample(n, seq_len) for n in range(reader, samples, readers))


def stateful(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    return _data(Stateful(seq_len, samples, reader, readers))


def stateful_loader(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    from torchdata.stateful_dataloader import StatefulDataLoader

    mine: Any = _Numbered(seq_len, samples, reader, readers)
    return _data(StatefulDataLoader(mine, batch_size=None))


def nodes(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    from torchdata.nodes import IterableWrapper as Wrapped
    from torchdata.nodes import Mapper, Prefetcher

    numbers = Wrapped(range(reader, samples, readers))
    return _data(Prefetcher(Mapper(numbers, lambda n: sample(n, seq_len)), prefetch_factor=3))


def hugging_face(seq_len: int, samples: int = SAMPLES) -> Data:
    import datasets

    rows = {
        key: [sample(n, seq_len)[key].tolist() for n in range(samples)]
        for key in ("inputs", "targets")
    }
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=8)
    return _data(stream.with_format("torch"))


# --- wrong ones ---


def copies(seq_len: int) -> Data:
    return _data(Stateful(seq_len, SAMPLES, 0, 1))


def alone(seq_len: int) -> Any:
    return Dividing(seq_len, SAMPLES)


def other_shape(seq_len: int, reader: int, readers: int) -> Data:
    lengths = (seq_len - (n == reader + 2 * readers) for n in range(reader, SAMPLES, readers))
    return _data(sample(n, length) for n, length in enumerate(lengths, reader))


class _Unsaved(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": open}


def unsaved(seq_len: int, reader: int, readers: int) -> Data:
    return _data(_Unsaved(seq_len, SAMPLES, reader, readers))


# --- corpora ---


def write_corpus(kind: str, folder: Path) -> dict[str, Any]:
    """Write some 400 texts in a format; returns the keys of data=stream that read it."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    draw = random.Random(kind)
    texts = [
        f"{n} " + " ".join(draw.choices("abcdefgh", k=draw.randint(4, 60))) for n in range(400)
    ]
    rows = [json.dumps({"text": text}) for text in texts]
    folder.mkdir(exist_ok=True)
    if kind == "text":
        (folder / "a.txt").write_text("\n".join(texts))
    elif kind in ("jsonl", "documents"):
        for name, part in (("a", rows[:100]), ("b", rows[100:])):
            (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    elif kind == "compressed":
        with gzip.open(folder / "a.jsonl.gz", "wt") as file:
            file.write("\n".join(rows))
        return {"path": str(folder / "a.jsonl.gz")}
    elif kind == "parquet":
        for n in range(2):
            table = pyarrow.table({"text": texts[n::2]})
            parquet.write_table(table, folder / f"{n}.parquet")
    elif kind == "saved":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder))
    elif kind == "tars":
        for shard in range(4):
            with tarfile.open(folder / f"{shard}.tar", "w") as tar:
                for n, text in enumerate(texts[shard::4]):
                    info = tarfile.TarInfo(f"{shard}{n:04}.txt")
                    info.size = len(text)
                    tar.addfile(info, io.BytesIO(text.encode()))
        return {"path": str(folder), "text_key": "txt"}
    elif kind == "mixture":
        parts = [write_corpus(name, folder / name)["path"] for name in ("jsonl", "text")]
        ids = torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(0))
        ids.numpy().astype("<u2").tofile(folder / "ids.bin")
        weights: list[Any] = [[[0, 0.9], [10, 0.1]], 0.4, 0.2]
        named = zip("abc", [*parts, str(folder / "ids.bin")], weights, strict=True)
        return {"sources": {n: {"path": path, "weight": weight} for n, path, weight in named}}
    return {"path": str(folder), "documents": kind == "documents"}


class _Hanging(Stateful):
    def __iter__(self) -> Iterator[Sample]:
        for n, item in enumerate(super().__iter__()):
            if n == 5:
                time.sleep(1000)
            yield item


def hanging(seq_len: int, reader: int, readers: int) -> Data:
    return _data(_Hanging(seq_len, SAMPLES, reader, readers))
