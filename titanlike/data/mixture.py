"""Several corpora in one run (`data=mixture`), by weights that may change over the steps.

1. `Quotas` deals the sequences of each step to the sources, so that after every step each source has
   had its share of all sequences so far, to within one.
2. A source's n-th sequence in the run is the n-th of its own shuffled order, and another one in each
   epoch of the source. So nothing is repeated before all of a source has been read.
3. The sequences of a step are shuffled among each other.

All of it depends on (seed, step, weights, batch size) alone: not on the mesh, and a run resumes at any step.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from titanlike.config.schema import Config, MixtureData
from titanlike.data.errors import DataError
from titanlike.data.fingerprint import source_fingerprint
from titanlike.data.sampler import GlobalBatchSampler
from titanlike.data.shuffle import shuffled_index
from titanlike.data.sources import Data, Source

Points = list[tuple[float, float]]  # (step, weight), steps rise


def points_of(weight: Any) -> Points:
    """A weight as points. Raises ValueError for what is none."""
    if isinstance(weight, (int, float)) and not isinstance(weight, bool):
        points = [(0.0, float(weight))]
    else:
        points = [(float(step), float(value)) for step, value in weight]
    rising = all(a < b for (a, _), (b, _) in zip(points, points[1:], strict=False))
    if not points or not rising or not all(0 <= value < float("inf") for _, value in points):
        raise ValueError
    return points


def weight_at(points: Points, step: int) -> float:
    """Between two points on the line between them, else as at the nearest."""
    at = bisect_right(points, (step, float("inf")))
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (step - x0) / (x1 - x0)


class Quotas:
    """How many sequences of each step are each source's."""

    def __init__(self, weights: Sequence[Points], batch_size: int) -> None:
        self._weights, self._batch = list(weights), batch_size
        self._constant = all(len(points) == 1 for points in weights)
        self._last = max(points[-1][0] for points in weights)
        self._shares: list[float] | None = None
        self._due: list[float]
        self._given: list[int]
        self._restart()

    def before(self, step: int) -> list[int]:
        """How many each source has had before a step, which counts from 0."""
        if step < self._step:
            self._restart()
        while self._step < step:
            self.deal()
        return list(self._given)

    def deal(self) -> list[int]:
        """Of the next step, after which it goes on."""
        shares = self._shares_now()
        self._due = [
            due + self._batch * share for due, share in zip(self._due, shares, strict=True)
        ]
        need = [due - given for due, given in zip(self._due, self._given, strict=True)]
        dealt = [max(0, int(one // 1)) for one in need]
        left = self._batch - sum(dealt)
        by_need = sorted(range(len(need)), key=lambda k: (dealt[k] - need[k], k))
        for k in by_need[:left] if left > 0 else []:
            dealt[k] += 1
        for k in [k for k in reversed(by_need) if dealt[k]][: max(0, -left)]:
            dealt[k] -= 1
        self._given = [given + one for given, one in zip(self._given, dealt, strict=True)]
        self._step += 1
        return dealt

    def _restart(self) -> None:
        self._step = 0
        self._due, self._given = [0.0] * len(self._weights), [0] * len(self._weights)

    def _shares_now(self) -> list[float]:
        if self._shares is not None and (self._constant or self._step > self._last + 1):
            return self._shares
        weights = [weight_at(points, self._step) for points in self._weights]
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        return self._shares


class MixtureSource:
    """The samples of several sources, one source after the other."""

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[Points], seeds: list[int]
    ) -> None:
        self.sources, self.weights, self.seeds = list(sources), list(weights), seeds
        self.sizes = [len(source) for source in sources]
        self.starts = [0, *np.cumsum(self.sizes).tolist()]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        at = bisect_right(self.starts, i) - 1
        return self.sources[at][i - self.starts[at]]


class MixtureBatchSampler(GlobalBatchSampler):
    """A dp rank's samples of a mixture, see the head of this file."""

    def __init__(self, source: MixtureSource, config: Config, dp_rank: int, step: int) -> None:
        super().__init__(len(source), config, dp_rank, step)
        self._source = source
        self._quotas = Quotas(source.weights, config.batch_size)

    def _samples(self, steps: np.ndarray) -> np.ndarray:
        return np.stack([self._of_step(int(step)) for step in steps])

    def _of_step(self, step: int) -> np.ndarray:
        source, before = self._source, self._quotas.before(step)
        dealt = self._quotas.deal()
        found = []
        for k, (first, count) in enumerate(zip(before, dealt, strict=True)):
            places = np.arange(first, first + count)
            if count:
                order = shuffled_index(places, source.sizes[k], source.seeds[k])
                found.append(source.starts[k] + order)
        together = np.concatenate(found)
        places = step * self._global + np.arange(self._global)
        shuffled = together[shuffled_index(places, self._global, self._seed + 1)]
        return shuffled[self._offset : self._offset + self._local]


class MixedValidation:
    """Sequences of all sources' validation data, in their shares of the first step."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[Points], count: int) -> None:
        quotas = Quotas([[(0.0, points[0][1])] for points in weights], 1)
        self._sources, seen = list(sources), [0] * len(sources)
        self._places: list[tuple[int, int]] = []
        for _ in range(count):
            k = quotas.deal().index(1)
            self._places.append((k, seen[k] % len(sources[k])))
            seen[k] += 1

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        k, at = self._places[i]
        return self._sources[k][at]


def mixture_of(opened: Mapping[str, Data], data: MixtureData, config: Config, note: str) -> Data:
    """The mixture of sources that are open. Raises DataError for those of different tokenizers."""
    (first, one), *others = opened.items()
    for name, other in others:
        if (other.tokenizer, other.vocab_size) != (one.tokenizer, one.vocab_size):
            reason = f"has another tokenizer than {first}"
            fix = "Tokenize both with the same one (data.tokenizer is that of text)"
            raise DataError(f"data.sources.{name}", data.sources[name], reason, fix)
    weights = [points_of(data.sources[name]["weight"]) for name in opened]
    seeds = [_seed(config.seed, name) for name in opened]
    train = MixtureSource([source.train for source in opened.values()], weights, seeds)
    count = max(1, config.validation.batches) * config.batch_size
    validation = MixedValidation([each.validation for each in opened.values()], weights, count)
    quotas = Quotas(weights, config.batch_size)

    def progress(steps: int) -> dict[str, float]:
        had = zip(opened, quotas.before(steps), train.sizes, strict=True)
        return {f"epochs/{name}": given / size for name, given, size in had}

    parts = {name: source_fingerprint(source.train) for name, source in opened.items()}
    total = sum(points[0][1] for points in weights)
    shares = ", ".join(
        f"{name} {points[0][1] / total:.3g}{' at first' if len(points) > 1 else ''} of "
        f"{len(source.train):,} sequences"
        for (name, source), points in zip(opened.items(), weights, strict=True)
    )
    return Data(
        train,
        validation,
        one.vocab_size,
        f"{shares}{note}",
        boundary=one.boundary,
        decode=one.decode,
        encode=one.encode,
        tokenizer=one.tokenizer,
        fingerprint=json.dumps({"weights": [*zip(opened, weights, strict=True)], "sources": parts}),
        progress=progress,
    )


def _seed(seed: int, name: str) -> int:
    """Of a source's own order: it does not depend on the sources beside it."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
