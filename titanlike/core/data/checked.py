"""Samples of a user's source, checked against the first one and padded, and batches of similar
lengths.

Shapes: B samples in a batch, T tokens in a sample, or in the longest sample of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from titanlike.core.config.schema import Config
from titanlike.core.data.draws import Draws
from titanlike.core.data.kinds import DataError
from titanlike.core.data.order import GlobalBatchSampler, shuffled_index
from titanlike.core.data.sources import (
    IGNORE,
    REAL,
    Batch,
    Pad,
    Source,
    VariableLength,
    sample_hash,
    spread,
    stack,
)
from titanlike.core.torch_private.loader_worker import read_as_part

REQUIRED = ("inputs", "targets")
_READ_TWICE = 8  # samples of a source, when it is opened
_IDS_KEPT = 128  # smallest and largest ids, of a sample's inputs and targets
_WINDOW = 64  # steps within which samples are sorted by length


@dataclass(frozen=True)
class Call:
    """A user's function with its arguments; for a stream it is called once per reader."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    reader: dict[str, int]  # `reader`, `readers`, `seed`: those that the function accepts
    seed: int  # of what it draws, equal for all readers: a shuffle is the same on every rank

    def __call__(self, **reader: int) -> Any:
        given = self.reader | {n: value for n, value in reader.items() if n in self.reader}
        with Draws() as draws:
            draws.seed(self.seed, "open")
            return self.function(**self.arguments, **given)


