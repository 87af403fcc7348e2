"""Samples of different lengths, and with more fields: padded, prepared once a length, exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.models import tiny
from support.proven import assert_proven
from support.real_model import real
from support.samples import Conditioned
from support.world import run_world
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches, example_batch, validation_batches
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.data.sources import IGNORE
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.graph import model_graph
from titanlike.core.graph.record_forward import record_forward
from titanlike.core.launch.worker import Worker
from titanlike.core.pipeline import pipeline
from titanlike.core.training.build import build
from titanlike.core.training.device_batches import to_device
from titanlike.run.checks import problems


def data_of(function: str, **args: Any) -> Custom:
    return Custom(f"support.samples.{function}", args)


PHRASES = data_of("phrases")
MASKED = data_of("masked")
CONDITIONED = Custom("support.samples.Conditioned", {})


# --- batches -----------------------------------------------------------------------------------


def test_a_batch_is_as_long_as_its_longest_sample_in_whole_buckets() -> None:
    config = tiny(dp=2, data=PHRASES, batch_size=8, seq_len=18)
    source = open_data(config).train
    samples = {i: source[i]["inputs"] for i in range(len(source))}
    lengths = set()
    for rank in range(2):
        for batch in islice(batches(source, config, dp_rank=rank), 40):
            inputs, targets = batch["inputs"], batch["targets"]
            valid = (targets != IGNORE).sum(1)
            tokens = inputs.size(1)
            assert tokens in (min(18, -(-int(valid.max()) // 4) * 4),) and len(inputs) == 4
            for row, count in zip(inputs, valid.tolist(), strict=True):
                assert row[count:].eq(0).all() and count > 0
                assert any(torch.equal(row[:count], sample) for sample in samples.values())
            lengths.add(tokens)
    assert {4, 12, 18} <= lengths <= {4, 8, 12, 16, 18}


def test_more_fields_are_padded_as_declared() -> None:
    config = tiny(data=MASKED, batch_size=4)
    data = open_data(config)
    batch = next(batches(data.train, config, dp_rank=0))
    tokens = batch["inputs"].size(1)
    count = (batch["targets"] != IGNORE).sum(1)
    assert batch["mask"].sum(1).equal(count) and batch["mask"].dtype == torch.bool
    assert batch["bias"].shape == (4, tokens, tokens)
    seen = batch["mask"][:, :, None] & batch["mask"][:, None, :]
    assert (batch["bias"][~seen] == -9).all() and (batch["bias"][seen] != -9).all()
    assert batch["target"].shape == (4,) and batch["losses"].shape == (4, 3, 2, 2)
    found = example_batch(config, data)
    assert {k: (v.shape[1:], v.dtype) for k, v in found.items()} == {
        "inputs": ((16,), torch.int64),
        "targets": ((16,), torch.int64),
        "mask": ((16,), torch.bool),
        "bias": ((16, 16), torch.float32),
        "target": ((), torch.float32),
        "losses": ((3, 2, 2), torch.float32),
    }


def rows_of(config: Config, steps: int, start: int = 0) -> list[list[bytes]]:
    """The samples of each step, of all dp ranks, without their padding."""
    train, found = open_data(config).train, []
    streams = [batches(train, config, dp_rank=r, start_step=start) for r in range(config.dp)]
    for _ in range(steps):
        step = []
        for batch in map(next, streams):
            for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
                step.append(inputs[targets != IGNORE].numpy().tobytes())
        found.append(step)
    return found


def test_known_lengths_make_batches_of_similar_samples_in_an_order_of_seed_and_step() -> None:
    # the samples of 64 steps are sorted among themselves
    config = tiny(data=data_of("phrases", sort=True), batch_size=4, seq_len=64)
    rows = rows_of(config, 128)
    plain = rows_of(replace(config, data=PHRASES), 128)
    for window in (slice(0, 64), slice(64, 128)):
        samples = sorted(row for step in rows[window] for row in step)
        assert samples == sorted(row for step in plain[window] for row in step)

    def spread(steps: list[list[bytes]]) -> float:
        return float(np.mean([len(max(step, key=len)) - len(min(step, key=len)) for step in steps]))

    assert spread(rows) < spread(plain) / 8
    longest = [len(max(step, key=len)) for step in rows[:64]]
    assert longest != sorted(longest) and rows[:64] != rows[64:]
    assert rows_of(replace(config, dp=2), 70) == rows[:70]
    assert rows_of(config, 9, start=60) == rows[60:69]
    assert rows_of(replace(config, seed=1), 3) != rows[:3]


def test_validation_batches_are_padded() -> None:
    config = tiny(data=PHRASES, validation=Validation(batches=6), batch_size=2)
    source = open_data(config).validation
    shapes = {b["inputs"].size(1) for b in validation_batches(source, config, dp_rank=0, batches=6)}
    assert len(shapes) > 1


# --- training on them --------------------------------------------------------------------------

LENGTHS = (32, 8, 32, 16, 8, 32)  # of each step's batch
RECORDINGS = 4  # of 3 lengths in training and in evaluation, without those of the plan


def batch_of(step: int) -> dict[str, Tensor]:
    """16 samples of unequal lengths, padded to their step's."""
    tokens, draw = LENGTHS[step], torch.Generator().manual_seed(step)
    ids = torch.randint(64, (16, tokens + 1), generator=draw)
    targets = ids[:, 1:].clone()
    for row in range(16):
        targets[row, tokens - row % 3 :] = IGNORE
    return {"inputs": ids[:, :-1].contiguous(), "targets": targets}


