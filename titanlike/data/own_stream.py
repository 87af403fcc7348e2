"""Streams from a user's function (`data.name=package.function`): an `IterableDataset`, a node of
`torchdata.nodes`, a `StatefulDataLoader`, or any iterable of samples.

Each reader's stream is opened by calling the function with those of `reader`, `readers` and `seed`
that are among its parameters. An `IterableDataset` may instead divide itself by
`torch.utils.data.get_worker_info`; a `datasets.IterableDataset` is split here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode
from tqdm import tqdm

from titanlike.config.schema import Config, Custom
from titanlike.data.checked import Call, CheckedSource
from titanlike.data.kinds import DataError
from titanlike.data.readers import held_out_problems, reader_problems
from titanlike.data.sources import Batch, Data
from titanlike.data.stream_nodes import Repeated, State
from titanlike.data.stream_source import HeldOutSource, StreamSource, not_saved
from titanlike.torch_private.loader_worker import read_as_part


def open_stream(opened: Data, call: Call, data: Custom, config: Config) -> Data:
    """Wrap `opened`, whose training part is a stream. call: opens a reader's stream. Raises
    DataError."""
    readers = data.args.get("readers")
    held_out = held_out_problems(config) if opened.validation is None else ()
    for problem in (*reader_problems(config, readers), *held_out):
        raise DataError(problem.key, problem.value, problem.reason, problem.fix)
    checks = CheckedSource((), "training", data.name, config.seq_len, opened.variable)
    opener = _Opener(call, checks, config.seed, data.args.get("repeat", True))
    together = opened.variable is None
    train = StreamSource(config, readers, opener, {}, collate=checks.collate, together=together)
    if opened.validation is not None:
        train.held_batches = 0
    first = opener.sample(0, train.readers)
    if first is None:
        raise train.too_short(0)
    checks.first = train.example = first
    if train.readers > 1 and train.head(0).first == train.head(1).first:
        reason = "readers 0 and 1 give the same first sample: all would read the whole stream"
        fix = "let the function take reader and readers and give every readers-th sample from the "
        fix += "reader-th one, or divide by get_worker_info(), or write data.readers=1"
        raise DataError("data.name", data.name, reason, fix)
    held: Any = opened.validation
    if held is None:
        held = HeldOutSource(train)
    else:
        held = CheckedSource(held, "validation", data.name, config.seq_len, opened.variable)
    return replace(
        opened,
        train=train,
        validation=held,
        example=checks.example(),
        description=f"{opened.description}, streamed by {train.readers} readers",
        fingerprint=opened.fingerprint or f"a stream of {data.name}",
    )


@dataclass
class _Opener:
    """Opens a reader's stream as a node of checked samples."""

    call: Call
    checks: CheckedSource
    seed: int
    repeat: bool
    by_place = True

    def __call__(self, reader: int, readers: int, wrap: Callable[[Any], Any], whole: bool) -> Any:
        rows = OwnRows(self, reader, readers)
        checked = _Checked(rows, self.checks, f"of reader {reader}")
        return Repeated(wrap(checked), self.repeat and whole, rows)

    def stream(self, reader: int, readers: int) -> Any:
        opened = self.call(reader=reader, readers=readers)
        stream = opened.train if isinstance(opened, Data) else opened
        return stream[0] if isinstance(stream, tuple) else stream

    def sample(self, reader: int, readers: int) -> Batch | None:
        node = OwnRows(self, reader, readers)
        item = next(node, None)
        if what := not_saved(node.state_dict()):
            reason = f"the state of its stream cannot be saved: {what}"
            fix = "return numbers, texts, lists, dicts and tensors alone from state_dict"
            raise DataError("data.name", self.checks.name, reason, fix)
        return None if item is None else self.checks.check("0 of reader 0", item)


class OwnRows(BaseNode[Any]):
    """The items of a reader's stream. Without `state_dict` and `load_state_dict`, a resume reads
    forward to its place."""

    def __init__(self, opener: _Opener, reader: int, readers: int) -> None:
        super().__init__()
        self._opener, self._reader, self._readers = opener, reader, readers
        self._stream: Any = None
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def in_order(self) -> bool:
        """Whether each epoch has the order of the first."""
        return not hasattr(self._open, "set_epoch")

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        # a generator can be read only once; other streams can be iterated again
        once = isinstance(self._stream, Iterator) and not isinstance(self._stream, BaseNode)
        if self._stream is None or once:
            self._stream = self._opener.stream(self._reader, self._readers)
        stream, self._count = self._stream, 0
        module = type(stream).__module__.partition(".")[0]
        if module == "datasets":
            from datasets.distributed import split_dataset_by_node

            if self._readers > 1:
                stream = split_dataset_by_node(stream, self._reader, self._readers)
        self._info = module != "datasets" and isinstance(stream, IterableDataset)
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self.epoch)
        self._open, behind = stream, 0
        if initial_state is not None:
            self._count = behind = initial_state["count"]
            if hasattr(stream, "load_state_dict"):
                stream.load_state_dict(initial_state["state"])
                behind = 0
        with self._as_part():
            if isinstance(stream, BaseNode):
                stream.reset(initial_state and initial_state["state"])
                self._items: Iterator[Any] = stream
            else:
                self._items = iter(stream)
        if isinstance(stream, BaseNode):
            return
        why = f"reader {self._reader} reads forward: {type(stream).__name__} has no state_dict"
        for _ in tqdm(range(behind), why, disable=not behind, file=sys.stderr):
            with self._as_part():
                next(self._items)

    def _as_part(self) -> Any:
        dataset = self._open if self._info else None
        return read_as_part(self._reader, self._readers, self._opener.seed, dataset)

    def next(self) -> Any:
        with self._as_part():
            item = next(self._items)
        self._count += 1
        return item

    def get_state(self) -> State:
        state: State = {"count": self._count, "state": None}
        if isinstance(self._open, BaseNode) or hasattr(self._open, "load_state_dict"):
            state["state"] = self._open.state_dict()
        return state


class _Checked(BaseNode[Batch]):
    """Samples compared with the first one."""

    def __init__(self, source: OwnRows, checks: CheckedSource, whose: str) -> None:
        super().__init__()
        self._source, self._checks, self._whose = source, checks, whose
        self.in_order = False

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"count": 0, "source": None}
        self._count = state["count"]
        self._source.reset(state["source"])
        self.in_order = self._source.in_order

    def next(self) -> Batch:
        item = next(self._source)
        self._count += 1
        return self._checks.check(f"{self._count - 1} {self._whose}", item)

    def get_state(self) -> State:
        return {"count": self._count, "source": self._source.state_dict()}
