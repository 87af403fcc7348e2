"""What every kind of source promises: its order, that a sample comes once an epoch, what is held
out, what is counted. `docs/data.md` has the table of source by promise, with the tests."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.cells import cells
from support.models import LLAMA, tiny
from support.sources import (
    KINDS,
    MAPPED,
    OWN,
    STREAMS,
    by_step,
    documents_in,
    of_source,
)
from support.world import RankError, run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.groups.optimization import DecayLr
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches, validation_weights
from titanlike.core.data.registry import DataError, open_data, problems
from titanlike.core.data.sources import IGNORE
from titanlike.core.models.registry import resolve_model
from titanlike.core.optim.optimizer import learning_rate
from titanlike.core.training.loop import train
from titanlike.core.training.preflight import preflight
from titanlike.core.training.report import epochs
from titanlike.core.training.train_plan import make_plan

# whose samples are what is held out, and not the documents within them
_BY_SAMPLE = [*OWN, "token_files", "mixture", "data=tokens", "map_style", "lengths_differ"]


def kinds(*default: str, of: list[str] = KINDS) -> list[Any]:
    return cells({k: k for k in default}, {k: k for k in of if k not in default})


def parts_of(kind: str, inputs: torch.Tensor, targets: torch.Tensor) -> set[Any]:
    """The documents of a sample, or the sample."""
    if kind not in _BY_SAMPLE:
        return set(documents_in(inputs))
    return {inputs[targets != IGNORE].numpy().tobytes()}


def held_out(kind: str, config: Config) -> set[Any]:
    source = open_data(config).validation
    samples = (source[i] for i in range(min(len(source), config.batch_size)))
    return set().union(*(parts_of(kind, s["inputs"], s["targets"]) for s in samples))


def trained_on(kind: str, config: Config, steps: int) -> set[Any]:
    found = set[Any]()
    for rank in range(config.dp):
        for batch in islice(batches(open_data(config).train, config, dp_rank=rank), steps):
            for row in zip(batch["inputs"], batch["targets"], strict=True):
                found |= parts_of(kind, *row)
    return found


@pytest.mark.parametrize("kind", kinds("jsonl", "reshuffled", "drawn"))
def test_what_is_held_out_is_never_trained_on(kind: str, tmp_path: Path) -> None:
    """Though later epochs divide a stream's documents among its readers anew."""
    config = of_source(kind, tmp_path)
    held = held_out(kind, config)
    assert held
    trained = trained_on(kind, config, 180)  # three epochs of a stream
    assert len(trained) > 150 and not held & trained