def several_steps(config: Config, worker: Worker) -> dict[int, tuple[float, list[int], int]]:
    """With so many lengths remembered: the largest difference from plain torch, how often a runtime
    was made after each step, and how often the model was recorded."""
    mesh, found, model = open_mesh(config, worker), {}, real(config)
    whole = dict(model.named_parameters())

    def whole_loss(step: int) -> Tensor:
        batch = batch_of(step)
        logits = model(batch["inputs"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=IGNORE)

    for most_shapes in (32, 1):
        pipeline.MOST_SHAPES = most_shapes
        run, made, worst = build(config, mesh), [], 0.0
        make = run.pipeline._make_executor = mock.Mock(wraps=run.pipeline._make_executor)
        recording = model_graph.record_forward = mock.Mock(wraps=record_forward)
        for step in range(len(LENGTHS)):
            loss, _ = run.pipeline.train(to_device(batch_of(step), mesh, config))
            truth = whole_loss(step)
            truth.backward()
            worst = max(worst, abs(loss.item() - truth.item()))
            for part in run.stage_states:
                for name, parameter in part.parameters():
                    worst = max(worst, (parameter.grad - whole[name].grad).abs().max().item())
            for each in (model, *run.stage_states):
                each.zero_grad()
            # validation in between, of another length than training
            other = (step + 1) % len(LENGTHS)
            run.train_mode(False)
            with torch.no_grad():
                loss, _ = run.pipeline.evaluate(to_device(batch_of(other), mesh, config))
                worst = max(worst, abs(loss.item() - whole_loss(other).item()))
            run.train_mode(True)
            made.append(make.call_count)
        found[most_shapes] = worst, made, recording.call_count
    close_mesh()
    return found


@pytest.mark.slow
def test_steps_of_every_length_match_one_process_and_a_length_is_compiled_once(
    tmp_path: Path,
) -> None:
    for found in run_world(several_steps, tiny(pp=2, seq_len=32, layers=4), tmp_path):
        for most_shapes, (worst, made, recordings) in found.items():
            assert worst < 2e-6 and recordings == RECORDINGS
            assert made[:5] == {32: [2, 2, 3, 3, 3], 1: [2, 3, 4, 5, 6]}[most_shapes]


# --- more than one input -----------------------------------------------------------------------


def test_every_stage_receives_the_fields_it_reads(tmp_path: Path) -> None:
    """Masks, scales and images, two of them called what torch's runtime calls its own arguments."""
    assert_proven(tiny(pp=2, schedule="zbvzerobubble", model=CONDITIONED, data=MASKED), tmp_path)


def test_masked_padding_does_not_change_results() -> None:
    config = tiny(data=MASKED, batch_size=4)
    model, source = Conditioned(), open_data(config).train
    samples = [source[i] for i in range(4)]
    batch = source.collate(samples)
    targets, real = batch.pop("targets"), batch.pop("real_tokens")
    assert torch.equal(real, batch["mask"])
    logits = model(batch.pop("inputs"), **batch)
    for row, sample in enumerate(samples):
        one = {name: value[None] for name, value in sample.items() if name != "targets"}
        alone = model(one.pop("inputs"), **one)[0]
        torch.testing.assert_close(logits[row][targets[row] != IGNORE], alone, rtol=0, atol=1e-5)


# --- what cannot be ----------------------------------------------------------------------------


def told(config: Config) -> str:
    return "\n".join(map(str, problems(config)))


def test_a_field_without_an_argument_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    config = tiny(data=MASKED, run_dir=str(tmp_path))
    lines = told(config).splitlines()
    beside = "it takes document_ids, positions, mask)"
    assert len(lines) == 3 and all("data.name=support.samples.masked" in line for line in lines)
    for line, name in zip(lines, ("bias", "target", "losses"), strict=True):
        assert f"a field {name}, which the forward of model.name=llama" in line and beside in line


FIRST = ("tuple", "no targets", "number", "longer")  # seen in one sample alone
MISTAKES = {
    "tuple": "is a tuple and not a dict",
    "no targets": "has no 'targets' (it has inputs, labels)",
    "number": "has a float as 'scale'",
    "tasks": "has a dict as 'targets'; stack the targets of several tasks in one tensor, [..., tasks]",
    "longer": "has 32 tokens, more than seq_len=16; truncate it, or write seq_len=32",
    "dtype": "has 'targets' of torch.float32, and sample 0 of torch.int64",
    "more": "and sample 0 do not both have 'mask'",
    "shorter": "has 'inputs' of shape [15], sample 0 [16]; return samples of equal shapes, "
    "or give Data a variable=VariableLength()",
    "apart": "has 'targets' of shape [15] and inputs of [16]",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_sample_is_named(mistake: str, tmp_path: Path) -> None:
    """The first one before a worker starts."""
    data = open_data(tiny(data=data_of("odd", mistake=mistake, variable=mistake == "apart")))
    with pytest.raises(DataError) as raised:
        next(batches(data.train, tiny(batch_size=40), dp_rank=0))
    assert f"training sample 3 {MISTAKES[mistake]}" in str(raised.value)
    assert str(raised.value).startswith("data.name=support.samples.odd: ")
    if mistake in FIRST:
        data = data_of("odd", mistake=mistake, everywhere=True)
        text = told(tiny(data=data, run_dir=str(tmp_path)))
        assert text.startswith("data.name=support.samples.odd: training sample 0 ")


@pytest.mark.parametrize(
    "data, said",
    [
        (data_of("badly_declared", mistake="bucket"), "VariableLength has bucket=0"),
        (data_of("badly_declared", mistake="padding"), "VariableLength has -100 as padding of"),
        (data_of("badly_declared", mistake="lengths"), "VariableLength has 3 lengths for 500"),
        (data_of("badly_declared", mistake="inputs"), "VariableLength has no padding for 'inputs'"),
        (data_of("badly_declared", mistake="nothing"), "sample 0 has no 'weights', which Variable"),
        (data_of("empty"), "its validation part is empty"),
        (data_of("stream"), "reader 0 of 16 finds no sample; give more data"),
    ],
    ids=lambda value: (
        value.args.get("mistake", value.name.rpartition(".")[2])
        if isinstance(value, Custom)
        else ""
    ),
)
def test_an_invalid_declaration_is_refused_before_launch(
    data: Custom, said: str, tmp_path: Path
) -> None:
    text = told(tiny(data=data, run_dir=str(tmp_path)))
    assert text.startswith(f"data.name={data.name}: ") and said in text


def test_targets_are_int64_for_a_loss_of_classes(tmp_path: Path) -> None:
    """On meta any integers would do, and the last rank would fail in its first step."""
    text = told(tiny(data=data_of("narrow"), run_dir=str(tmp_path)))
    assert text.startswith("loss.name=cross_entropy: it takes logits") and "of int32" in text
    assert text.endswith("; targets.long() in the data")


def test_a_model_with_positions_refuses_what_is_longer(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": None}
    config = tiny(model=Custom("gpt2", sizes), data=PHRASES, run_dir=str(tmp_path))
    assert not told(config)
    assert told(replace(config, seq_len=20)).startswith("seq_len=20: is longer than the model's")
