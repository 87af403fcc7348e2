"""The list of transforms, a row for each technique, in the order in which they are applied. A
technique is imported by its row, only where a config asks for it.

Those that change the model (`_MODEL`) are made while a run is planned, since its forward is
recorded with them; the others (`_STAGES`) when stages are built. FSDP is not among them: stages are
sharded after all of these (`build.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from titanlike.core.config.groups.computation import ScaledPrecision
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import Batch
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.placement import experts_of
from titanlike.core.distributed.sharding import compute_dtype, wrapped_in_fsdp
from titanlike.core.distributed.transform import Plan, Transform
from titanlike.core.torch_private.operators import BatchNorm


@dataclass(frozen=True)
class _Planned:
    """The arguments from which a model transform is made."""

    config: Config
    model: nn.Module  # on meta, changed in place
    mesh: Mesh | None  # None in the launcher
    batch: Batch  # one sequence, on meta
    checked: Transform | None  # from an earlier plan of this model and data: already checked
    made: Mapping[str, Transform]  # those of the rows above


def model_transforms(
    config: Config,
    model: nn.Module,
    mesh: Mesh | None,
    batch: Batch,
    checked: Mapping[str, Transform],
) -> dict[str, Transform]:
    """Apply model transforms on meta in place, as on the first rank of each axis; by name.

    mesh: None in the launcher; batch: one sequence, see `example_batch`; checked: transforms of an
    earlier plan of the same model and data. Raises ConfigError.
    """
    made: dict[str, Transform] = {}
    for name, applies, make in _MODEL:
        if applies(config):
            made[name] = make(_Planned(config, model, mesh, batch, checked.get(name), made))
    return made


def _float8(p: _Planned) -> Transform:
    from titanlike.techniques.low_precision.float8 import Float8

    return Float8(p.config, p.model)


def _tensor_parallel(p: _Planned) -> Transform:
    from titanlike.techniques.tp.tensor_parallel import tensor_parallel

    return tensor_parallel(p.config, p.model, p.mesh, p.batch, p.checked)


def _expert_parallel(p: _Planned) -> Transform:
    from titanlike.techniques.mixture.expert_parallel import ExpertParallel

    return ExpertParallel(p.config, p.model, p.made.get("tp"))


def _context_parallel(p: _Planned) -> Transform:
    from titanlike.techniques.cp.context_parallel import context_parallel

    return context_parallel(p.config, p.mesh, p.batch)


_MODEL: list[tuple[str, Callable[[Config], bool], Callable[[_Planned], Transform]]] = [
    ("float8", lambda c: isinstance(c.precision, ScaledPrecision), _float8),
    ("tp", lambda c: c.tp > 1, _tensor_parallel),
    ("ep", lambda c: c.ep > 1, _expert_parallel),
    ("cp", lambda c: c.cp > 1, _context_parallel),
]


@dataclass(frozen=True)
class _Built:
    """The arguments from which a stage transform is made."""

    config: Config
    mesh: Mesh
    plan: Plan
    # those of the rows above, and of `_MODEL`
    made: dict[str, Transform] = field(default_factory=dict)


def stage_transforms(config: Config, mesh: Mesh, plan: Plan) -> dict[str, Transform]:
    """Make all transforms of the config, by name, and open those of the plan. Collective."""
    for transform in plan.transforms.values():
        transform.open(mesh, plan)
    asked = _Built(config, mesh, plan, dict(plan.transforms))
    for name, applies, make in _STAGES:
        if applies(asked):
            asked.made[name] = make(asked)
    return asked.made


def _weight_gradients_later(b: _Built) -> Transform:
    from titanlike.techniques.weight_gradients import DeferWeightGradients

    return DeferWeightGradients(b.plan.deferred, b.mesh.device)


def _recomputation(b: _Built) -> Transform:
    from titanlike.techniques.activation_checkpoint import ActivationCheckpointing

    save, exchanged = b.config.activation_checkpoint.saved, "ep" in b.made
    return ActivationCheckpointing(b.plan.recomputed.blocks, save, exchanged)


def _compiled(b: _Built) -> Transform:
    from titanlike.core.torch_private.compiler import overlap_in_compiled_blocks
    from titanlike.techniques.compiled_blocks import CompiledBlocks

    def why_not(block: str) -> str:
        if block in b.plan.model_graph.taking_gradients:
            return "it takes gradients in its forward"
        reasons = (transform.why_not_compiled(block) for transform in b.made.values())
        return next(filter(None, reasons), "")

    # the number of documents in a batch is a size, too
    dynamic = b.plan.variable or "document_ids" in b.plan.fields
    tp = b.made["tp"].ranks if b.config.tp_async else None
    overlap_in_compiled_blocks(None if tp is None else tp.group)
    return CompiledBlocks(dynamic, b.plan.blocks, why_not)


def _batch_norms(b: _Built) -> Transform:
    from titanlike.techniques.batchnorm import BatchNorms

    return BatchNorms(b.mesh)


def _expert_balance(b: _Built) -> Transform:
    from titanlike.techniques.mixture.expert_parallel import ExpertBalance

    def parts_of_sequences() -> bool:  # in the current step: of tensor-parallel ranks
        return any(getattr(transform.ranks, "sequence", False) for transform in b.made.values())

    context: Any = b.made.get("cp")
    take = None if context is None else context.ranks.take
    return ExpertBalance(b.mesh, parts_of_sequences, b.plan.microbatches_of, take)


def _casts(b: _Built) -> Transform:
    from titanlike.techniques.cast_parameters import CastParameters

    return CastParameters(compute_dtype(b.config.precision), accumulates=not b.config.exact)


def _exact_sums(b: _Built) -> Transform:
    from titanlike.techniques.exact import ExactSums

    graph = b.plan.model_graph
    drawing = {n.target for n in graph.recording(graph.fields, True).nodes if n.random}
    return ExactSums(b.config.seed, b.mesh, b.plan.microbatches, b.plan.zero, drawing)


_STAGES: list[tuple[str, Callable[[_Built], bool], Callable[[_Built], Transform]]] = [
    ("weight gradients later", lambda b: bool(b.plan.deferred), _weight_gradients_later),
    ("recomputation", lambda b: b.plan.recomputed.count > 0, _recomputation),
    ("compile", lambda b: b.config.compile, _compiled),
    (
        "batch norms",
        lambda b: any(isinstance(m, BatchNorm) for m in b.plan.model_graph.model.modules()),
        _batch_norms,
    ),
    ("balance of experts", lambda b: bool(experts_of(b.plan.model_graph.model)), _expert_balance),
    ("exact sums", lambda b: b.config.exact, _exact_sums),
    ("casts", lambda b: b.config.precision.low and not wrapped_in_fsdp(b.config), _casts),
]
