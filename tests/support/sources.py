"""Every kind of source, with samples whose documents can be told apart.

`of_source(kind, folder)` is a config that reads a kind. Of the streams, TEXT are formats that
data=stream reads and OWN functions of this file; MAPPED are read by index.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from support.models import tiny
from titanlike.core.config.groups.data import (
    ChatData,
    HFData,
    MixtureData,
    StreamData,
    TextData,
    TokenData,
)
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.data.sources import Data, Stream, VariableLength

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


class Reshuffled(Stateful):
    """In another order of all samples in each epoch, of which a reader has every readers-th."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        seq_len, samples, reader, readers = self._args
        order = random.Random(self.epoch).sample(range(samples), samples)[reader::readers]
        while self._next < len(order):
            self._next += 1
            yield sample(order[self._next - 1], seq_len)
        self._next = 0


class Noisy(Reshuffled):
    """Whose samples draw as they are read."""

    def __iter__(self) -> Iterator[Sample]:
        for each in super().__iter__():
            yield each | {"inputs": torch.where(torch.rand(1) < 0.5, 0, each["inputs"])}


class Drawn(IterableDataset):
    """Draws from the global generators: as it begins the order of all samples, of which a reader
    has every readers-th, then which of 8 of them is the next."""

    def __init__(self, seq_len: int, samples: int, reader: int, readers: int) -> None:
        self._args = (seq_len, samples, reader, readers)

    def __iter__(self) -> Iterator[Sample]:
        seq_len, samples, reader, readers = self._args
        order = torch.randperm(samples).tolist()[reader::readers]
        for last in range(8, len(order) + 8):
            waiting = order[last - 8 : last]
            chosen = random.randrange(len(waiting))
            order[last - 8 : last] = [waiting.pop(chosen), *waiting]
            yield sample(order[last - 8], seq_len)


class Once(Stateful):
    """An iterator, which has one end, and goes on from where a state has put it."""

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        seq_len, samples, reader, readers = self._args
        if (n := reader + self._next * readers) >= samples:
            raise StopIteration
        self._next += 1
        return sample(n, seq_len)


class Numbered:
    """A map-style dataset of a reader's samples."""

    def __init__(self, seq_len: int, samples: int, reader: int, readers: int) -> None:
        self._args = (seq_len, samples, reader, readers)

    def __len__(self) -> int:
        _, samples, reader, readers = self._args
        return len(range(reader, samples, readers))

    def __getitem__(self, i: int) -> Sample:
        seq_len, _, reader, readers = self._args
        return sample(reader + i * readers, seq_len)


class Shortened(Numbered):
    def __getitem__(self, i: int) -> Sample:
        kept = 8 + i % (self._args[0] - 7)
        return {name: ids[:kept] for name, ids in super().__getitem__(i).items()}


class Rare(Numbered):
    """The id 63 is in the samples 3, 19, 35 ... alone."""

    def __getitem__(self, i: int) -> Sample:
        ids = super().__getitem__(i)
        return ids if i % 16 == 3 else {name: its.clamp(max=59) for name, its in ids.items()}


def dividing(seq_len: int, samples: int = SAMPLES) -> Data:
    return _data(Dividing(seq_len, samples))


