"""One rank of a job without devices and without the other ranks, with fake tensors: what it builds,
and the memory of its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from support.live_memory import LiveStorages
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import example_batch
from titanlike.core.distributed.mesh import lay_mesh
from titanlike.core.torch_private.fake_ranks import allocate, fake_tensors, without_peers
from titanlike.core.training.build import Run, build_planned
from titanlike.core.training.step import drop_gradients, optimizer_step
from titanlike.core.training.train_plan import make_plan


def counted_bytes(config: Config, pipeline_rank: int) -> int:
    """The peak of live storages over a step, by a run's own code, FSDP's buffers, P2P buffers and
    optimizer state included.

    Of the first rank of a pipeline rank, which has the largest shards. Blocks are not compiled.
    Not for what depends on values (`ep`), nor for two devices (`fsdp.cpu_offload`).
    """
    config = replace(config, device="cpu", compile=False)
    live, fake = LiveStorages(), fake_tensors()
    with fake_process_group(pipeline_rank * config.world_size // config.pp, config.world_size):
        run = build_fake(config, torch.device("cpu"), fake, live)
        with fake, live:
            # a first optimizer step allocates the optimizer's state
            for parameter in run.parameters:
                parameter.grad = torch.zeros_like(parameter)
            for state in run.stage_states:
                for optimizer in state.optimizers:
                    optimizer.step()
            drop_gradients(run)
            run.pipeline.train(zeros(config))
            optimizer_step(run, config, 1, torch.ones(()))
    return live.peak


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """A context in which this process is a rank whose collectives do nothing and whose sends and
    receives are dropped. Needs that no process group exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with without_peers():
        yield


def build_fake(config: Config, device: torch.device, *modes: AbstractContextManager[Any]) -> Run:
    """Build the run of a rank of a fake process group; modes: in which its weights are made."""
    mesh = lay_mesh(config, device, "fake", "planned")

    def fill(stage: nn.Module, *_: object, **__: object) -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            allocate(stage, device)

    with mock.patch("titanlike.core.training.build.initialize", fill):
        return build_planned(config, mesh, make_plan(config, None, None, lambda: 1 << 40, mesh))


def zeros(config: Config) -> dict[str, torch.Tensor]:
    """A batch of zeros for one dp rank."""
    rows, example = config.batch_size // config.dp, example_batch(config)
    return {n: torch.zeros((rows, *v.shape[1:]), dtype=v.dtype) for n, v in example.items()}
