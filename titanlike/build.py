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
from torch import nn

from titanlike.checkpoint.store import Part
from titanlike.config.schema import Config
from titanlike.draft import Draft, build_model, draft
from titanlike.loss import CrossEntropy
from titanlike.optimization import build_optimizer
from titanlike.parallel.initialize import initialize
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.sharding import compute_dtype, shard_stage
from titanlike.pipeline.run import Pipeline
from titanlike.pipeline.stages import boundaries, carve
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
    torch.manual_seed(config.seed)
    plan = draft(config)
    dtype = compute_dtype(config)
    rows = config.batch_size // config.dp // plan.microbatches
    example = torch.empty(rows, config.seq_len, dtype=torch.int64, device="meta")
    flow = boundaries(build_model(config).to(dtype), [names[0] for names in plan.stages], example)
    parts, stages = [], []
    for index in plan.order.local(mesh.pp_rank):
        module = carve(build_model(config), plan.stages[index])
        units = [plan.units[name] for name in plan.stages[index]]
        shard_stage(module, units, config, mesh, plan.zero)
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
    loss = CrossEntropy()
    runtime = OrderRuntime(plan.order, stages, loss, zero=plan.zero)
    return Run(mesh, plan, parts, Pipeline(runtime, loss, mesh))


def _home(config: Config, mesh: Mesh) -> torch.device:
    """Where parameters live between steps."""
    return torch.device("cpu") if config.fsdp.cpu_offload else mesh.device
