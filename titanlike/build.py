"""From a config to everything that a run is made of, in the order in which it happens.

1. `draft` decides: the stages and the order of computing.
2. This rank's stages are carved out of the model on the meta device, sharded, allocated and
   initialized; each gets an optimizer.
3. torch's pipeline runtime is laid over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from titanlike.config.schema import Config
from titanlike.draft import Draft, build_model, draft
from titanlike.loss import CrossEntropy
from titanlike.optimization import Part, build_optimizer
from titanlike.parallel.initialize import initialize, piece_seed
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.sharding import compute_dtype, shard_stage
from titanlike.pipeline.run import Pipeline
from titanlike.pipeline.stages import boundaries, carve, gather_groups
from titanlike.torch_private import OrderRuntime, make_stage


@dataclass(frozen=True)
class Run:
    """This rank's share of the model, ready to train."""

    mesh: Mesh
    draft: Draft
    parts: list[Part]
    pipeline: Pipeline

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of this rank."""
        return [parameter for part in self.parts for parameter in part.stage.parameters()]

    def train_mode(self, on: bool) -> None:
        for part in self.parts:
            part.stage.train(on)


def build(config: Config, mesh: Mesh) -> Run:
    """Build this rank's stages and the pipeline over them. Collective."""
    plan = draft(config)
    dtype = compute_dtype(config)
    rows = config.batch_size // config.dp // plan.microbatches
    example = torch.empty(rows, config.seq_len, dtype=torch.int64, device="meta")
    starts = [names[0] for names in plan.stages]
    flow = boundaries(build_model(plan.model).to(dtype), starts, example)
    parts, stages = [], []
    for index in plan.order.local(mesh.pp_rank):
        module = carve(build_model(plan.model), plan.stages[index])
        groups = gather_groups([plan.units[name] for name in plan.stages[index]])
        shard_stage(module, groups, config, mesh, plan.zero)
        initialize(module, config.seed, _home(config, mesh))
        parts.append(Part(module, build_optimizer(module, config.optimizer)))
        stages.append(
            make_stage(
                module,
                index,
                plan.order.stages,
                device=mesh.device,
                group=mesh.axes.get_group("pp"),
                inputs=flow[index],
                outputs=flow[index + 1],
                zero=plan.zero,
            )
        )
    # what a model draws while it trains (dropout) differs on every rank
    torch.manual_seed(piece_seed(config.seed, "rank", dist.get_rank()))
    loss = CrossEntropy()
    runtime = OrderRuntime(plan.order, stages, loss, zero=plan.zero)
    return Run(mesh, plan, parts, Pipeline(runtime, loss, mesh))


def _home(config: Config, mesh: Mesh) -> torch.device:
    """Where parameters live between steps."""
    return torch.device("cpu") if config.fsdp.cpu_offload else mesh.device
