"""A stream as a run's training data, read by readers whose samples form the same batches in any
layout.

A stream is read by a fixed number of *readers*. Reader r's samples depend on the seed, r and the
number of readers alone. Each global batch has the same number of rows from every reader, in the
readers' order; a dp rank opens the readers of its rows, and its loader processes share them. So the
order depends neither on the mesh nor on `data.workers`.

Every `_EVERY` steps the training process receives the readers' states and keeps them. A checkpoint
stores the latest ones up to its step; a resume reads forward from there, at most `_EVERY` - 1
batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from titanlike.core.config.errors import Refused
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import READERS, DataError, data_changed, loader_workers, option
from titanlike.core.data.readers import default_readers, reader_problems, rows_of
from titanlike.core.data.sources import ENDLESS, Batch, Stream, stack
from titanlike.formats import state_json
from titanlike.formats.stream_nodes import HeldOut, hash_of

_EVERY = 8  # steps
_HELD = f"{READERS}held."  # prefix of what is held out of each reader in a checkpoint


class Block(NamedTuple):
    """The rows of one step from one loader process."""

    batch: Batch
    states: dict[int, Tensor] | None  # reader -> state after this step
    ends: bool  # this is the last step
    error: Exception | None = None


class Head(NamedTuple):
    """The first samples of a reader, before shuffling."""

    first: int  # hash of the first sample
    held: list[Batch]  # samples for validation
    items: int  # texts or samples that the run holds out, before any other
    hashes: set[int]  # of these


def _as_it_is(item: Any) -> Any:
    return item


class StreamSource(Stream):
    """The `Data.train` of a stream.

    open_reader(reader, readers, wrap, whole): returns a reader's node; `wrap` is applied to its
    source node; whole=False = one unshuffled epoch, whose first samples are held out for
    validation; its by_place: whether these are the items of the source node. finish: converts an
    item to a sample.
    """

    def __init__(
        self,
        config: Config,
        readers: int | None,
        open_reader: Any,
        example: Batch,
        finish: Callable[[Any], Batch] = _as_it_is,
        collate: Callable[[list[Batch]], Batch] = stack,
        together: bool = True,
    ) -> None:
        """example: a sample; together: whether batches of several loader processes can be
        concatenated."""
        self.config, self.open_reader = config, open_reader
        self.readers = default_readers(config) if readers is None else readers
        self.chosen = readers is None
        self.example, self.finish, self.collate = example, finish, collate
        self.together = together
        validation = config.validation
        self.held_batches = validation.batches if validation.every else 0
        self.ends: int | None = None  # the last step that has a batch, once known
        self._states: dict[int, dict[int, Tensor]] = {}  # step -> reader -> state after that step
        self._heads: dict[int, Head] = {}
        self._run_holds: dict[int, tuple[int, set[int]]] = {}  # `Head` items, hashes of the run
        self._held_anywhere: set[int] | None = None  # `Head.hashes` of all readers
        self._firsts: dict[int, int] = {}  # reader -> `Head.first` of the checkpoint
        self._read = torch.zeros(1, dtype=torch.int64).share_memory_()  # by loader processes, too

    def __len__(self) -> int:
        return ENDLESS

    def own(self, config: Config, dp_rank: int) -> range:
        """Return the readers of a dp rank."""
        if self.readers % config.dp:
            raise DataError(*astuple(next(reader_problems(config, self.readers))))
        each = self.readers // config.dp
        return range(dp_rank * each, (dp_rank + 1) * each)

    def stream(
        self, config: Config, dp_rank: int, start: int, loader: Callable[..., Any]
    ) -> Iterator[Batch]:
        """Yield a dp rank's batches after `start` steps. loader: creates torch's DataLoader for a
        dataset."""
        position = max((step for step in self._states if step <= start), default=0)
        readers = self.own(config, dp_rank)
        for reader in readers:
            self.head(reader)  # cached before loader processes are forked
        states = self._states.get(position, {})
        group = ReaderGroup(self, config, readers, states, position)
        workers = min(loader_workers(config.data), len(readers) if self.together else 1)
        ahead = {"prefetch_factor": option(config.data, "prefetch", 2)} if workers else {}
        blocks = iter(loader(group, batch_size=None, num_workers=workers, **ahead))
        return self._batches(blocks, max(1, workers), position, start)

    def unread(self, config: Config, start: int) -> Iterator[Batch]:
        """Yield meta tensors of the batches after `start` steps, for a rank that needs no data."""
        for step in count(start):
            rows = rows_of(config, step) // config.dp
            yield {n: x.new_empty(rows, *x.shape, device="meta") for n, x in self.example.items()}

    def count_sample(self) -> None:
        """Count a sample that is read on the way to the first batch, which may take long."""
        self._read += 1

    def samples_read(self) -> int:
        return int(self._read)

    def first_samples(self, config: Config, dp_rank: int) -> Iterator[tuple[int, int]]:
        """Yield (reader, hash of its first sample) of a dp rank's readers, of reader 0 and of the
        next rank's first: by these, ranks compare what they read."""
        # those of before there was a process group may be others
        self._heads, self._held_anywhere = {}, None
        readers = self.own(config, dp_rank)
        for reader in sorted({0, *readers, readers.stop % self.readers}):
            yield reader, self.head(reader).first

    def _batches(
        self, blocks: Iterator[Block], workers: int, position: int, start: int
    ) -> Iterator[Batch]:
        repeat = option(self.config.data, "repeat", True)
        waiting: Batch | None = None
        for step in count(position + 1):
            step_blocks = [*islice(blocks, workers)]
            for block in step_blocks:
                if not isinstance(block, Block):  # `loader.NotSent`
                    yield block
                if block.error is not None:
                    raise block.error
            if not all(block.batch for block in step_blocks):
                self.ends = step - 1
                return
            if all(block.states is not None for block in step_blocks):
                states = {r: s for b in step_blocks for r, s in (b.states or {}).items()}
                self._states[step] = states
                for old in sorted(self._states)[:-4]:  # a rollback goes back a few steps at most
                    del self._states[old]
            ends = any(block.ends for block in step_blocks)
            if ends:
                self.ends = step
            if step > start:
                parts = [block.batch for block in step_blocks]
                batch = parts[0]
                if len(parts) > 1:
                    batch = {name: torch.cat([part[name] for part in parts]) for name in batch}
                # if the stream can end, read one step ahead so that `ends` is known in time
                if repeat:
                    yield batch
                else:
                    if waiting is not None:
                        yield waiting
                    waiting = batch
            if ends:
                if waiting is not None:
                    yield waiting
                return

    # --- checkpoints --------------------------------------------------------------------------

    def saved(self, step: int) -> dict[str, Tensor]:
        """Return the checkpoint entries of this rank's readers after `step` batches."""
        position = max((s for s in self._states if s <= step), default=None)
        states = {} if position is None else self._states[position]
        entries = {f"{READERS}{reader}": state for reader, state in states.items()}
        for head, reader in ((self.head(reader), reader) for reader in states):
            entries[f"{_HELD}{reader}"] = torch.tensor([head.items, *sorted(head.hashes)])
        return entries

    def wanted(
        self, shapes: Mapping[str, Sequence[int]], config: Config, dp_rank: int
    ) -> dict[str, Tensor]:
        """Return empty tensors, to be filled from a checkpoint whose entries have these shapes.
        Raises DataError if its readers cannot be divided among the dp ranks."""
        held = [name for name in shapes if name.startswith(_HELD)]
        names = [name for name in shapes if name.startswith(READERS) and name not in held]
        if not names:
            return {}
        if len(names) != self.readers:
            for problem in reader_problems(config, len(names)) if self.chosen else ():
                reason = f"the checkpoint has {len(names)} readers, and {problem.reason}"
                raise DataError("dp", config.dp, reason, f"dp={math.gcd(config.dp, len(names))}")
            if not self.chosen:
                reason = f"the checkpoint has {len(names)}"
                raise DataError("data.readers", self.readers, reason, f"data.readers={len(names)}")
            self.readers = len(names)
        own_names = [f"{READERS}{reader}" for reader in self.own(config, dp_rank)]
        entries = {name: torch.zeros(*shapes[name], dtype=torch.uint8) for name in own_names}
        return entries | {name: torch.zeros(*shapes[name], dtype=torch.int64) for name in held}

    def restore(self, entries: Mapping[str, Tensor]) -> None:
        """Load the readers' states from checkpoint entries, and what the run holds out. Raises
        DataError if a reader's first sample changed."""
        before = dict(self._run_holds), dict(self._firsts)
        for name, entry in entries.items():
            if name.startswith(_HELD):
                items, *hashes = entry.tolist()
                self._run_holds[int(name.removeprefix(_HELD))] = items, set(hashes)
                continue
            content, reader = loaded(entry), int(name.removeprefix(READERS))
            self._states.setdefault(content["step"], {})[reader] = entry
            if not data_changed(self.config.data):
                self._firsts[reader] = content["first"]
        # as a run is resumed; a rollback changes nothing
        if (self._run_holds, self._firsts) != before:
            self._heads, self._held_anywhere = {}, None
        for reader in self._firsts:
            self.head(reader)

    def head(self, reader: int) -> Head:
        """Read a reader's first samples, once: those of the first `held_batches` global batches are
        held out for validation. Raises DataError if there are fewer, or if the run was trained on
        them before it was resumed."""
        if reader not in self._heads:
            self._heads[reader] = self._read_head(reader)
        return self._heads[reader]

    def _read_head(self, reader: int) -> Head:
        each, hashes, samples = self.config.batch_size // self.readers, list[int](), list[Batch]()

        def note(item: Any, epoch: int, place: int | None) -> bool:
            hashes.append(hash_of(item))
            return False

        raw = self.open_reader(reader, self.readers, partial(HeldOut, leaves_out=note), False)
        raw.reset()
        size = self.held_batches * each
        items, known = self._run_holds.get(reader, (0, set[int]()))
        seen = 0  # of hashes
        resumed = reader in self._run_holds and not data_changed(self.config.data)
        held = 0  # samples of which the run holds out everything
        while len(samples) < max(1, size):
            row = reader * each + len(samples) % each
            raw.row = len(samples) // each, row, self.config.batch_size
            if (item := next(raw, None)) is None:
                break
            samples.append(self.finish(item))
            held += held == len(samples) - 1 and known.issuperset(hashes[seen:])
            seen = len(hashes)
            self.count_sample()
        if not samples:
            raise self.too_short(reader)
        first = hash_of(samples[0])
        if self._firsts.get(reader, first) != first:
            reason = f"the first sample of reader {reader} is not what it was when the checkpoint "
            reason += "was saved, so samples would be left out or trained on again"
            fix = "data.changed=true to continue on these data, or another run_dir"
            raise DataError("data", "", reason, fix)
        if len(samples) < size:
            reason = f"the first {self.held_batches} batches are held out for validation, and "
            reason += f"reader {reader} of {self.readers} has {len(samples)} samples"
            fix = "validation.batches=1, or more data"
            raise DataError("validation.batches", self.held_batches, reason, fix)
        if resumed and held < size:
            reason = f"the run holds out {held // each} batches since its beginning and has "
            reason += "trained on others"
            fix = f"validation.batches={held // each}" if held >= each else "validation.every=0"
            fix += ", or a set of its own: validation.data={path: FILE}"
            raise DataError("validation.batches", self.held_batches, reason, fix)
        if size and not resumed:
            items, known = len(hashes), known.union(hashes)
        return Head(first, samples[:size], items, known)

    def leaves_out(self, reader: int, item: Any, epoch: int, place: int | None) -> bool:
        """Return whether a reader's item is held out: in its first epoch what its own head has,
        later what that of any reader has, since what a reader reads may be another's in each
        epoch."""
        head = self.head(reader)
        if self.open_reader.by_place and place is not None and place < head.items:
            return True
        if epoch and self._held_anywhere is None:
            readers = range(self.readers) if self.held_batches or self._run_holds else ()
            heads = (self._heads.get(r) or self._read_head(r) for r in readers)
            self._held_anywhere = {each for one in heads for each in one.hashes}
        held = (self._held_anywhere or ()) if epoch else head.hashes
        return bool(held) and hash_of(item) in held

    def too_short(self, reader: int) -> DataError:
        reason = f"reader {reader} of {self.readers} finds no sample"
        if self.held_batches:
            reason += f" beside those of the {self.held_batches} batches held out for validation"
        fix = "give more data, a smaller seq_len, or fewer readers: data.readers="
        fewer = [n for n in range(1, self.readers) if self.readers % n == 0]
        data = self.config.data
        path = getattr(data, "path", None)
        key, value = ("data.name", data.name) if path is None else ("data.path", path)
        return DataError(key, value, reason, f"{fix}{max(fewer, default=1)}")


