"""A mixture of corpora: shares as declared, nothing repeated early, the same in every layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.models import tiny
from support.runs import assert_goes_on
from support.saved_runs import a_run
from titanlike.core.config.groups.data import MixtureData
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.schema import Config
from titanlike.core.data import registry
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.data.sources import data_fingerprint, fingerprint_changes
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.formats.mixture import MixtureBatchSampler, Quotas, mixture_of, points_of, weight_at
from titanlike.formats.tokenize_corpus import Settings, tokenize_corpus_files

WEIGHTS: dict[str, Any] = {"a": 0.6, "b": 0.3, "c": 0.1}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokens of two, text of a third: the first byte of a sequence tells which."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in (("a", 40), ("b", 10), ("c", 20)):
        (folder / f"{name}-text").mkdir()
        for number in range(count):
            text = f"{name}{number:03d}" * 10
            (folder / f"{name}-text" / f"{number:03d}.txt").write_text(text)
        if name != "c":
            text_folder = folder / f"{name}-text"
            tokenize_corpus_files(text_folder, folder / name, Settings("bytes"), 1)
    places = {"a": folder / "a", "b": folder / "b", "c": folder / "c-text"}
    return places | {"cache": folder / "cache"}


def mixed(corpora: dict[str, Path], weights: dict[str, Any] = WEIGHTS, **changes: Any) -> Config:
    sources = {name: {"path": str(corpora[name]), "weight": weights[name]} for name in weights}
    data = MixtureData(sources=sources, cache=str(corpora["cache"]), validation_fraction=0.1)
    return replace(tiny(), data=replace(data, **changes), seq_len=8, batch_size=8)


def order(config: Config, steps: int, start: int = 0) -> list[list[int]]:
    """The ids of each step's sequences, of all dp ranks in their order."""
    source = open_data(config).train
    ranks = [
        islice(batches(source, config, dp_rank=rank, start_step=start), steps)
        for rank in range(config.dp)
    ]
    each = zip(*ranks, strict=True)
    return [torch.cat([batch["inputs"] for batch in step]).tolist() for step in each]


def test_the_order_is_the_same_in_every_layout_and_after_a_resume(corpora: dict[str, Path]) -> None:
    schedule = {"a": [[0, 0.9], [20, 0.2]], "b": 0.1, "c": [[0, 0.0], [20, 0.7]]}
    config = replace(mixed(corpora, schedule), batch_size=64)
    whole = order(config, 44)
    assert order(replace(config, dp=4), 44) == whole
    for start in (7, 40):
        assert order(replace(config, dp=2), 44 - start, start) == whole[start:]
    assert order(replace(config, seed=1), 5) != whole[:5]
    first = [Counter(chr(row[0]) for row in step if row[0] < 256) for step in whole]
    assert sum(count["c"] for count in first[:3]) < sum(count["c"] for count in first[20:23])


@pytest.mark.parametrize(
    "weights",
    [
        [0.7, 0.3],
        [5, 3, 1.5, 0.5],
        [1e-3, 1],
        [[[0, 1], [400, 0]], [[0, 0], [400, 1]]],
        [0, 1, [[200, 1], [201, 9]]],
    ],
)
@pytest.mark.parametrize("batch_size", [1, 16])
def test_sources_have_their_declared_shares_at_any_step(
    weights: list[Any], batch_size: int
) -> None:
    points = [points_of(weight) for weight in weights]
    quotas, due = Quotas(points, batch_size), np.zeros(len(points))
    for step in range(600):
        now = np.array([weight_at(each, step) for each in points])
        due += batch_size * now / now.sum()
        dealt = quotas.deal()
        assert min(dealt) >= 0 and sum(dealt) == batch_size
        off = np.abs(np.array(quotas.before(step + 1)) - due)
        assert off.max() < 1 + 1e-6, f"step {step}"
    shares = np.array(quotas.before(600)) / (600 * batch_size)
    assert np.abs(shares - due / due.sum()).max() < 0.01
    assert Quotas(points, batch_size).before(377) == quotas.before(377)


def test_a_source_finishes_its_epoch_before_it_repeats(corpora: dict[str, Path]) -> None:
    config, steps = replace(mixed(corpora), batch_size=1), 320
    data = open_data(config)
    sizes = dict(zip("abc", data.train.sizes, strict=True))
    seen: dict[str, list[int]] = {name: [] for name in sizes}
    sampler = MixtureBatchSampler(data.train, config, 0, 0)
    for (i,) in (next(sampler) for _ in range(steps)):
        at = next(k for k in (2, 1, 0) if i >= data.train.starts[k])
        seen["abc"[at]].append(i - data.train.starts[at])
    for name, size in sizes.items():
        epochs = [seen[name][at : at + size] for at in range(0, len(seen[name]), size)]
        assert all(sorted(epoch) == [*range(size)] for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])
        assert data.progress(steps)[f"epochs/{name}"] == len(seen[name]) / size
    first, second = seen["b"][: sizes["b"]], seen["b"][sizes["b"] : 2 * sizes["b"]]
    assert len(first) == len(second) and first != second


def test_validation_has_the_declared_shares(corpora: dict[str, Path]) -> None:
    config = replace(mixed(corpora), validation=Validation(batches=4))
    source = open_data(config).validation
    first = Counter(
        chr(byte) for i in range(10) for byte in source[i]["inputs"].tolist() if byte < 256
    )
    letters = {name: first[name] for name in "abc"}
    assert letters["a"] > letters["b"] > letters["c"] > 0


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ({}, "names no source"),
        ({"a": "x"}, "has a path and a weight"),
        ({"a": {"path": "x", "weight": -1}}, "data.sources.a.weight=0.5"),
        ({"a": {"path": "x", "weight": [[5, 1], [2, 1]]}}, "rising steps"),
        ({"a": {"path": "/no/such", "weight": 1}}, "no such file or folder"),
        ({"a": {"path": "/no", "weight": [[0, 1], [9, 0]]}}, "all weights are 0 at step 9"),
    ],
)
def test_an_invalid_mixture_is_refused_before_launch(sources: Any, told: str) -> None:
    config = replace(tiny(), data=MixtureData(sources=sources))
    assert told in "\n".join(map(str, registry.problems(config)))


def test_sources_of_different_tokenizers_are_refused(corpora: dict[str, Path]) -> None:
    config = mixed(corpora, {"a": 0.5, "c": 0.5})
    opened = {name: open_data(mixed(corpora, {name: 1.0})) for name in "ac"}
    assert mixture_of(opened, config.data, config).vocab_size == 257
    opened["c"] = replace(opened["c"], tokenizer="another")
    with pytest.raises(DataError, match="has another tokenizer than a"):
        mixture_of(opened, config.data, config)


def test_changed_weights_or_sources_are_different_data(corpora: dict[str, Path]) -> None:
    def of(config: Config) -> dict[str, Any]:
        return data_fingerprint(open_data(config), config.data)

    first = of(mixed(corpora))
    assert fingerprint_changes(first, of(replace(mixed(corpora), dp=2))) == []
    assert fingerprint_changes(first, of(mixed(corpora, WEIGHTS | {"a": 0.5})))
    assert fingerprint_changes(first, of(mixed({**corpora, "a": corpora["b"]})))


@pytest.mark.slow
def test_a_run_resumes_to_the_last_bit_and_counts_epochs(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    config = replace(mixed(corpora), steps=4, model=a_run(tmp_path).model, dp=2)
    assert_goes_on(config, tmp_path)
    [*_, last] = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert last["epochs/a"] > last["epochs/c"] > 0
