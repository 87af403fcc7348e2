"""Streams from a user's function (`data.name=package.function`): an `IterableDataset`, a node of
`torchdata.nodes`, a `StatefulDataLoader`, or any iterable of samples.

Each reader's stream is opened by calling the function with those of `reader`, `readers` and `seed`
that are among its parameters. An `IterableDataset` may instead divide itself by
`torch.utils.data.get_worker_info`; a `datasets.IterableDataset` is split here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from types import ModuleType
from typing import Any

from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode
from tqdm import tqdm

from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.checked import Call, CheckedSource, checked_source
from titanlike.core.data.draws import Draws
from titanlike.core.data.kinds import DataError
from titanlike.core.data.readers import held_out_problems, reader_problems
from titanlike.core.data.sources import Batch, Data
from titanlike.core.torch_private.loader_worker import read_as_part
from titanlike.formats import state_json
from titanlike.formats.stream_nodes import Repeated, State, hash_of
from titanlike.formats.stream_source import HeldOutSource, StreamSource, not_saved

_TRIED = (2, 5, 10)  # states after so many samples are tried, up to the last of these


def open_stream(opened: Data, call: Call, data: Custom, config: Config) -> Data:
    """Wrap `opened`, whose training part is a stream. call: opens a reader's stream. Raises
    DataError."""
    readers = data.args.get("readers")
    held_out = held_out_problems(config) if opened.validation is None else ()
    for problem in (*reader_problems(config, readers), *held_out):
        raise DataError(problem.key, problem.value, problem.reason, problem.fix)
    checks = CheckedSource((), "training", data.name, config.seq_len, opened.variable)
    held: Any = opened.validation
    if held is not None:
        held = checked_source(held, "validation", data.name, config, opened.variable)
    opener = _Opener(call, checks, config, data.args.get("repeat", True))
    together = opened.variable is None
    train = StreamSource(config, readers, opener, {}, collate=checks.collate, together=together)
    opener.source = train
    if opened.validation is not None:
        train.held_batches = 0
    if opener.try_first_samples(train.readers) and train.held_batches:
        reason = "its samples draw, and have another order in each epoch (set_epoch): what is held "
        reason += "out for validation could not be told from the others"
        fix = "return a Data with a validation part, or write validation.every=0"
        raise DataError("data.name", data.name, reason, fix)
    if checks.first is None:
        raise train.too_short(0)
    train.example = checks.first
    if train.readers > 1 and train.head(0).first == train.head(1).first:
        reason = "readers 0 and 1 give the same first sample: all would read the whole stream"
        fix = "let the function take reader and readers and give every readers-th sample from the "
        fix += "reader-th one, or divide by get_worker_info(), or write data.readers=1"
        raise DataError("data.name", data.name, reason, fix)
    return replace(
        opened,
        train=train,
        validation=HeldOutSource(train) if held is None else held,
        example=checks.example(),
        description=f"{opened.description}, streamed by {train.readers} readers",
    )


@dataclass
class _Opener:
    """Opens a reader's stream as a node of checked samples."""

    call: Call
    checks: CheckedSource
    config: Config
    repeat: bool
    by_place = True
    restores: bool = True  # whether the stream's state brings it back
    source: Any = None  # the StreamSource whose readers' streams it opens

    def __call__(self, reader: int, readers: int, wrap: Callable[[Any], Any], whole: bool) -> Any:
        rows = OwnRows(self, reader, readers)
        return Repeated(wrap(rows), self.repeat and whole, rows)

    def stream(self, reader: int, readers: int) -> Any:
        opened = self.call(reader=reader, readers=readers)
        stream = opened.train if isinstance(opened, Data) else opened
        return stream[0] if isinstance(stream, tuple) else stream

    def try_first_samples(self, readers: int) -> bool:
        """Read the first samples of reader 0 twice, and again from a state; return whether later
        epochs have other ones, in another order. Sets `restores`, and the sample that others are
        compared with. Raises DataError if samples differ, or the state cannot be saved."""

        def read(node: OwnRows, begin: int, end: int) -> list[int]:
            hashes = []
            for number in range(begin, end):
                try:
                    sample = next(node)
                except StopIteration:
                    break
                except Exception as error:
                    if not number or isinstance(error, DataError):
                        raise
                    break  # raised again when training reads it
                self.checks.first = self.checks.first or sample
                hashes.append(hash_of(sample))
            return hashes

        node, hashes, states = OwnRows(self, 0, readers), list[int](), dict[int, State]()
        for place in _TRIED[:-1]:
            hashes += read(node, len(hashes), place)
            try:  # reading on may change the original
                states[place] = state_json.loads(state_json.dumps(node.state_dict()))
            except state_json.NotJson as what:
                raise not_saved(self.config, str(what)) from None
        hashes += read(node, len(hashes), _TRIED[-1])
        pairs = zip_longest(hashes, read(OwnRows(self, 0, readers), 0, _TRIED[-1]))
        for number, (first, again) in enumerate(pairs):
            if first != again:
                raise self.checks.differs(f"{number} of reader 0")
        other = replace(self, config=replace(self.config, seed=self.config.seed + 1))
        draws = not node.in_order and read(OwnRows(other, 0, readers), 0, _TRIED[-1]) != hashes
        self.restores = not _has_shuffle_buffer(node.stream)
        for place, state in states.items() if self.restores and node.has_state else ():
            node = OwnRows(self, 0, readers)
            node.reset(state)
            self.restores &= read(node, place, _TRIED[-1]) == hashes[place:]
        return draws


