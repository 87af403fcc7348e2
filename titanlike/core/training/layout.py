"""Describe a launch, its mesh and its stages, as plain data and in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from titanlike.core.config.schema import MESH_AXES, Config
from titanlike.core.device import accelerator
from titanlike.core.device.choose import ranks_of
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.metrics import units
from titanlike.core.pipeline.order import MOST_DRAWN
from titanlike.core.training.train_plan import TrainPlan


def span(names: list[str]) -> str:
    """Join module names, blocks in a row as "model.layers.0 ... model.layers.3"."""
    if not names:
        return "none: sends what it receives"
    parents = Counter(name.rpartition(".")[0] for name in names if "." in name)
    blocks = [name for name in names if name.rpartition(".")[0] in dict(parents.most_common(1))]
    if len(blocks) < 3:
        return ", ".join(names)
    inner = f"{blocks[0]} ... {blocks[-1]}"
    before, after = names[: names.index(blocks[0])], names[names.index(blocks[-1]) + 1 :]
    return ", ".join([*before, inner, *after])


def ranks_text(mesh: Mesh, pp_rank: int) -> str:
    """The ranks that hold a pipeline rank's stages, as "4-7"."""
    first, *_, last = 2 * mesh.stage_ranks(pp_rank)
    return str(first) if first == last else f"{first}-{last}"


def layout(config: Config, plan: TrainPlan, mesh: Mesh, data: str) -> dict[str, Any]:
    """Describe what a launch trains and where, as plain data: device, model, data (a description),
    mesh, stages, and the schedule's actions if pp > 1."""
    axes = (*MESH_AXES, "replicate", "ep")
    sizes = [f"{axis}={size}" for axis in axes if (size := getattr(config, axis)) > 1]
    schedule = [f"schedule={config.schedule.name}"] if config.pp > 1 else []
    more = [*schedule, units.microbatches(plan.microbatches), f"ZeRO {plan.zero}"]
    ranks = plan.order.ranks
    order: dict[str, Any] = {}
    if 1 < config.pp <= sum(map(len, ranks)) <= MOST_DRAWN:
        order = {"schedule": config.schedule.name, "place": [*plan.order.stage_to_rank]}
        order["order"] = [[*map(str, acts)] for acts in ranks]
    device = f"{mesh.world_size} x {accelerator.name(mesh.device)} with {mesh.backend}"
    if (shared := ranks_of(mesh.device, config.launch, mesh.world_size)) > 1:
        device += f", of which {shared} are one"
    return {
        "device": device,
        "model": f"{config.model.name}, {units.count(plan.whole_numel)} parameters",
        "data": data,
        **order,
        "mesh": ", ".join([" ".join(sizes) or "one process", *more]),
        "stages": [
            {
                "stage": stage,
                "ranks": f"rank {ranks_text(mesh, rank)}",
                "modules": span(plan.stages[stage]),
                "parameters": plan.stage_numel(stage),
            }
            for rank in range(mesh.pp)
            for stage in plan.order.local(rank)
        ],
    }
