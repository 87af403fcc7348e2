"""The nodes (`torchdata.nodes`) of which one reader of a stream is composed. Each has a state that
can be saved.

    Rows             texts of files: the reader's share, in an order that differs by epoch
    DatasetRows      texts of a streamed Hugging Face dataset
    Repeated         the epochs of a source, one after the other
    HeldOut          a source without the items held out for validation
    Packed           texts as ids, cut into samples [seq_len + 1]
    Shuffled         a buffer from which a random item is taken
    Mixed            samples of several sources by weights

A state has numbers, texts, tensors, lists and dicts alone, so that it is loaded without pickle.
Source of the interface: https://meta-pytorch.org/data/main/what_is_torchdata_nodes.html
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torchdata.nodes import BaseNode, IterableWrapper

from titanlike.core.data.kinds import DataError
from titanlike.core.data.order import shuffled_index, splitmix64
from titanlike.core.torch_private.loader_worker import read_as_part
from titanlike.formats.hf_dataset import row_text
from titanlike.formats.mixture import Points, weight_at
from titanlike.formats.tables import TABLES
from titanlike.formats.text import (
    BadRow,
    documents,
    is_compressed,
    kind_of_file,
    opened,
    parsed,
    text_of,
)
from titanlike.formats.tokenizer import Tokenizer

State = dict[str, Any]
_EMPTY = 64
_PIECE = 1 << 18  # bytes of a text file per call of the tokenizer
_GROUP = 1 << 18  # characters of rows per call of the tokenizer


class Part(NamedTuple):
    """A file, or the lines that begin within bytes start..stop of it."""

    path: str
    start: int
    stop: int
    whole: bool


class Row(NamedTuple):
    text: str
    begins: bool = True  # a new document; False = it continues the previous row's


def divided(sizes: Sequence[int], readers: int, seed: int, epoch: int) -> list[list[int]]:
    """Assign the parts of an epoch to readers: part numbers by reader, in random order, balanced by
    bytes. With fewer parts than readers, several readers share a part."""
    order = shuffled_index(np.arange(len(sizes)) + epoch * len(sizes), len(sizes), seed)
    if len(sizes) < readers:
        return [[int(order[r % len(sizes)])] for r in range(readers)]
    loads, given = [0] * readers, [list[int]() for _ in range(readers)]
    for part in sorted(order.tolist(), key=lambda part: -sizes[part]):
        least = min(range(readers), key=lambda r: (loads[r], r))
        loads[least] += sizes[part]
        given[least].append(part)
    place = {part: index for index, part in enumerate(order.tolist())}
    return [sorted(parts, key=place.__getitem__) for parts in given]


class Rows(BaseNode[Row]):
    """The texts of a reader's parts of an epoch."""

    epoch = 0

    def __init__(
        self, parts: Sequence[Part], text_key: str, reader: int, readers: int, seed: int
    ) -> None:
        super().__init__()
        self._parts, self._key, self._seed = parts, text_key, seed
        self._reader, self._readers = reader, readers

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"part": 0, "at": 0, "count": 0}
        self._number, self._at, self._count = state["part"], state["at"], state["count"]
        sizes = [part.stop - part.start for part in self._parts]
        self._mine = divided(sizes, self._readers, self._seed, self.epoch)[self._reader]
        # readers that share a part read every sharers-th text, from the turn-th one
        self._turn, self._sharers, count = 0, 1, len(self._parts)
        if count < self._readers:
            self._turn, first = divmod(self._reader, count)
            self._sharers = -(-(self._readers - first) // count)
        self._open()

    def _open(self) -> None:
        self._rows: Iterator[tuple[Row, int]] = iter(())
        if self._number >= len(self._mine):
            return
        part = self._parts[self._mine[self._number]]
        if part.whole:
            texts = enumerate(documents([Path(part.path)], self._key), 1)
            self._rows = ((Row(text), n) for n, text in islice(texts, self._at, None))
        else:
            read = _lines if kind_of_file(Path(part.path)) == ".jsonl" else _pieces
            self._rows = read(part, self._at, self._key)

    def next(self) -> Row:
        while True:
            row_and_position = next(self._rows, None)
            if row_and_position is not None:
                row, self._at = row_and_position
                self._count += 1
                if (self._count - 1) % self._sharers == self._turn:
                    return row._replace(begins=row.begins or self._sharers > 1)
            elif self._number >= len(self._mine):
                raise StopIteration
            else:
                self._number, self._at, self._count = self._number + 1, 0, 0
                self._open()

    def get_state(self) -> State:
        return {"part": self._number, "at": self._at, "count": self._count}


def _first_line(file: Any, part: Part) -> int:
    """Seek to the first line that begins in a part, or to its end; return the position."""
    file.seek(max(0, part.start - 1))
    if part.start:
        file.readline(part.stop - part.start + 1)
    return file.tell()


def _lines(part: Part, offset: int, text_key: str) -> Iterator[tuple[Row, int]]:
    with opened(Path(part.path)) as file:
        offset = file.seek(offset) if offset else _first_line(file, part)
        while offset < part.stop and (line := file.readline()):
            begin, offset = offset, offset + len(line)
            try:
                text = text_of(parsed(line), text_key) if line.strip() else None
            except BadRow as error:
                raise error.of(part.path, f"the line at byte {begin:,}") from None
            if text:
                yield Row(text), offset


def _pieces(part: Part, offset: int, _: str) -> Iterator[tuple[Row, int]]:
    """Yield the lines that begin within a text file's part, in pieces that end at a line, or within
    a long line at a character."""
    with opened(Path(part.path)) as file:
        begins = not offset
        offset = file.seek(offset) if offset else _first_line(file, part)
        piece = b"\n" if offset < part.stop else b""
        if not begins and not piece:  # behind the part: at a line's end, or within the last line
            file.seek(offset - 1)
            piece = file.read(1)
        while piece and (offset < part.stop or not piece.endswith(b"\n")):
            piece = file.read(min(_PIECE, max(0, part.stop - offset)))
            if not piece.endswith(b"\n"):  # else the next line may begin at the next part
                piece += file.readline(_PIECE)
            while not piece.endswith(b"\n") and (more := file.read(1)):
                if more[0] & 0xC0 != 0x80:  # the first byte of the next character
                    file.seek(-1, os.SEEK_CUR)
                    break
                piece += more
            begin, offset = offset, offset + len(piece)
            try:
                text = piece.decode()
            except UnicodeDecodeError as error:
                reason = f"is not UTF-8 text (byte {begin + error.start:,})"
                raise DataError("data.path", part.path, reason, "give UTF-8 text") from None
            if text:
                yield Row(text, begins), offset
            begins = False


def parts_of(files: Sequence[Path], readers: int) -> list[Part]:
    """Return the parts to divide among readers: files; large text and JSONL cut by bytes."""
    sizes = [os.stat(file).st_size for file in files]
    largest = min(max(sum(sizes) // (8 * readers), 1 << 10), 1 << 26)
    parts = []
    for file, size in zip(files, sizes, strict=True):
        plain = file.suffix.lower() not in (*TABLES, ".json") and not is_compressed(file)
        if not plain or (size <= largest and kind_of_file(file) != ".jsonl"):
            parts.append(Part(str(file), 0, size, True))
            continue
        count = max(1, -(-size // largest))
        cuts = [size * n // count for n in range(count + 1)]
        parts += [Part(str(file), a, b, False) for a, b in pairwise(cuts)]
    return parts


class DatasetRows(BaseNode[Row]):
    """The texts of a streamed Hugging Face dataset."""

    def __init__(self, dataset: Any, text_key: str) -> None:
        super().__init__()
        self._source, self._key = IterableWrapper(dataset), text_key

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        with read_as_part(0, 1, 0, None):  # else `datasets` also splits by loader process
            self._source.reset(initial_state)

    def next(self) -> Row:
        with read_as_part(0, 1, 0, None):
            while not (text := row_text(next(self._source), self._key)):
                pass
        return Row(text)

    def get_state(self) -> State:
        return self._source.state_dict()


class Repeated(BaseNode[Any]):
    """The endless epochs of a source, or only the first. `told`: object with `epoch` or
    `set_epoch`, set when an epoch begins. They end if nothing is left of the first epoch, or of
    `_EMPTY` others in a row: all that a reader has in one may be held out."""

    def __init__(self, source: HeldOut, repeat: bool, told: Any) -> None:
        super().__init__()
        self._source, self._repeat, self._told = source, repeat, told

    def _tell(self) -> None:
        if hasattr(self._told, "set_epoch"):
            self._told.set_epoch(self.epoch)
        else:
            self._told.epoch = self.epoch
        self._source.epoch = self.epoch

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"epoch": 0, "empty": 1, "source": None}
        self.epoch, self._empty = state["epoch"], state["empty"]
        self._tell()
        self._source.reset(state["source"])

    def next(self) -> Any:
        while True:
            try:
                item = next(self._source)
            except StopIteration:
                if not self._repeat or self._empty > (_EMPTY if self.epoch else 0):
                    raise
                self.epoch, self._empty = self.epoch + 1, self._empty + 1
                self._tell()
                self._source.reset()
                continue
            self._empty = 0
            return item

    def get_state(self) -> State:
        state = {"epoch": self.epoch, "empty": self._empty}
        return state | {"source": self._source.state_dict()}


def hash_of(item: Any) -> int:
    """Hash a row, or a sample's tensors, to 63 bits."""
    hasher = xxhash.xxh3_64()
    if isinstance(item, Mapping):
        for name, value in sorted(item.items()):
            flat = value.detach().cpu().contiguous().flatten()
            hasher.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    else:
        hasher.update(item.text.encode())
    return hasher.intdigest() >> 1


class HeldOut(BaseNode[Any]):
    """A source without the items held out for validation.

    leaves_out(item, epoch, place): whether an item is. place: how many came before it in its epoch;
    None if the epoch may have another order than the first.
    """

    epoch = 0

    def __init__(self, source: Any, leaves_out: Callable[[Any, int, int | None], bool]) -> None:
        super().__init__()
        self._source, self._leaves_out = source, leaves_out

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"count": 0, "source": None}
        self._count = state["count"]
        self._source.reset(state["source"])

    def next(self) -> Any:
        while True:
            item = next(self._source)
            self._count += 1
            in_order = not self.epoch or getattr(self._source, "in_order", False)
            if not self._leaves_out(item, self.epoch, self._count - 1 if in_order else None):
                return item

    def get_state(self) -> State:
        return {"count": self._count, "source": self._source.state_dict()}


class Packed(BaseNode[Tensor]):
    """Rows as ids, each document preceded by its boundary, cut into samples [seq_len + 1], int32,
    whose last id is the first of the next sample. A remainder is dropped."""

    def __init__(self, source: BaseNode[Row], tokenizer: Tokenizer, seq_len: int) -> None:
        super().__init__()
        self._source, self._tokenizer, self._seq_len = source, tokenizer, seq_len

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"source": None, "left": torch.empty(0, dtype=torch.int32)}
        self._source.reset(state["source"])
        self._left = state["left"].clone()

    def next(self) -> Tensor:
        while len(self._left) <= self._seq_len:
            self._read()
        sample = self._left[: self._seq_len + 1].clone()
        self._left = self._left[self._seq_len :]
        return sample

    def _read(self) -> None:
        rows, characters = list[Row](), 0
        # not more rows than needed, so that the first sample is ready soon
        while characters < _GROUP and characters < 8 * self._seq_len:
            row = next(self._source, None)
            if row is None:
                break
            rows.append(row)
            characters += len(row.text)
        if not rows:
            raise StopIteration
        boundary = torch.tensor([self._tokenizer.boundary], dtype=torch.int32)
        pieces = [self._left]
        ids = self._tokenizer.encode_many(row.text for row in rows)
        for row, row_ids in zip(rows, ids, strict=True):
            pieces += [boundary] * row.begins
            pieces.append(torch.from_numpy(row_ids.astype(np.int32)))
        self._left = torch.cat(pieces)

    def get_state(self) -> State:
        return {"source": self._source.state_dict(), "left": self._left.clone()}


class Shuffled(BaseNode[Tensor]):
    """A buffer of `size` samples, kept in the state: a random one makes room for the next."""

    def __init__(self, source: BaseNode[Tensor], size: int, seed: int) -> None:
        super().__init__()
        self._source, self._size, self._seed = source, size, seed

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"source": None, "count": 0, "buffer": []}
        self._source.reset(state["source"])
        self._count, self._buffer = state["count"], [*state["buffer"]]

    def next(self) -> Tensor:
        while len(self._buffer) < self._size:
            sample = next(self._source, None)
            if sample is None:
                break
            self._buffer.append(sample)
        if not self._buffer:
            raise StopIteration
        place = _random(self._seed, self._count, len(self._buffer))
        self._count += 1
        self._buffer[place], self._buffer[-1] = self._buffer[-1], self._buffer[place]
        return self._buffer.pop()

    def get_state(self) -> State:
        buffer: Any = torch.stack(self._buffer) if self._buffer else []
        return {"source": self._source.state_dict(), "count": self._count, "buffer": buffer}


def _random(seed: int, count: int, below: int) -> int:
    key = splitmix64(np.array([(seed + 0x9E37) % (1 << 62)]) * 0x5851F42D4C957F2D + count)
    return int(splitmix64(key)[0] % below)


class Mixed(BaseNode[Any]):
    """Samples of several sources by weights that may change over the steps. In each step every
    source has its share of the global batch to within one sample, on average exactly; rows are
    assigned at random."""

    def __init__(self, sources: Mapping[str, BaseNode[Any]], weights: Sequence[Points], seed: int):
        super().__init__()
        self._sources, self._weights, self._seed = dict(sources), weights, seed
        self.row = (0, 0, 1)  # next sample: (step, row of the global batch, rows of that batch)

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        for name, source in self._sources.items():
            source.reset(None if initial_state is None else initial_state[name])

    def next(self) -> Any:
        step, row, rows = self.row
        weights = np.cumsum([weight_at(points, step) for points in self._weights])
        place = shuffled_index(step * rows + row, rows, self._seed + 1)
        offset = _random(self._seed, step, 1 << 30) / (1 << 30)
        index = np.searchsorted(weights, (place + offset) / rows * weights[-1], side="right")
        return next([*self._sources.values()][min(int(index), len(weights) - 1)])

    def get_state(self) -> State:
        return {name: source.state_dict() for name, source in self._sources.items()}


class Indexed(BaseNode[Any]):
    """A reader's share of an epoch of a map-style source, each in another random order."""

    epoch = 0

    def __init__(self, source: Any, reader: int, readers: int, seed: int) -> None:
        super().__init__()
        self._source, self._reader, self._readers, self._seed = source, reader, readers, seed

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._count = 0 if initial_state is None else initial_state["count"]

    def next(self) -> Any:
        place, size = self._count * self._readers + self._reader, len(self._source)
        if place >= size:
            raise StopIteration
        self._count += 1
        return self._source[shuffled_index(self.epoch * size + place, size, self._seed)]

    def get_state(self) -> State:
        return {"count": self._count}
