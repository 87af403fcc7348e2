"""Samples of a user's source, checked against the first one and padded.

Shapes: B samples in a batch, T tokens in a sample, or in the longest sample of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanlike.config.schema import Config
from titanlike.data.kinds import DataError
from titanlike.data.order import GlobalBatchSampler, SimilarLengthBatchSampler
from titanlike.data.sources import Batch, Source, VariableLength, stack

REQUIRED = ("inputs", "targets")


@dataclass(frozen=True)
class Call:
    """A user's function with its arguments; for a stream it is called once per reader."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    reader: dict[str, int]  # `reader`, `readers`, `seed`: those that the function accepts

    def __call__(self, **reader: int) -> Any:
        given = self.reader | {n: value for n, value in reader.items() if n in self.reader}
        return self.function(**self.arguments, **given)


class CheckedSource:
    """Reads a user's source. Raises DataError for an invalid sample, or one that differs in form
    from the first."""

    lengths: Sequence[int] | None = None  # of all samples, to batch samples of similar lengths

    def __init__(
        self, source: Source, part: str, name: str, seq_len: int, variable: VariableLength | None
    ) -> None:
        """part: "training" or "validation"; name: the user's function's, for errors."""
        self._source, self.name, self._part = source, name, part
        self._seq_len, self.variable = seq_len, variable
        self._padding = {} if variable is None else variable.padding
        self.first: Batch | None = None

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> Batch:
        if self.first is None:
            self.first = self._read(0, self._source[0])
            if i == 0:
                return self.first
        return self.check(i, self._source[i])

    def check(self, i: int | str, sample: Any) -> Batch:
        """Return the sample after comparing it with the first one. i: its index, or for a stream
        its place in words."""
        checked = self._read(i, sample)
        if self.first is not None:
            self._compare(i, checked, self.first)
        return checked

    def batch_sampler(self, config: Config, dp_rank: int, step: int) -> GlobalBatchSampler:
        if self.lengths is None:
            return GlobalBatchSampler(len(self), config, dp_rank, step)
        return SimilarLengthBatchSampler(len(self), config, dp_rank, step, self.lengths)

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
        return batch

    def _wrong(self, i: int | str, reason: str, remedy: str) -> DataError:
        return DataError("data.name", self.name, f"{self._part} sample {i} {reason}", remedy)

    def _read(self, i: int | str, sample: Any) -> Batch:
        """Convert a sample to a dict of tensors and check it alone."""
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
            if not isinstance(value, Tensor):
                remedy = "convert it with torch.as_tensor"
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
        return dict(sample)

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