class CheckedSource:
    """Reads a user's source. Raises DataError for an invalid sample, or one that differs in form
    from the first."""

    lengths: Sequence[int] | None = None  # of all samples, to batch samples of similar lengths

    def __init__(
        self,
        source: Source,
        part: str,
        name: str,
        seq_len: int,
        variable: VariableLength | None,
        seed: int = 0,
    ) -> None:
        """part: "training" or "validation"; name: the user's function's, for errors; seed: of what
        samples draw."""
        self._source, self.name, self._part = source, name, part
        self._seed, self._draws = seed, Draws()
        self._seq_len, self.variable = seq_len, variable
        self._padding = {} if variable is None else variable.padding
        self.first: Batch | None = None
        # (id, field, sample) of the smallest and largest ids of the samples first read
        self.first_ids: list[tuple[int, str, int | str]] = []

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> Batch:
        """Read a sample; i: its index, in a later epoch plus epoch * len(self)."""
        return self.__getitems__([i])[0]

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))  # [i] has no end: it goes on with epoch 1

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Read a batch of samples, as torch's loader does. What a sample draws from the global
        generators depends on the seed, its epoch and index alone."""
        samples = []
        with self._draws as draws:
            if self.first is None:
                draws.seed(self._seed, 0, 0)
                self.first = self._read(0, self._source[0])
            for epoch, i in (divmod(index, len(self._source)) for index in indices):
                draws.seed(self._seed, epoch, i)
                samples.append(self.check(i, self._source[i]))
        return samples

    def refuse_other_readings(self) -> None:
        """Raise DataError if a sample differs when it is read again, or in a loader process."""
        for i in spread(len(self), _READ_TWICE):
            first = sample_hash(self, i)
            with read_as_part(1, 2, 0, cast(Any, self)):
                in_process = sample_hash(self, i)
            if in_process == first:
                continue
            if sample_hash(self, i) == first:
                reason = "depends on get_worker_info(): it differs in each loader process"
                remedy = "return the same sample [i] in every process, which reads a part of them"
                raise self._wrong(i, reason, remedy)
            raise self.differs(i)

    def differs(self, i: int | str) -> DataError:
        """Return the error for a sample that is not the same when it is read again."""
        reason = "differs each time it is read, so it would on each rank and after a resume"
        remedy = "draw by torch, numpy.random or random themselves, which are seeded for each "
        remedy += "sample, not by a generator that is kept, the time, or what was read before"
        return self._wrong(i, reason, remedy)

    def check(self, i: int | str, sample: Any) -> Batch:
        """Return the sample after comparing it with the first one. i: its index, or for a stream
        its place in words."""
        checked = self._read(i, sample)
        if len(self.first_ids) < _IDS_KEPT:
            for name in REQUIRED:
                ids = checked[name]
                ids = ids[ids != IGNORE] if name == "targets" else ids
                if ids.dim() == 1 and len(ids) and not ids.is_floating_point() and ids.is_cpu:
                    self.first_ids += [(int(end), name, i) for end in ids.aminmax()]
        if self.first is not None:
            self._compare(i, checked, self.first)
        return checked

    def batch_sampler(self, config: Config, dp_rank: int, step: int) -> GlobalBatchSampler:
        sampler = GlobalBatchSampler(len(self), config, dp_rank, step)
        if self.lengths is not None:
            sampler = SimilarLengthBatchSampler(len(self), config, dp_rank, step, self.lengths)
        sampler.with_epochs = True
        return sampler

    def collate(self, samples: list[Batch]) -> Batch:
        """Stack samples to a batch [B, ...], padded where lengths differ."""
        if self.variable is None:
            return stack(samples)
        bucket, longest = self.variable.bucket, max(len(sample["inputs"]) for sample in samples)
        return self._padded(samples, min(-(-longest // bucket) * bucket, self._seq_len))

    def example(self) -> Batch:
        """Return a batch of one sample, padded to the maximal length."""
        return self._padded([self[0] if self.first is None else self.first], self._seq_len)

    def _padded(self, samples: list[Batch], tokens: int) -> Batch:
        batch = {}
        for name, first in samples[0].items():
            pad = self._padding.get(name)
            if pad is None:
                batch[name] = torch.stack([sample[name] for sample in samples])
                continue
            shape = (*(tokens,) * pad.dims, *first.shape[pad.dims :])
            batch[name] = padded = first.new_full((len(samples), *shape), pad.value)
            for row, sample in zip(padded, samples, strict=True):
                row[tuple(slice(size) for size in sample[name].shape)] = sample[name]
        if self.variable is not None and REAL not in batch:
            lengths = torch.tensor([len(sample["inputs"]) for sample in samples])
            batch[REAL] = torch.arange(tokens) < lengths[:, None]
        return batch

    def _wrong(self, i: int | str, reason: str, remedy: str) -> DataError:
        return DataError("data.name", self.name, f"{self._part} sample {i} {reason}", remedy)

    def _read(self, i: int | str, sample: Any) -> Batch:
        """Convert a sample to a dict of tensors of its own and check it alone."""
        if isinstance(sample, tuple) and len(sample) == len(REQUIRED):
            numbers = (int, float, np.ndarray, np.generic)
            pair = (torch.as_tensor(x) if isinstance(x, numbers) else x for x in sample)
            sample = dict(zip(REQUIRED, pair, strict=True))
        fields = "dict(inputs=tensor, targets=tensor)"
        form = f"return {fields}, with the other fields that the model takes, or (inputs, targets)"
        if not isinstance(sample, Mapping):
            raise self._wrong(i, f"is a {type(sample).__name__} and not a dict", form)
        if missing := [name for name in REQUIRED if name not in sample]:
            reason = f"has no {missing[0]!r} (it has {', '.join(map(str, sample)) or 'nothing'})"
            raise self._wrong(i, reason, form)
        for name, value in sample.items():
            if not isinstance(name, str):
                raise self._wrong(i, f"has a field named {name!r}", "name fields by texts")
            if not isinstance(value, Tensor):
                remedy = "convert it with torch.as_tensor"
                if name == "targets" and isinstance(value, Mapping | tuple | list):
                    remedy = "stack the targets of several tasks in one tensor, [..., tasks],"
                    remedy += " which a loss of your own divides: loss.name=package.function"
                raise self._wrong(i, f"has a {type(value).__name__} as {name!r}", remedy)
        inputs = sample["inputs"]
        longer = inputs.dim() and inputs.size(0) > self._seq_len
        # only token ids are limited to seq_len; images, for example, may have any size
        tokens = self._padding or (inputs.dim() == 1 and not inputs.is_floating_point())
        if longer and tokens:
            reason = f"has {inputs.size(0)} tokens, more than seq_len={self._seq_len}"
            remedy = f"truncate it, or write seq_len={inputs.size(0)}"
            raise self._wrong(i, reason, remedy)
        for name, pad in self._padding.items():
            if name not in sample:
                remedy = "remove it from the padding of VariableLength"
                raise self._wrong(i, f"has no {name!r}, which VariableLength pads", remedy)
            shape = list(sample[name].shape)
            if shape[: pad.dims] != [inputs.size(0) if inputs.dim() else None] * pad.dims:
                reason = f"has {name!r} of shape {shape} and inputs of {list(inputs.shape)}"
                needed = f"[{'T, ' * pad.dims}...]"
                remedy = f"with its padding its shape must be {needed} where inputs are [T, ...]"
                raise self._wrong(i, reason, remedy)
        # copied: the source may write the next one into the same memory
        return {name: value.clone() for name, value in sample.items()}

    def _compare(self, i: int | str, sample: Batch, first: Batch) -> None:
        if sample.keys() != first.keys():
            odd = ", ".join(sorted(map(repr, sample.keys() ^ first.keys())))
            reason = f"and sample 0 do not both have {odd}"
            raise self._wrong(i, reason, "return the same keys in all samples")
        for name, value in sample.items():
            other = first[name]
            if value.dtype != other.dtype:
                reason = f"has {name!r} of {value.dtype}, and sample 0 of {other.dtype}"
                raise self._wrong(i, reason, "return the same dtypes in all samples")
            dims = self._padding[name].dims if name in self._padding else 0  # of variable size
            if value.shape[dims:] != other.shape[dims:] or value.dim() != other.dim():
                reason = f"has {name!r} of shape {list(value.shape)}, sample 0 {list(other.shape)}"
                remedy = "return samples of equal shapes, or give Data a variable=VariableLength()"
                if self.variable is not None:
                    remedy = f"return equal shapes, or give VariableLength a padding for {name!r}"
                raise self._wrong(i, reason, remedy)


def checked_source(
    source: Any, part: str, name: str, config: Config, variable: VariableLength | None
) -> CheckedSource:
    """Wrap a map-style source of function `name`. Raises DataError if it is none, or if a sample
    differs when it is read again."""
    indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if isinstance(source, IterableDataset | Mapping) or not indexed:
        reason = f"its {part} part is a {type(source).__name__}, which is not read by [i]"
        fix = "give a map-style dataset, with len() and [i], or validation=None of a stream"
        raise DataError("data.name", name, reason, fix)
    if len(source) < 1:
        reason = f"its {part} part is empty"
        raise DataError("data.name", name, reason, "it needs at least one sample")
    if variable is not None:
        _check_variable(variable, name, len(source) if part == "training" else None)
    made = CheckedSource(source, part, name, config.seq_len, variable, config.seed)
    made.refuse_other_readings()
    return made


def _check_variable(variable: VariableLength, name: str, size: int | None) -> None:
    def wrong(reason: str, remedy: str) -> DataError:
        return DataError("data.name", name, f"its VariableLength has {reason}", remedy)

    if not isinstance(variable.bucket, int) or variable.bucket < 1:
        raise wrong(f"bucket={variable.bucket!r}", "a number of tokens, such as 64")
    for field, pad in variable.padding.items():
        if not isinstance(pad, Pad) or pad.dims < 1:
            raise wrong(f"{pad!r} as padding of {field!r}", "Pad(value=0, dims=1)")
    if "inputs" not in variable.padding:
        raise wrong("no padding for 'inputs'", 'Write padding={"inputs": Pad(), ...}')
    if variable.lengths is not None and size not in (None, len(variable.lengths)):
        reason = f"{len(variable.lengths)} lengths for {size} training samples"
        raise wrong(reason, "give the length of each sample, or lengths=None")


class SimilarLengthBatchSampler(GlobalBatchSampler):
    """The same samples in every window of `_WINDOW` steps, regrouped so that a step's samples have
    similar lengths.

    A window's samples are sorted by length and cut into steps, which are then shuffled. A step that
    spans two epochs stays in its place. So the order depends on seed, step and lengths alone, and
    no step has a sample twice if an epoch has two steps or more.
    """

    def __init__(
        self, size: int, config: Config, dp_rank: int, step: int, lengths: Sequence[int]
    ) -> None:
        super().__init__(size, config, dp_rank, step)
        self._lengths = np.asarray(lengths)
        self._steps = _WINDOW

    def _samples(self, steps: np.ndarray) -> np.ndarray:
        size, batch = self._size, self._global
        samples = self._without_copies(steps[0] * batch, len(steps) * batch).reshape(-1, batch)
        first, last = steps * batch // size, ((steps + 1) * batch - 1) // size  # epochs
        for epoch in np.unique(first[first == last]):
            inside = np.flatnonzero((first == epoch) & (last == epoch))
            ids, count = samples[inside].reshape(-1), len(inside)
            rows = ids[np.argsort(self._lengths[ids], kind="stable")].reshape(count, batch)
            turn = steps[inside[0]] // count * count  # each window is shuffled differently
            samples[inside] = rows[shuffled_index(turn + np.arange(count), count, self._seed)]
        return samples[:, self._offset : self._offset + self._local]

    def _without_copies(self, first: int, count: int) -> np.ndarray:
        """Return `count` samples of the order from position `first`. In a step that spans two
        epochs, a sample of the old epoch is not repeated: the new epoch reads it later."""
        size, batch = self._size, self._global
        order = lambda first, count: shuffled_index(first + np.arange(count), size, self._seed)  # noqa: E731
        samples = order(first, count)
        for start in range(first // size * size, first + count, size):
            before = start % batch  # samples of the previous epoch in this epoch's first step
            if not before or size < batch:
                continue
            # a short epoch ends before the step that it shares with the next one
            ids = order(start, min(2 * batch, size - (start + size) % batch))
            new = np.flatnonzero(~np.isin(ids, order(start - before, before)))[: batch - before]
            ids = np.concatenate([ids[new], np.delete(ids, new)])
            low, end = max(first, start), min(first + count, start + len(ids))
            samples[low - first : max(low, end) - first] = ids[low - start : max(low, end) - start]
        return samples
