"""A rank's memory falls as its share of the parameters does."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed.machine import resident_memory
from benchmarks.speed.plain_loops import plain_loop
from support.cells import slow
from support.live_memory import LiveStorages
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.computation import ActivationCheckpoint, Fsdp
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.device.memory import peak_memory, return_freed_memory
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.pipeline_stage import _TORCH_KEEPS_BUFFERS
from titanlike.core.training.anomalies import AnomalyDetector
from titanlike.core.training.build import build, memory_is_short
from titanlike.core.training.device_batches import to_device
from titanlike.core.training.step import measured_step
from titanlike.core.training.train_plan import make_plan


def train_two_steps(config: Config, worker: Worker) -> int:
    """Bytes that this rank's memory grew by, at its peak."""
    return_freed_memory()  # as where memory is short, see the test below
    mesh = open_mesh(config, worker)
    before = resident_memory(mesh.device)
    data = open_data(config)
    run = build(config, mesh)
    stream = batches(data.train, config, dp_rank=mesh.dp_rank)
    for step in (1, 2):
        measured_step(run, config, step, stream, AnomalyDetector(config, {}), worker)
    return peak_memory(mesh.device).allocated - before


@pytest.mark.grid
def test_memory_scales_down_with_pp_and_dp(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
    }
    model = Custom("llama", {**sizes, "vocab_size": 64})

    def fullest(name: str, **layout) -> int:
        config = tiny(model=model, batch_size=4, seq_len=8, **layout)
        return max(run_world(train_two_steps, config, tmp_path / name))

    one = fullest("one")
    # weights, gradients and two moments in fp32
    assert one > 16 * make_plan(tiny(model=model)).whole_numel > 300 * 2**20
    assert fullest("pp", pp=2) < 0.6 * one
    assert fullest("dp", dp=2) < 0.75 * one  # besides its shards, the block that runs
    assert fullest("pp dp", pp=2, dp=2) < 0.6 * one  # a stage's parameters stay gathered
    assert fullest("pp dp, ZeRO 3", pp=2, dp=2, fsdp=Fsdp(3)) < 0.55 * one


@pytest.mark.parametrize(
    "dp, limit, expected",
    [
        (2, 2**30, False),  # faster, and there is room for the holes
        (2, 2**18, True),
        (2, None, True),
        (1, 2**18, False),  # nothing is gathered and freed
    ],
)
def test_freed_memory_is_returned_where_memory_is_short(
    dp: int, limit: int | None, expected: bool
) -> None:
    config = tiny(layers=2, dp=dp)
    mesh = SimpleNamespace(device=torch.device("cpu"), pp_rank=0)
    assert memory_is_short(config, make_plan(config), mesh, lambda: limit) == expected


def growth_with_microbatches(config: Config, worker: Worker, few: int, many: int) -> int:
    """Bytes that the peak of a step's live storages grows by from few to many microbatches of one
    sequence, besides those of the batch and of each loss."""
    mesh = open_mesh(config, worker)
    peaks = []
    for count in (few, many):
        own = replace(config, batch_size=count * config.dp, schedule=Schedule("1f1b", count))
        run = build(own, mesh)
        stream = batches(open_data(own).train, own, dp_rank=mesh.dp_rank)
        batch = to_device(next(stream), mesh, own)
        run.pipeline.train(batch)  # the first step makes what is cached
        with LiveStorages() as live:
            run.pipeline.train(to_device(next(stream), mesh, own))
        expected = sum(value.nbytes for value in batch.values()) + 4 * count
        peaks.append(live.peak - expected)
    close_mesh()
    return peaks[1] - peaks[0]


@pytest.mark.skipif(
    not _TORCH_KEEPS_BUFFERS, reason="torch 2.11 and 2.15 keep a message of each microbatch"
)
@pytest.mark.parametrize("pp, dp", [(2, 1), *slow((2, 2))])
def test_memory_does_not_grow_with_the_number_of_microbatches(
    pp: int, dp: int, tmp_path: Path
) -> None:
    grown = run_world(growth_with_microbatches, tiny(pp=pp, dp=dp, layers=2), tmp_path, 4, 12)
    assert all(abs(bytes_) <= 256 for bytes_ in grown), grown  # an output: 16 tokens of 64 logits


def peaks_beside_a_plain_loop(config: Config, worker: Worker) -> tuple[int, int]:
    """The most bytes of live storages in two steps: of a run, of a loop written by hand."""
    data, mesh = open_data(config), open_mesh(config, worker)
    with LiveStorages() as plain:
        deque(plain_loop(config, data, make_plan(config, data), mesh), maxlen=0)
    with LiveStorages() as ours:
        run, stream = build(config, mesh), batches(data.train, config, dp_rank=mesh.dp_rank)
        for step in (1, 2):
            measured_step(run, config, step, stream, AnomalyDetector(config, {}), worker)
    close_mesh()
    return ours.peak, plain.peak


@pytest.mark.parametrize("microbatches", [4, *slow(1)])
def test_recomputation_holds_no_more_than_a_plain_loop(microbatches: int, tmp_path: Path) -> None:
    """With the same `checkpoint()`: one input a block, and what one block computes."""
    full, schedule = ActivationCheckpoint(name="full"), Schedule(microbatches=microbatches)
    config = replace(tiny(seq_len=128, steps=2), activation_checkpoint=full, schedule=schedule)
    [(ours, plain)] = run_world(peaks_beside_a_plain_loop, config, tmp_path)
    assert 0.8 * plain < ours <= plain, (ours, plain)