def test_samples_that_cannot_be_told_again_are_not_held_out(tmp_path: Path) -> None:
    """A later epoch has them with other draws, and in another place."""
    with pytest.raises(DataError, match="data.name=.*noisy: .* or write validation.every=0"):
        open_data(of_source("noisy", tmp_path))
    assert open_data(of_source("noisy", tmp_path, validation=Validation(every=0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["text", "reshuffled", "drawn", "once", "token_files", *MAPPED[:-1]]
)
def test_every_layout_and_resume_reads_the_same_samples(kind: str, tmp_path: Path) -> None:
    """Also in later epochs, in which what is held out is left out."""
    one, two = (of_source(kind, tmp_path, dp=dp, workers=w) for dp, w in ((1, 0), (2, 1)))
    expected, _ = by_step(one, [], 0, 90)
    _, saved = by_step(one, [], 0, 20)
    found, _ = by_step(two, saved, 20, 70)
    assert found == expected[20:]


@pytest.mark.parametrize("kind", ["jsonl", "stateful"])
def test_a_resume_validates_on_what_the_run_holds_out(kind: str, tmp_path: Path) -> None:
    def of(every: int, count: int, **changes: Any) -> Config:
        return of_source(
            kind, tmp_path, validation=Validation(every=every, batches=count), **changes
        )

    def resumed(config: Config, saved: Any) -> Any:
        return by_step(config, saved, 3, 1)

    expected, _ = by_step(of(1, 2), [], 0, 4)
    _, saved = by_step(of(1, 2), [], 0, 3)
    for fewer in (of(1, 2), of(1, 1), of(0, 2)):  # others are still held out
        assert resumed(fewer, saved)[0] == expected[3:]
    more = r"holds out \d batches since its beginning .* write validation"
    for config in (of(1, 20), of(1, 2, batch_size=128)):
        with pytest.raises(DataError, match=more):
            resumed(config, saved)
    _, saved = by_step(of(0, 2), [], 0, 3)
    with pytest.raises(DataError, match="holds out 0 batches.* write validation.every=0, or"):
        resumed(of(1, 1), saved)


@pytest.mark.parametrize("kind", kinds("text", "token_files", "drawn", of=STREAMS))
def test_an_epoch_has_every_document_once(kind: str, tmp_path: Path) -> None:
    """In another order than the epoch before, except for streams that cannot shuffle."""
    no_buffer = {} if kind in OWN else {"shuffle_buffer": 0, "repeat": False}
    config = of_source(kind, tmp_path, validation=Validation(every=0), data=no_buffer)
    stream = batches(open_data(config).train, config, dp_rank=0)
    rows = [row for batch in islice(stream, 25 if kind in OWN else None) for row in batch["inputs"]]
    assert len({row.numpy().tobytes() for row in rows}) == len(rows)
    if kind not in (*OWN, "mixture"):
        seen = set().union(*map(documents_in, rows))
        assert len(seen) > 250, "until the first reader has no more"


@pytest.mark.parametrize(
    "kind, units", [("short_samples", ""), ("short_stream", ""), ("lengths_differ", "samples")]
)
def test_a_run_counts_the_tokens_that_samples_have(kind: str, units: str, tmp_path: Path) -> None:
    """Or refuses to count: a sample of 8 tokens is not one of seq_len=16."""
    config = of_source(kind, tmp_path)
    data = open_data(config)
    if units:
        assert make_plan(config, data).unit == units
        config = replace(config, max_tokens=1000)
    fix = "max_tokens=1000: .* write max_tokens=null" if units else "seq_len=16: .* write seq_len=8"
    with pytest.raises(ConfigError, match=fix):
        make_plan(config, data)


def test_all_of_a_mixtures_validation_is_each_sample_once(tmp_path: Path) -> None:
    config = of_source("data=mixture", tmp_path, validation=Validation(batches=0))
    validation = open_data(config).validation
    samples = [validation[i]["inputs"].numpy().tobytes() for i in range(len(validation))]
    assert len(set(samples)) == len(samples) > 4 * config.batch_size
    assert sum(validation_weights(validation, config, 0)) * config.batch_size == len(samples)


def test_the_learning_rate_ends_with_max_tokens() -> None:
    config = tiny(
        steps=300, max_tokens=40 * 16 * 16, lr=DecayLr(name="cosine", warmup=4, final=0.1)
    )
    assert learning_rate(config, 40) == pytest.approx(0.1 * config.optimizer.lr)
    assert learning_rate(config, 20) > 0.5 * config.optimizer.lr
    assert epochs(config, 640) == "1 of 640 sequences by step 40", "as the first lines say"


def test_an_id_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    config = of_source("rare", tmp_path, model=Model("llama", {**LLAMA, "vocab_size": 60}))
    assert preflight(config) == []
    said = "sample [0-9]+ of a batch has the id 6[0-3] in 'inputs', and the model has 60; "
    with pytest.raises(RankError, match=said + "return ids from 0 to 59"):
        run_world(train, config, tmp_path)
    config = of_source("map_style", tmp_path, model=config.model)
    assert len([*open_data(config).train]) == 360, "a loop over it ends"
    unknown = replace(config, model=Model("llama", {**LLAMA, "vocab_size": None}))
    with pytest.raises(ConfigError, match="write model.vocab_size=64, or let the function return"):
        resolve_model(unknown)
    assert "WARNING: fewer than a batch" in epochs(config, 9)


@pytest.mark.parametrize("kind", ["map_style", "alone", "own model"])
def test_ids_of_the_first_samples_are_compared_with_the_model_before_a_launch(
    kind: str, tmp_path: Path
) -> None:
    model = Model("llama", {**LLAMA, "vocab_size": 60})
    if kind == "own model":
        model = Model("support.sources.Embedded", {"vocab_size": 60})
    config = of_source(kind.replace("own model", "map_style"), tmp_path, model=model)
    (problem,) = preflight(config)
    assert problem.key == "data.name"
    whose = "of reader 0 has" if kind == "alone" else "has"
    said = rf"training sample \d+ {whose} the id 6[0-3] in 'inputs', and the model has 60; "
    assert re.search(said + "return ids from 0 to 59, or a Data with vocab_size=6", str(problem))
    assert "\n" not in str(problem)
    model = replace(model, args={**model.args, "vocab_size": 64})
    assert preflight(replace(config, model=model)) == []


@pytest.mark.parametrize("kind", ["data=tokens", "token_files", "mixture"])
def test_the_first_ids_of_token_files_are_read_before_a_launch(kind: str, tmp_path: Path) -> None:
    config = of_source(kind, tmp_path)
    assert problems(config) == []
    file = next(tmp_path.rglob("ids.bin"))
    ids = np.fromfile(file, "<u2")
    ids[37] = 600
    ids.tofile(file)
    (problem,) = problems(config)
    assert f"token 37 of {file} is the id 600" in str(problem) and "257" in str(problem)
    assert "\n" not in str(problem)


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_name_that_no_file_can_have_is_one_problem(key: str, tmp_path: Path) -> None:
    config = of_source("data=text", tmp_path, data={key: "/" + "x" * 5000})
    assert "File name too long" in str(problems(config)[0])


@pytest.mark.parametrize("kind", ["data=text", "jsonl", "data=mixture"])
def test_the_first_record_of_each_file_is_read_before_a_launch(kind: str, tmp_path: Path) -> None:
    config = of_source(kind, tmp_path)
    assert problems(config) == []
    (broken := sorted(tmp_path.rglob("b.jsonl"))[0]).write_text("{broken")
    (problem,) = problems(config)
    assert "line 1: is not JSON" in str(problem) and str(broken.parent) in str(problem)
