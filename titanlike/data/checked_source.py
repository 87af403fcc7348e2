"""A user's own samples: each is checked against the first, and padded where lengths differ.

Legend of shapes: B samples of a batch, T tokens of a sample or of the longest of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from titanlike.data.errors import DataError
from titanlike.data.sources import Data, Pad, Source, VariableLength

Batch = dict[str, Tensor]
REQUIRED = ("inputs", "targets")


def with_checked_samples(data: Data, name: str, seq_len: int) -> Data:
    """The same data, whose samples are checked when they are read.

    name: of the function that made it. Raises DataError where there are no samples, and for what is
    wrong with `data.variable`.
    """
    if isinstance(data.train, CheckedSource):
        return data
    sources = {"training": data.train, "validation": data.validation}
    for part, source in sources.items():
        if len(source) < 1:
            raise DataError(
                "data.name", name, f"its {part} part is empty", "Let it have a sequence"
            )
    variable = data.variable
    if variable is not None:
        _check_variable(variable, name, len(data.train))
    train, validation = (
        CheckedSource(source, name, part, seq_len, variable) for part, source in sources.items()
    )
    train.lengths = None if variable is None else variable.lengths
    return replace(data, train=train, validation=validation)


class CheckedSource:
    """A source of a user's own. Its samples raise DataError where one is not like the first."""

    lengths: Sequence[int] | None = None  # of the samples, where batches are to be of similar ones

    def __init__(
        self, source: Source, name: str, part: str, seq_len: int, variable: VariableLength | None
    ) -> None:
        self._source, self._name, self._part = source, name, part
        self._seq_len, self._variable = seq_len, variable
        self._padding = {} if variable is None else variable.padding
        self._first: Batch | None = None

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> Batch:
        if self._first is None:
            self._first = self._read(0)
            if i == 0:
                return self._first
        sample = self._read(i)
        self._compare(i, sample, self._first)
        return sample

    def batch(self, samples: list[Batch]) -> Batch:
        """The samples as one, [B, ...], those that differ in length padded."""
        if self._variable is None:
            return stack(samples)
        bucket = self._variable.bucket
        longest = max(sample["inputs"].size(0) for sample in samples)
        return self._padded(samples, min(-(-longest // bucket) * bucket, self._seq_len))

    def example(self) -> Batch:
        """A batch of one sample, as long as one can be."""
        return (
            stack([self[0]]) if self._variable is None else self._padded([self[0]], self._seq_len)
        )

    def _padded(self, samples: list[Batch], tokens: int) -> Batch:
        batch = {}
        for name, first in samples[0].items():
            pad = self._padding.get(name)
            if pad is None:
                batch[name] = torch.stack([sample[name] for sample in samples])
                continue
            shape = (*(tokens,) * pad.dims, *first.shape[pad.dims :])
            batch[name] = whole = first.new_full((len(samples), *shape), pad.value)
            for row, sample in zip(whole, samples, strict=True):
                row[tuple(slice(size) for size in sample[name].shape)] = sample[name]
        return batch

    def _wrong(self, i: int, reason: str, remedy: str) -> DataError:
        return DataError("data.name", self._name, f"{self._part} sample {i} {reason}", remedy)

    def _read(self, i: int) -> Batch:
        """A sample that can be used by itself."""
        sample = self._source[i]
        form = "Let it be dict(inputs=tensor, targets=tensor), and more where the model takes it"
        if not isinstance(sample, Mapping):
            raise self._wrong(i, f"is a {type(sample).__name__} and no dict", form)
        if missing := [name for name in REQUIRED if name not in sample]:
            reason = f"has no {missing[0]!r} (it has {', '.join(map(str, sample)) or 'nothing'})"
            raise self._wrong(i, reason, form)
        for name, value in sample.items():
            if not isinstance(value, Tensor):
                remedy = "Make a tensor of it with torch.as_tensor"
                raise self._wrong(i, f"has a {type(value).__name__} as {name!r}", remedy)
        inputs = sample["inputs"]
        longer = inputs.dim() and inputs.size(0) > self._seq_len
        # inputs that are no tokens, such as images, may have any size
        tokens = self._padding or (inputs.dim() == 1 and not inputs.is_floating_point())
        if longer and tokens:
            reason = f"has {inputs.size(0)} tokens, more than seq_len={self._seq_len}"
            remedy = f"Cut it, or write seq_len={inputs.size(0)}"
            raise self._wrong(i, reason, remedy)
        for name, pad in self._padding.items():
            if name not in sample:
                remedy = "Leave it out of the padding of VariableLength"
                raise self._wrong(i, f"has no {name!r}, which is to be padded", remedy)
            shape = list(sample[name].shape)
            if shape[: pad.dims] != [inputs.size(0) if inputs.dim() else None] * pad.dims:
                reason = f"has {name!r} of shape {shape} and inputs of {list(inputs.shape)}"
                size = ", ".join(["T"] * pad.dims)
                remedy = f"With its padding the shape must be [{size}, ...], inputs being [T, ...]"
                raise self._wrong(i, reason, remedy)
        return dict(sample)

    def _compare(self, i: int, sample: Batch, first: Batch) -> None:
        if sample.keys() != first.keys():
            odd = ", ".join(sorted(map(repr, sample.keys() ^ first.keys())))
            reason = f"and sample 0 do not both have {odd}"
            raise self._wrong(i, reason, "Give all samples the same keys")
        for name, value in sample.items():
            other = first[name]
            if value.dtype != other.dtype:
                reason = f"has {name!r} of {value.dtype}, and sample 0 of {other.dtype}"
                raise self._wrong(i, reason, "Give all samples the same dtypes")
            free = self._padding[name].dims if name in self._padding else 0
            if value.shape[free:] != other.shape[free:] or value.dim() != other.dim():
                reason = f"has {name!r} of shape {list(value.shape)}, sample 0 {list(other.shape)}"
                remedy = "Give all samples the same shapes, or the Data a variable=VariableLength()"
                if self._variable is not None:
                    remedy = f"Give all the same, or VariableLength a padding for {name!r}"
                raise self._wrong(i, reason, remedy)


def stack(samples: list[Batch]) -> Batch:
    """Samples of one shape as a batch, [B, ...]."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _check_variable(variable: VariableLength, name: str, size: int) -> None:
    def wrong(reason: str, remedy: str) -> DataError:
        return DataError("data.name", name, f"its VariableLength has {reason}", remedy)

    if not isinstance(variable.bucket, int) or variable.bucket < 1:
        raise wrong(f"bucket={variable.bucket!r}", "Write a number of tokens, such as 64")
    for field, pad in variable.padding.items():
        if not isinstance(pad, Pad) or pad.dims < 1:
            raise wrong(f"{pad!r} as padding of {field!r}", "Write Pad(value=0, dims=1)")
    if "inputs" not in variable.padding:
        raise wrong("no padding for 'inputs'", 'Write padding={"inputs": Pad(), ...}')
    if variable.lengths is not None and len(variable.lengths) != size:
        reason = f"{len(variable.lengths)} lengths for {size} training samples"
        raise wrong(reason, "Give the length of each, or lengths=None")