def generator(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    return _data(sample(n, seq_len) for n in range(reader, samples, readers))


def stateful(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    return _data(Stateful(seq_len, samples, reader, readers))


def uneven(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    """The first half of the readers have twice as many."""
    return stateful(seq_len, reader, readers, samples if 2 * reader >= readers else 2 * samples)


def reshuffled(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    return _data(Reshuffled(seq_len, samples, reader, readers))


def noisy(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    return _data(Noisy(seq_len, samples, reader, readers))


def drawn(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    return _data(Drawn(seq_len, samples, reader, readers))


def once(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    return _data(Once(seq_len, samples, reader, readers))


def stateful_loader(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    from torchdata.stateful_dataloader import StatefulDataLoader

    mine: Any = Numbered(seq_len, samples, reader, readers)
    return _data(StatefulDataLoader(mine, batch_size=None))


def nodes(seq_len: int, reader: int, readers: int, samples: int = SAMPLES) -> Data:
    from torchdata.nodes import IterableWrapper as Wrapped
    from torchdata.nodes import Mapper, Prefetcher

    numbers = Wrapped(range(reader, samples, readers))
    return _data(Prefetcher(Mapper(numbers, lambda n: sample(n, seq_len)), prefetch_factor=3))


def map_style(seq_len: int, samples: int = SAMPLES) -> Any:
    return Numbered(seq_len, samples, 0, 1)


def rare(seq_len: int, samples: int = SAMPLES) -> Any:
    return Rare(seq_len, samples, 0, 1)


def short_samples(seq_len: int) -> Data:
    return Data(*(Numbered(seq_len // 2, 40, 0, 1) for _ in range(2)), 64, "half of seq_len")


def short_stream(seq_len: int, reader: int, readers: int) -> Data:
    return _data(Stateful(seq_len // 2, 400, reader, readers))


def lengths_differ(seq_len: int, samples: int = SAMPLES) -> Data:
    train, held = (Shortened(seq_len, b, a, 1) for a, b in ((0, samples), (samples, samples + 40)))
    return Data(train, held, 64, "of 8 to seq_len tokens", variable=VariableLength(4))


def hugging_face(seq_len: int, samples: int = SAMPLES) -> Data:
    import datasets

    rows = {
        key: [sample(n, seq_len)[key].tolist() for n in range(samples)]
        for key in ("inputs", "targets")
    }
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=8)
    return _data(stream.with_format("torch"))


class Embedded(torch.nn.Module):
    """A model of one's own with an embedding."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 8)
        self.head = torch.nn.Linear(8, vocab_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(inputs))


# --- wrong ones ---


def copies(seq_len: int) -> Data:
    return _data(Stateful(seq_len, SAMPLES, 0, 1))


def drawn_copies(seq_len: int) -> Data:
    return _data(Drawn(seq_len, SAMPLES, 0, 1))


def alone(seq_len: int) -> Any:
    return Dividing(seq_len, SAMPLES)


def other_shape(seq_len: int, reader: int, readers: int) -> Data:
    lengths = (seq_len - (n == reader + 2 * readers) for n in range(reader, SAMPLES, readers))
    return _data(sample(n, length) for n, length in enumerate(lengths, reader))


class _Unsaved(Stateful):
    def __init__(self, first: int, *args: int) -> None:
        super().__init__(*args)
        self._first = first

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "lock": open if self._next >= self._first else None}


def unsaved(seq_len: int, reader: int, readers: int) -> Data:
    return _data(_Unsaved(0, seq_len, SAMPLES, reader, readers))


def unsaved_later(seq_len: int, reader: int, readers: int) -> Data:
    return _data(_Unsaved(12, seq_len, SAMPLES, reader, readers))


# --- corpora ---


def texts(kind: str, first: int = 0) -> list[str]:
    """400 documents: wherever one is cut, a piece has its number."""
    draw = random.Random(kind)
    return [
        "".join(f"<{n:04}>{draw.choice('abcdefgh')}" for _ in range(draw.randint(2, 12)))
        for n in range(first, first + 400)
    ]


def documents_in(ids: torch.Tensor) -> set[int]:
    """The documents of which there is a piece in a sample of bytes."""
    text = "".join(chr(i) if i < 256 else " " for i in ids.flatten().tolist())
    return {int(number) for number in re.findall(r"<(\d{4})>", text)}


def write_tokens(kind: str, path: Path, first: int = 0) -> Path:
    ids = [i for text in texts(kind, first) for i in (256, *text.encode())]
    np.array(ids, "<u2").tofile(path)
    return path


def write_corpus(kind: str, folder: Path, first: int = 0) -> dict[str, Any]:
    """Write texts in a format; returns the keys of data=stream that read it. first: the number of
    the first one."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    written = texts(kind, first)
    rows = [json.dumps({"text": text}) for text in written]
    folder.mkdir(exist_ok=True)
    if kind == "text":
        (folder / "a.txt").write_text("\n".join(written))
    elif kind in ("jsonl", "documents"):
        for name, part in (("a", rows[:100]), ("b", rows[100:])):
            (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    elif kind == "compressed":
        with gzip.open(folder / "a.jsonl.gz", "wt") as file:
            file.write("\n".join(rows))
        return {"path": str(folder / "a.jsonl.gz")}
    elif kind == "parquet":
        for n in range(2):
            table = pyarrow.table({"text": written[n::2]})
            parquet.write_table(table, folder / f"{n}.parquet")
    elif kind == "saved":
        datasets.Dataset.from_dict({"text": written}).save_to_disk(str(folder))
    elif kind == "tars":
        for shard in range(4):
            with tarfile.open(folder / f"{shard}.tar", "w") as tar:
                for n, text in enumerate(written[shard::4]):
                    info = tarfile.TarInfo(f"{shard}{n:04}.txt")
                    info.size = len(text)
                    tar.addfile(info, io.BytesIO(text.encode()))
        return {"path": str(folder), "text_key": "txt"}
    elif kind == "token_files":
        return {"path": str(write_tokens(kind, folder / "ids.bin", first))}
    elif kind == "mixture":
        parts = [
            write_corpus(name, folder / name, first)["path"]
            for name, first in (("jsonl", 1000), ("text", 2000))
        ]
        write_tokens(kind, folder / "ids.bin", 3000)
        weights: list[Any] = [[[0, 0.9], [10, 0.1]], 0.4, 0.2]
        named = zip("abc", [*parts, str(folder / "ids.bin")], weights, strict=True)
        return {"sources": {n: {"path": path, "weight": weight} for n, path, weight in named}}
    return {"path": str(folder), "documents": kind == "documents"}


def mapped_section(kind: str, folder: Path) -> Any:
    """Write the data of a source that is read by index; returns its section of the config."""
    cache, share = {"cache": str(folder / "cache")}, {"validation_fraction": 0.1}
    folder.mkdir(exist_ok=True)
    match kind:
        case "data=text":
            return TextData(**write_corpus("documents", folder / "in"), **cache, **share)
        case "data=hf":
            path = write_corpus("saved", folder / "in")["path"]
            return HFData(path=path, **cache, **share)
        case "data=tokens":
            path = str(write_tokens(kind, folder / "ids.bin"))
            return TokenData(path=path, vocab_size=257, boundary=256, **share)
        case "data=chat":
            turns = [[("user", text[:6]), ("assistant", text)] for text in texts(kind)]
            fields = ("role", "content")
            rows = [{"messages": [dict(zip(fields, m, strict=True)) for m in t]} for t in turns]
            (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            return ChatData(path=str(folder / "in.jsonl"), **cache, **share)
        case "data=mixture":
            sources = write_corpus("mixture", folder)["sources"]
            sources["c"]["path"] = write_corpus("saved", folder / "c", 3000)["path"]
            return MixtureData(sources=sources, **cache, **share)
    return Custom(f"{__name__}.{kind}", share)


OWN = ["dividing", "generator", "stateful", "reshuffled", "stateful_loader", "nodes"]
OWN += ["hugging_face", "drawn"]
TEXT = ["text", "jsonl", "compressed", "parquet", "saved", "tars", "token_files", "mixture"]
TEXT += ["documents"]
STREAMS = [*OWN, *TEXT]
MAPPED = ["data=text", "data=tokens", "data=hf", "data=chat", "data=mixture"]
MAPPED += ["map_style", "lengths_differ"]
KINDS = [*STREAMS, *MAPPED]


def of_source(kind: str, folder: Path, **changes: Any) -> Config:
    """Layers 3, 16 sequences of 16, 8 readers of a stream, validation of 1 batch. kind: one of
    KINDS, or another function of this file. data: keys of its section."""
    workers, keys = changes.pop("workers", 0), changes.pop("data", {})
    if kind in MAPPED:
        data = mapped_section(kind, folder / kind)
        given = {**keys, **({"workers": workers} if workers else {})}
        more = {"args": {**data.args, **given}} if isinstance(data, Custom) else given
        data = replace(data, **more)
    elif kind in TEXT:
        corpus = write_corpus(kind, folder / f"corpus-{kind}")
        keys = {"shuffle_buffer": 64, "readers": 8, **corpus, **keys}
        data = StreamData(workers=workers, **keys)
    else:
        data = Custom(f"{__name__}.{kind}", {"workers": workers, "readers": 8, **keys})
    changes.setdefault("validation", Validation(every=3, batches=1))
    if kind == "data=chat":
        changes.setdefault("seq_len", 128)  # a conversation is never cut
    return replace(tiny(layers=3, steps=6), data=data, **changes)


def rows_of(source: Any, config: Config, dp_rank: int, start: int, count: int) -> list[bytes]:
    """The samples of a dp rank's batches, in order."""
    stream = batches(source, config, dp_rank=dp_rank, start_step=start)
    found = []
    for _ in range(count):
        batch = next(stream)
        rows = torch.cat([batch[name].flatten(1) for name in sorted(batch)], dim=1)
        found += [row.numpy().tobytes() for row in rows]
    return found


def by_step(config: Config, saved: list[dict[str, Any]], start: int, steps: int) -> list[Any]:
    """What all dp ranks of a layout read in each step after `start`, and what each would save at
    the end; saved: the entries of a checkpoint at `start`."""
    entries = {name: entry for of_rank in saved for name, entry in of_rank.items()}
    ranks, after = [], []
    for dp_rank in range(config.dp):
        source: Any = open_data(config).train
        if isinstance(source, Stream):
            shapes = {name: entry.shape for name, entry in entries.items()}
            wanted = source.wanted(shapes, config, dp_rank)
            for name in wanted:
                wanted[name].copy_(entries[name])
            source.restore(wanted)
        ranks.append(rows_of(source, config, dp_rank, start, steps))
        after.append(source.saved(start + steps) if isinstance(source, Stream) else {})
    local = config.batch_size // config.dp
    steps_of = [
        [r for rank in ranks for r in rank[n * local : (n + 1) * local]] for n in range(steps)
    ]
    return [steps_of, after]
