"""Which modules each stage of a run has, for the opening lines and for the report."""

from __future__ import annotations

from typing import Any

from titanlike.config.schema import Config
from titanlike.parallel.mesh import Mesh
from titanlike.training.draft import Draft


def span(names: list[str]) -> str:
    """embedding, layers.0 ... layers.3"""
    if not names:
        return "none: sends what it receives"
    blocks = [name for name in names if "." in name]
    if len(blocks) < 3:
        return ", ".join(names)
    inner = f"{blocks[0]} ... {blocks[-1]}"
    before, after = names[: names.index(blocks[0])], names[names.index(blocks[-1]) + 1 :]
    return ", ".join([*before, inner, *after])


def ranks_text(mesh: Mesh, pp_rank: int) -> str:
    """The ranks that have a pipeline rank's stages: 4-7"""
    first, *_, last = 2 * mesh.stage_ranks(pp_rank)
    return str(first) if first == last else f"{first}-{last}"


def layout(config: Config, draft: Draft, mesh: Mesh) -> dict[str, Any]:
    """Mesh and stages as plain data."""
    axes = ("pp", "dp", "replicate", "tp", "cp", "ep")
    sizes = [f"{axis}={size}" for axis in axes if (size := getattr(config, axis)) > 1]
    schedule = [f"schedule={config.schedule.name}"] if config.pp > 1 else []
    many = f"{draft.microbatches} microbatch" + "es" * (draft.microbatches > 1)
    more = [*schedule, many, f"ZeRO {draft.zero}"]
    return {
        "mesh": ", ".join([" ".join(sizes) or "one process", *more]),
        "stages": [
            {
                "stage": stage,
                "ranks": f"rank {ranks_text(mesh, rank)}",
                "modules": span(draft.stages[stage]),
                "parameters": draft.stage_numel(stage),
            }
            for rank in range(mesh.pp)
            for stage in draft.order.local(rank)
        ],
    }