class HeldOutSource:
    """The validation part of a stream: the first batches of its readers."""

    of_stream = True  # its samples are compared with the readers'

    def __init__(self, source: StreamSource) -> None:
        self._source, self.collate = source, source.collate

    def __len__(self) -> int:
        config = self._source.config
        return config.validation.batches * config.batch_size or ENDLESS

    def __getitem__(self, i: int) -> Batch:
        source = self._source
        each = source.config.batch_size // source.readers
        batch, row = divmod(i, source.config.batch_size)
        reader, index = divmod(row, each)
        return source.head(reader).held[batch * each + index]

    def fingerprint(self) -> str:
        return "the first samples of a stream"


class ReaderGroup(IterableDataset[Block]):
    """Yields blocks of steps after `position`, in this process or, in a loader process, for its
    share of the readers."""

    def __init__(
        self,
        source: StreamSource,
        config: Config,
        readers: Sequence[int],
        states: Mapping[int, Tensor],
        position: int,
    ) -> None:
        self._source, self._config, self._readers = source, config, readers
        self._states, self._position = states, position

    def __iter__(self) -> Iterator[Block]:
        readers, info = self._readers, get_worker_info()
        if info is not None:
            size, part = len(readers), info.id
            first, last = (size * n // info.num_workers for n in (part, part + 1))
            readers = readers[first:last]
        try:
            yield from self._blocks(readers)
        except Refused as error:
            yield Block({}, None, True, error)
        except state_json.NotJson as what:
            yield Block({}, None, True, not_saved(self._config, str(what)))

    def _blocks(self, readers: Sequence[int]) -> Iterator[Block]:
        source = self._source
        # if the stream can end, read one step ahead: a block says whether it is the last
        ends = not option(self._config.data, "repeat", True)
        nodes = {reader: self._opened(reader) for reader in readers}
        rows = self._take(nodes, self._position)
        for step in count(self._position + 1):
            if rows is None and ends and self._position:  # the run had ended at this position
                yield Block({}, None, True)  # none would be another process's next one
                return
            if rows is None:
                raise source.too_short(readers[0])
            states = None
            if step % _EVERY == 0 or step == 1:
                states = {
                    reader: dumped(node.state_dict(), source.head(reader).first, step)
                    for reader, node in nodes.items()
                }
            after = self._take(nodes, step) if ends else None
            batch = source.collate([source.finish(item) for item in rows])
            yield Block(batch, states, ends and after is None)
            if ends and after is None:
                return
            rows = after if ends else self._take(nodes, step)

    def _opened(self, reader: int) -> Any:
        source = self._source
        wrap = partial(HeldOut, leaves_out=partial(source.leaves_out, reader))
        node = source.open_reader(reader, source.readers, wrap, True)
        state = self._states.get(reader)
        node.reset(None if state is None else loaded(state)["state"])
        return node

    def _take(self, nodes: Mapping[int, Any], step: int) -> list[Any] | None:
        rows = rows_of(self._config, step)
        each, items = rows // self._source.readers, []
        for reader, node in nodes.items():
            for row in range(reader * each, (reader + 1) * each):
                node.row = step, row, rows
                try:
                    items.append(next(node))
                except StopIteration:
                    return None
        return items


# --- states ---------------------------------------------------------------------------------------


def not_saved(config: Config, what: str) -> DataError:
    """Return the error for a stream of a user's own whose state has a part of another type."""
    reason = f"the state of its stream cannot be saved: {what}"
    fix = "return numbers, texts, lists, dicts, arrays and tensors alone from state_dict"
    return DataError("data.name", config.data.name, reason, fix)


def dumped(state: Any, first: int, step: int) -> Tensor:
    """Return a reader's state after a step as a checkpoint's entry, uint8."""
    data = state_json.dumps({"state": state, "first": first, "step": step})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def loaded(entry: Tensor) -> dict[str, Any]:
    """Return what `dumped` was given, by its names. Raises ValueError."""
    content = state_json.loads(entry.numpy().tobytes())
    if not isinstance(content, dict) or content.keys() != {"state", "first", "step"}:
        raise ValueError("is no state of a reader")
    return content
