"""A mixture of several corpora (`data=mixture`), by weights that may change over the steps.

1. `Quotas` assigns the sequences of each step to the sources. After every step each source has had
   its share of all sequences so far, to within two sequences.
2. A source's n-th sequence in the run is the n-th of its own shuffled order, which differs in each
   of its epochs. So nothing repeats before all of a source has been read.
3. The sequences of a step are shuffled.

All of it depends on (seed, step, weights, batch size) alone, not on the mesh, and a run can resume
at any step.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.data import MixtureData, TextData, TokenData
from titanlike.core.config.schema import Config
from titanlike.core.data import kinds
from titanlike.core.data.kinds import DataError, Vocabulary
from titanlike.core.data.order import GlobalBatchSampler, shuffled_index
from titanlike.core.data.sources import Data, Source, documents_note, source_fingerprint
from titanlike.formats import text, token_files, token_folder, tokens

Points = list[tuple[float, float]]  # (step, weight), steps ascending
_EXAMPLE = "data.sources={web:{path:web/,weight:0.7},code:{path:code/,weight:0.3}}"


def open_data(data: MixtureData, config: Config) -> Data:
    """Open each source as data=tokens or data=text would, and mix them."""
    opened = dict[str, Data]()
    for name, source in data.sources.items():
        try:
            section = section_of_source(data, source)
            opened[name] = kinds.kind_of(section).open_data(section, replace(config, data=section))
        except DataError as error:
            wrong = error.problem
            key = wrong.key.replace("data.path", f"data.sources.{name}.path")
            raise DataError(key, wrong.value, wrong.reason, wrong.fix) from None
    return mixture_of(opened, data, config)


def vocabulary(data: MixtureData) -> Vocabulary:
    """Return the first source's vocabulary; all sources have the same."""
    try:
        first = section_of_source(data, next(iter(data.sources.values())))
    except (KeyError, TypeError, AttributeError, StopIteration):
        raise DataError("data.sources", data.sources, "names no source", _EXAMPLE) from None
    return kinds.vocabulary(first)


def section_of_source(data: MixtureData, source: Mapping[str, Any]) -> TokenData | TextData:
    """Return a source's own data section: data=tokens if its path is a token file or has an index,
    else data=text."""
    path = source["path"]
    places = [Path(one).expanduser() for one in ([path] if isinstance(path, str) else path)]
    common: dict[str, Any] = {
        "validation_fraction": data.validation_fraction,
        "documents": data.documents,
    }
    if all((p / token_folder.INDEX).exists() or p.suffix in (".bin", ".npy") for p in places):
        return TokenData(path=path, **common)
    common |= {"text_key": data.text_key, "tokenizer": data.tokenizer, "cache": data.cache}
    return TextData(path=str(path), **common)


def check_weights(sources: Any) -> Iterator[Problem]:
    """Yield errors of a `data.sources`: each source needs a path and a valid weight."""
    every = list[Points]()
    if not isinstance(sources, dict) or not sources:
        yield Problem("data.sources", sources, "names no source", _EXAMPLE)
        return
    for name, source in sources.items():
        key = f"data.sources.{name}"
        if not isinstance(source, dict) or set(source) != {"path", "weight"}:
            reason = "a source has a path and a weight, and nothing else"
            yield Problem(key, source, reason, f"{key}={{path:FOLDER,weight:0.5}}")
            continue
        try:
            every.append(points_of(source["weight"]))
        except (ValueError, TypeError):
            reason = "is neither a number of at least 0 nor [[step, weight], ...] with rising steps"
            fix = f"{key}.weight=0.5, or {key}.weight=[[0,0.9],[1000,0.1]]"
            yield Problem(f"{key}.weight", source["weight"], reason, fix)
    for step in sorted({int(step) for points in every for step, _ in points}):
        if not sum(weight_at(points, step) for points in every):
            reason = f"all weights are 0 at step {step}"
            yield Problem("data.sources", "", reason, _EXAMPLE)
            return


def _check_files(data: MixtureData, config: Config) -> Iterator[Problem]:
    for name, source in data.sources.items() if isinstance(data.sources, dict) else ():
        if not isinstance(source, dict) or "path" not in source:
            continue
        section = section_of_source(data, source)
        try:
            if isinstance(section, TokenData):
                parts = tokens.read_tokens(section).parts(data.validation_fraction)
                held = {part: files for part, files in parts.items() if files or part == "train"}
                yield from token_files.too_short(held, config.seq_len)
            else:
                text.check_first_records(section.path, data.text_key)
        except DataError as error:
            key = f"data.sources.{name}.path"
            yield replace(error.problem, key=key, value=source["path"])


CHECKS = (lambda data, _: check_weights(data.sources), _check_files, text.check_tokenizer)


def points_of(weight: Any) -> Points:
    """Convert a weight to points. Raises ValueError for an invalid one."""
    if isinstance(weight, (int, float)) and not isinstance(weight, bool):
        points = [(0.0, float(weight))]
    else:
        points = [(float(step), float(value)) for step, value in weight]
    rising = all(a < b for (a, _), (b, _) in zip(points, points[1:], strict=False))
    if not points or not rising or not all(0 <= value < float("inf") for _, value in points):
        raise ValueError
    return points


def weight_at(points: Points, step: int) -> float:
    """Interpolate the weight linearly at a step; constant outside the points."""
    index = bisect_right(points, (step, float("inf")))
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (step - x0) / (x1 - x0)


