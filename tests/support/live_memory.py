"""What a training step computes and keeps: live storages, matrix products, forwards of blocks."""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.fake_ranks import LiveStorages
from titanlike.core.training.build import build
from titanlike.core.training.device_batches import to_device
from titanlike.core.training.step import optimizer_step


@dataclass(frozen=True)
class Measured:
    """A training step of one rank."""

    forwards: int  # of its blocks, recomputed ones included
    products: int  # matrix products
    peak: int  # bytes of live storages: weights, gradients, optimizer state, activations, messages
    seconds: float  # of the process' CPU


def measured(config: Config, worker: Worker) -> Measured:
    """The second training step, and the peak over building and both."""
    mesh = open_mesh(config, worker)
    live = LiveStorages()
    forwards: Counter[bool] = Counter()
    with live:
        run = build(config, mesh)
        for stage in run.stages:
            for name in (unit.name for unit in run.plan.model_graph.units if unit.block):
                if name in dict(stage.named_modules()):
                    _count(stage.get_submodule(name), forwards)
        stream = batches(open_data(config).train, config, dp_rank=mesh.dp_rank)
        for step in (1, 2):
            forwards.clear()
            live.operators.clear()
            begin = time.process_time()
            run.pipeline.train(to_device(next(stream), mesh, config))
            optimizer_step(run, config, step, torch.ones(()))
            seconds = time.process_time() - begin
            for state in run.stage_states:
                state.zero_grad()
    close_mesh()
    products = sum(live.operators[name] for name in ("mm", "addmm", "bmm"))
    return Measured(forwards[True], products, live.peak, seconds)


def _count(block: torch.nn.Module, forwards: Counter[bool]) -> None:
    """Count the calls of what a checkpointed block's forward calls."""
    first = next(part for part in block.modules() if part is not block and not [*part.children()])
    first.register_forward_pre_hook(functools.partial(_called, forwards))


def _called(forwards: Counter[bool], *_: Any) -> None:
    forwards[True] += 1
