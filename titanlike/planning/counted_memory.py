"""The memory of pipeline ranks, counted in a step that needs no devices and no other ranks.

`rank_memory.py` estimates in milliseconds. Here a rank is built and trains a step by a run's own
code with fake tensors (including FSDP's buffers, P2P buffers and optimizer state) and a fake
process group, and live storages are counted. That takes seconds per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from titanlike.core.config.errors import ConfigError
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import example_batch
from titanlike.core.data.sources import Batch
from titanlike.core.distributed.mesh import lay_mesh
from titanlike.core.pipeline.schedules import SCHEDULES
from titanlike.core.torch_private.fake_ranks import (
    LiveStorages,
    allocate,
    fake_process_group,
    fake_tensors,
)
from titanlike.core.training.build import Run, build_planned
from titanlike.core.training.step import drop_gradients, optimizer_step
from titanlike.core.training.train_plan import make_plan
from titanlike.planning.estimate import Estimate


def with_exact_memory(estimate: Estimate, ranks: Sequence[int] | None = None) -> Estimate:
    """Count the peak memory of the first rank of each pipeline rank: bytes of its live storages
    over a step.

    Among ranks that share stages the first has the largest shards. Blocks are not compiled; with
    many microbatches only as many are run as it takes until memory repeats. ranks: only these
    pipeline ranks. The estimate tells (`not_counted`) why memory was not counted: it depends on
    values (documents), or is on two devices (fsdp.cpu_offload).
    """
    config, room = estimate.config, estimate.hardware.usable
    if config.fsdp.cpu_offload:
        return replace(estimate, not_counted="with fsdp.cpu_offload a part of it is on the host")
    if config.ep > 1:
        return replace(
            estimate, not_counted="how many tokens experts receive depends on their values"
        )
    config = replace(_shortened(estimate), device="cpu", compile=False)
    example = example_batch(config)
    pipeline_ranks, counted = range(config.pp) if ranks is None else ranks, {}
    for rank in pipeline_ranks:
        try:
            first = rank * config.world_size // config.pp
            counted[rank] = _bytes_of_rank(config, room, example, first)
        except Exception as error:  # a model may raise anything when it reads a value
            return replace(estimate, not_counted=_reason(error))
    return replace(estimate, counted=counted)


def _shortened(estimate: Estimate) -> Config:
    """The config with fewer microbatches, if the estimated memory is the same."""
    config, plan, room = estimate.config, estimate.plan, estimate.hardware.usable
    if config.schedule.name not in SCHEDULES or estimate.memory_unknown:
        return config
    expected = plan.memory().of_ranks(plan.recomputed.blocks)
    for count in (2 * plan.order.stages, 4 * plan.order.stages):
        if count >= plan.microbatches:
            break
        schedule: Any = config.schedule
        schedule = replace(schedule, microbatches=count)
        rows = config.batch_size // plan.microbatches * count
        shorter = replace(config, batch_size=rows, schedule=schedule)
        try:
            other = make_plan(shorter, device_memory=lambda: room)
        except ConfigError:  # a number that the schedule does not support
            continue
        if other.memory().of_ranks(other.recomputed.blocks) == expected:
            return shorter
    return config


def _reason(error: BaseException) -> str:
    """Format the cause of an error in a line; torch's runtime wraps errors of stages."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {next(filter(None, str(error).splitlines()), '')}"


def _bytes_of_rank(config: Config, room: int, example: Batch, rank: int) -> int:
    live, fake = LiveStorages(), fake_tensors()
    with fake_process_group(rank, config.world_size):
        run = assemble_fake(config, room, fake, live)
        with fake, live:
            # a first optimizer step allocates the optimizer's state
            for parameter in run.parameters:
                parameter.grad = torch.zeros_like(parameter)
            for state in run.stage_states:
                for optimizer in state.optimizers:
                    optimizer.step()
            drop_gradients(run)
            run.pipeline.train(zeros(config, example))
            optimizer_step(run, config, 1, torch.ones(()))
    return live.peak


def assemble_fake(
    config: Config, room: int, fake: AbstractContextManager[Any], live: LiveStorages
) -> Run:
    """Build the run of a rank of a fake process group; room: bytes available for training."""
    mesh = lay_mesh(config, torch.device("cpu"), "fake", "planned")

    def fill(stage: nn.Module, _: object, device: torch.device, *__: object, **___: object) -> None:
        with fake, live:
            allocate(stage, device)

    plan = make_plan(config, None, None, lambda: room, mesh)
    return build_planned(config, mesh, plan, init_weights=fill)


def zeros(config: Config, example: Batch) -> Batch:
    """A batch of zeros for one dp rank, shaped as `example`."""
    rows = config.batch_size // config.dp
    return {n: torch.zeros((rows, *v.shape[1:]), dtype=v.dtype) for n, v in example.items()}