class Quotas:
    """The number of sequences of each source in each step."""

    def __init__(self, weights: Sequence[Points], batch_size: int) -> None:
        self._weights, self._batch = list(weights), batch_size
        self._constant = all(len(points) == 1 for points in weights)
        self._last = max(points[-1][0] for points in weights)
        self._shares: list[float] | None = None
        self._due: list[float]
        self._dealt: list[int]
        self._restart()

    def before(self, step: int) -> list[int]:
        """Return the number of sequences each source had before a step (steps count from 0)."""
        if step < self._step:
            self._restart()
        while self._step < step:
            self.deal()
        return list(self._dealt)

    def deal(self) -> list[int]:
        """Return the number of sequences of each source in the next step."""
        if self._shares is None or not (self._constant or self._step > self._last + 1):
            weights = [weight_at(points, self._step) for points in self._weights]
            self._shares = [weight / sum(weights) for weight in weights]
        self._due = [
            due + self._batch * share for due, share in zip(self._due, self._shares, strict=True)
        ]
        need = [due - before for due, before in zip(self._due, self._dealt, strict=True)]
        dealt = [max(0, int(share // 1)) for share in need]
        left = self._batch - sum(dealt)
        by_need = sorted(range(len(need)), key=lambda k: (dealt[k] - need[k], k))
        for k in by_need[:left] if left > 0 else []:
            dealt[k] += 1
        for k in [k for k in reversed(by_need) if dealt[k]][: max(0, -left)]:
            dealt[k] -= 1
        self._dealt = [before + new for before, new in zip(self._dealt, dealt, strict=True)]
        self._step += 1
        return dealt

    def _restart(self) -> None:
        self._step = 0
        self._due, self._dealt = [0.0] * len(self._weights), [0] * len(self._weights)


class MixtureSource(ConcatDataset[dict[str, torch.Tensor]]):
    """The concatenated samples of several sources."""

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[Points], seeds: list[int]
    ) -> None:
        super().__init__(cast(Any, sources))
        self.weights, self.seeds = list(weights), seeds
        self.sizes = [len(source) for source in sources]
        self.starts = [0, *self.cumulative_sizes]

    def batch_sampler(self, config: Config, dp_rank: int, step: int) -> GlobalBatchSampler:
        return MixtureBatchSampler(self, config, dp_rank, step)


class MixtureBatchSampler(GlobalBatchSampler):
    """A dp rank's samples of a mixture in each step, in the order that the module's docstring
    describes."""

    def __init__(self, source: MixtureSource, config: Config, dp_rank: int, step: int) -> None:
        super().__init__(len(source), config, dp_rank, step)
        self._source = source
        self._quotas = Quotas(source.weights, config.batch_size)

    def _samples(self, steps: np.ndarray) -> np.ndarray:
        return np.stack([self._of_step(int(step)) for step in steps])

    def _of_step(self, step: int) -> np.ndarray:
        source, before = self._source, self._quotas.before(step)
        dealt = self._quotas.deal()
        samples = []
        for k, (first, count) in enumerate(zip(before, dealt, strict=True)):
            places = np.arange(first, first + count)
            if count:
                order = shuffled_index(places, source.sizes[k], source.seeds[k])
                samples.append(source.starts[k] + order)
        places = step * self._global + np.arange(self._global)
        shuffled = np.concatenate(samples)[shuffled_index(places, self._global, self._seed + 1)]
        return shuffled[self._offset : self._offset + self._local]


class MixedValidation(ConcatDataset[dict[str, torch.Tensor]]):
    """All samples of all sources' validation data, each once; the first ones in the proportions of
    the first step, for as long as no source has ended."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[Points]) -> None:
        super().__init__(cast(Any, sources))
        self._shares = [points[0][1] for points in weights]

    @cached_property
    def _order(self) -> np.ndarray:
        """The samples' places in all sources, one after the other: 8 bytes a sample."""
        sizes = np.diff(self.cumulative_sizes, prepend=0)
        # a source's n-th sample comes when it is due; of weight 0, after all others
        due = [
            (np.arange(n) + 0.5) / s if s else np.full(n, np.inf)
            for n, s in zip(sizes, self._shares, strict=True)
        ]
        return np.argsort(np.concatenate(due), kind="stable")

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(int(self._order[i]))


def mixture_of(opened: Mapping[str, Data], data: MixtureData, config: Config) -> Data:
    """Mix opened sources. Raises DataError if their tokenizers differ."""
    (first_name, first), *others = opened.items()
    for name, other in others:
        if (other.tokenizer, other.vocab_size) != (first.tokenizer, first.vocab_size):
            reason = f"has another tokenizer than {first_name}"
            fix = "tokenize both with the same one (data.tokenizer is that of text)"
            raise DataError(f"data.sources.{name}", data.sources[name], reason, fix)
    weights = [points_of(data.sources[name]["weight"]) for name in opened]
    seeds = [seed_of(config.seed, name) for name in opened]
    sources = {name: cast(Source, source.train) for name, source in opened.items()}
    train = MixtureSource([*sources.values()], weights, seeds)
    held = [source.validation for source in opened.values()]
    quotas = Quotas(weights, config.batch_size)

    def progress(steps: int) -> dict[str, float]:
        had = zip(opened, quotas.before(steps), train.sizes, strict=True)
        return {f"epochs/{name}": read / size for name, read, size in had}

    parts = {name: source_fingerprint(source) for name, source in sources.items()}
    total = sum(points[0][1] for points in weights)
    shares = ", ".join(
        f"{name} {points[0][1] / total:.3g}{' at first' if len(points) > 1 else ''} of "
        f"{size:,} sequences"
        for name, size, points in zip(opened, train.sizes, weights, strict=True)
    )
    return replace(
        first,
        train=train,
        validation=MixedValidation(held, weights),
        description=shares + documents_note(config.data),
        fingerprint=json.dumps({"weights": [*zip(opened, weights, strict=True)], "sources": parts}),
        progress=progress,
    )


def seed_of(seed: int, name: str) -> int:
    """Derive the seed of a source's order, which does not depend on the other sources."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
