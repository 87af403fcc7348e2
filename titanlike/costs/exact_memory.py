"""The memory of each pipeline rank by its own step: the code of a run, under tensors without memory.

`rank_memory.py` adds up what a rank keeps, in milliseconds; here a rank is built and trains a
step as in a run (FSDP's buffers, messages and the optimizer's state included) in a job whose other
ranks are not there, and the storages that live are counted. That takes seconds a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from titanlike.config.errors import ConfigError
from titanlike.config.schema import Config
from titanlike.costs.estimate import Estimate
from titanlike.data.example_batch import example_batch
from titanlike.data.sources import Batch
from titanlike.distributed.mesh import Mesh, lay_mesh
from titanlike.pipeline.schedules import SCHEDULES
from titanlike.torch_private.fake_ranks import (
    LiveStorages,
    allocate,
    fake_process_group,
    fake_tensors,
)
from titanlike.training.build import Run, assemble
from titanlike.training.draft import draft
from titanlike.training.step import drop_gradients, optimizer_step

_CPU = torch.device("cpu")


def with_exact_memory(plan: Estimate, ranks: Sequence[int] | None = None) -> Estimate:
    """The plan with what the first rank of each pipeline rank takes: the bytes of its live storages at
    the most over a step.

    Of ranks that share stages the first has the largest shards. Blocks are counted as they are without
    compile; of more microbatches than pass before memory repeats itself, only so many are computed.
    ranks: only these pipeline ranks. The plan says why where the memory is left as it was
    estimated: it depends on values (documents), or is that of two devices (fsdp.cpu_offload).
    """
    config, room = plan.config, plan.hardware.usable
    if config.fsdp.cpu_offload:
        return replace(plan, not_counted="with fsdp.cpu_offload a part of it is on the host")
    if config.ep > 1:
        return replace(plan, not_counted="how many tokens experts receive depends on their values")
    config = replace(_shortened(plan), device="cpu", compile=False)
    example = example_batch(config)
    every, counted = range(config.pp) if ranks is None else ranks, {}
    for rank in every:
        try:
            first = rank * config.world_size // config.pp
            counted[rank] = _of_rank(config, room, example, first)
        except Exception as error:  # whatever a model does with a value
            return replace(plan, not_counted=_reason(error))
    return replace(plan, counted=counted)


def _shortened(plan: Estimate) -> Config:
    """The config with fewer microbatches, where the same memory is estimated with them."""
    config, drafted, room = plan.config, plan.draft, plan.hardware.usable
    if config.schedule.name not in SCHEDULES or plan.memory_unknown:
        return config
    expected = drafted.memory().of_ranks(drafted.recomputed.blocks)
    for count in (2 * drafted.order.stages, 4 * drafted.order.stages):
        if count >= drafted.microbatches:
            break
        schedule: Any = config.schedule
        schedule = replace(schedule, microbatches=count)
        rows = config.batch_size // drafted.microbatches * count
        shorter = replace(config, batch_size=rows, schedule=schedule)
        try:
            other = draft(shorter, device_memory=lambda: room)
        except ConfigError:  # a number that the schedule does not take
            continue
        if other.memory().of_ranks(other.recomputed.blocks) == expected:
            return shorter
    return config


def _reason(error: BaseException) -> str:
    """In a line; the runtime wraps what a stage raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {next(filter(None, str(error).splitlines()), '')}"


def _of_rank(config: Config, room: int, example: Batch, rank: int) -> int:
    live, fake = LiveStorages(), fake_tensors()
    with fake_process_group(rank, config.world_size):
        mesh = lay_mesh(config, _CPU, "fake", "planned")
        run = _assembled(config, mesh, room, fake, live)
        with fake, live:
            # an optimizer's state is there from the second step on
            for parameter in run.parameters:
                parameter.grad = torch.zeros_like(parameter)
            for state in run.stage_states:
                for optimizer in state.optimizers:
                    optimizer.step()
            drop_gradients(run)
            run.pipeline.train(_batch(config, example))
            optimizer_step(run, config, 1, torch.ones(()))
    return live.peak


def _assembled(
    config: Config,
    mesh: Mesh,
    room: int,
    fake: AbstractContextManager[Any],
    live: LiveStorages,
) -> Run:
    decided = draft(config, None, None, lambda: room, mesh)

    def fill(stage: nn.Module, _: object, device: torch.device, *__: object, **___: object) -> None:
        with fake, live:
            allocate(stage, device)

    return assemble(config, mesh, decided, fill=fill)


def _batch(config: Config, example: Batch) -> Batch:
    rows = config.batch_size // config.dp
    return {n: torch.zeros((rows, *v.shape[1:]), dtype=v.dtype) for n, v in example.items()}