class OwnRows(BaseNode[Batch]):
    """The samples of a reader's stream, which each epoch opens anew, compared with the first one.
    Without `state_dict` and `load_state_dict`, or where these do not bring it back, a resume reads
    forward to its place.

    What an item draws from the global generators depends on the seed, the reader, the epoch and the
    item's place in it alone. Two exceptions, for a stream that shuffles by these generators: what
    comes before the first item is the same for all readers, which divide one order among them, and
    where there is no `set_epoch` each epoch begins with the held-out items of the first.
    """

    def __init__(self, opener: _Opener, reader: int, readers: int) -> None:
        super().__init__()
        self._opener, self._reader, self._readers = opener, reader, readers
        self.stream: Any = None
        self._draws, self.epoch = Draws(), 0

    @property
    def in_order(self) -> bool:
        """Whether each epoch has the order of the first."""
        return not hasattr(self._open, "set_epoch")

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        opener, state = self._opener, initial_state or {"count": 0, "state": None}
        stream = self.stream = opener.stream(self._reader, self._readers)
        module = type(stream).__module__.partition(".")[0]
        if module == "datasets" and self._readers > 1:
            from datasets.distributed import split_dataset_by_node

            stream = split_dataset_by_node(stream, self._reader, self._readers)
        own_part = module == "datasets" or "reader" in opener.call.reader
        self._info = stream if isinstance(stream, IterableDataset) and not own_part else None
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self.epoch)
        self._open, self._count, behind = stream, 0, state["count"]
        with self._reading(-1):
            restored = opener.restores and state["state"] is not None
            if isinstance(stream, BaseNode):
                stream.reset(state["state"] if restored else None)
            elif restored:
                stream.load_state_dict(state["state"])
            self._items: Iterator[Any] = iter(stream)
        if restored:
            self._count = behind
            return
        why = "has no state_dict" if opener.restores else "has a state that does not bring it back"
        why = f"reader {self._reader} reads forward: {type(stream).__name__} {why}"
        for self._count in tqdm(range(behind), why, disable=not behind, file=sys.stderr):
            with self._reading(self._count):
                next(self._items, None)
            opener.source.count_sample()
        self._count = behind

    @contextmanager
    def _reading(self, place: int) -> Iterator[None]:
        """A context in which the stream is read, as a part of it, with this place's draws; place:
        -1 as it begins."""
        info = read_as_part(self._reader, self._readers, self._opener.config.seed, self._info)
        reader, epoch = self._reader if place > 0 else "all", self.epoch
        if epoch and self.in_order and max(place, 0) < self._opener.source.head(self._reader).items:
            epoch = 0
        with self._draws as draws, info:
            draws.seed(self._opener.config.seed, reader, epoch, place)
            yield

    def next(self) -> Batch:
        with self._reading(self._count):
            item = next(self._items)
        self._count += 1
        return self._opener.checks.check(f"{self._count - 1} of reader {self._reader}", item)

    def get_state(self) -> State:
        saved = self._opener.restores and self.has_state
        return {"count": self._count, "state": self._open.state_dict() if saved else None}

    @property
    def has_state(self) -> bool:
        both = hasattr(self.stream, "load_state_dict") and hasattr(self.stream, "state_dict")
        return isinstance(self.stream, BaseNode) or both


def _has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a stream is, or holds, a dataset of `datasets` that has one, which its state
    leaves out. It may bring back the samples that are tried, and not later ones."""
    parts, seen = [stream], set[int]()
    for part in parts:  # which grow
        if "Shuffled" in type(part).__name__ and hasattr(part, "buffer_size"):
            return True
        held = part if isinstance(part, dict) else getattr(part, "__dict__", {})
        if len(parts) < 10_000 and id(part) not in seen and not isinstance(part, type | ModuleType):
            parts += islice(part if isinstance(part, list | tuple) else held.values(), 100)
        seen.add(id(part))
    return False
