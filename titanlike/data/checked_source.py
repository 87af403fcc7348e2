"""A user's own source: each sample is checked against the first, and padded if lengths differ.

Shapes: B samples in a batch, T tokens of a sample or of the longest in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from titanlike.data.errors import DataError
from titanlike.data.sources import Batch, Data, Pad, Source, VariableLength

REQUIRED = ("inputs", "targets")


def with_checked_samples(data: Data, name: str, seq_len: int) -> Data:
    """The same data, with samples that are checked when they are read.

    name: of the user's function. Raises DataError for an empty part and an invalid `data.variable`.
    """
    if isinstance(data.train, CheckedSource):
        return data
    checked, variable = {}, data.variable
    for part, source in (("training", data.train), ("validation", data.validation)):
        if len(source) < 1:
            reason = f"its {part} part is empty"
            raise DataError("data.name", name, reason, "It needs at least one sample")
        checked[part] = CheckedSource(source, name, part, seq_len, variable)
    if variable is not None:
        _check_variable(variable, name, len(data.train))
        checked["training"].lengths = variable.lengths
    return replace(data, train=checked["training"], validation=checked["validation"])


class CheckedSource:
    """Reads a user's source. Raises DataError for an invalid sample, or one unlike the first."""

    lengths: Sequence[int] | None = None  # of all samples, if batches should have similar lengths

    def __init__(
        self, source: Source, name: str, part: str, seq_len: int, variable: VariableLength | None
    ) -> None:
        self._source, self._name, self._part = source, name, part
        self._seq_len, self.variable = seq_len, variable
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
        """The samples as one batch [B, ...], padded where lengths differ."""
        if self.variable is None:
            return stack(samples)
        bucket = self.variable.bucket
        longest = max(sample["inputs"].size(0) for sample in samples)
        return self._padded(samples, min(-(-longest // bucket) * bucket, self._seq_len))

    def example(self) -> Batch:
        """A batch of one sample, of the maximal length."""
        samples = [self[0]]
        return stack(samples) if self.variable is None else self._padded(samples, self._seq_len)

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
        return batch

    def _wrong(self, i: int, reason: str, remedy: str) -> DataError:
        return DataError("data.name", self._name, f"{self._part} sample {i} {reason}", remedy)

    def _read(self, i: int) -> Batch:
        """A sample, checked by itself."""
        sample = self._source[i]
        fields = "dict(inputs=tensor, targets=tensor)"
        form = f"Return {fields}, with the other fields that the model takes"
        if not isinstance(sample, Mapping):
            raise self._wrong(i, f"is a {type(sample).__name__} and not a dict", form)
        if missing := [name for name in REQUIRED if name not in sample]:
            reason = f"has no {missing[0]!r} (it has {', '.join(map(str, sample)) or 'nothing'})"
            raise self._wrong(i, reason, form)
        for name, value in sample.items():
            if not isinstance(value, Tensor):
                remedy = "Convert it with torch.as_tensor"
                raise self._wrong(i, f"has a {type(value).__name__} as {name!r}", remedy)
        inputs = sample["inputs"]
        longer = inputs.dim() and inputs.size(0) > self._seq_len
        # inputs other than tokens, such as images, may have any size
        tokens = self._padding or (inputs.dim() == 1 and not inputs.is_floating_point())
        if longer and tokens:
            reason = f"has {inputs.size(0)} tokens, more than seq_len={self._seq_len}"
            remedy = f"Truncate it, or write seq_len={inputs.size(0)}"
            raise self._wrong(i, reason, remedy)
        for name, pad in self._padding.items():
            if name not in sample:
                remedy = "Remove it from the padding of VariableLength"
                raise self._wrong(i, f"has no {name!r}, which VariableLength pads", remedy)
            shape = list(sample[name].shape)
            if shape[: pad.dims] != [inputs.size(0) if inputs.dim() else None] * pad.dims:
                reason = f"has {name!r} of shape {shape} and inputs of {list(inputs.shape)}"
                needed = f"[{'T, ' * pad.dims}...]"
                remedy = f"With its padding its shape must be {needed} where inputs are [T, ...]"
                raise self._wrong(i, reason, remedy)
        return dict(sample)

    def _compare(self, i: int, sample: Batch, first: Batch) -> None:
        if sample.keys() != first.keys():
            odd = ", ".join(sorted(map(repr, sample.keys() ^ first.keys())))
            reason = f"and sample 0 do not both have {odd}"
            raise self._wrong(i, reason, "Return the same keys in all samples")
        for name, value in sample.items():
            other = first[name]
            if value.dtype != other.dtype:
                reason = f"has {name!r} of {value.dtype}, and sample 0 of {other.dtype}"
                raise self._wrong(i, reason, "Return the same dtypes in all samples")
            dims = self._padding[name].dims if name in self._padding else 0  # of variable size
            if value.shape[dims:] != other.shape[dims:] or value.dim() != other.dim():
                reason = f"has {name!r} of shape {list(value.shape)}, sample 0 {list(other.shape)}"
                remedy = "Return samples of equal shapes, or give Data a variable=VariableLength()"
                if self.variable is not None:
                    remedy = f"Return equal shapes, or give VariableLength a padding for {name!r}"
                raise self._wrong(i, reason, remedy)


def stack(samples: list[Batch]) -> Batch:
    """Samples of equal shapes as a batch [B, ...]."""
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
        raise wrong(reason, "Give the length of each sample, or lengths=None")
