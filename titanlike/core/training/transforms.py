"""The transforms of a config, in the order in which they are applied. A technique is imported where
a config asks for it.

Those that change the model are made while a run is planned, since its forward is recorded with
them; the others when stages are built. FSDP is not among them: stages are sharded after all of
these (`build.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
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
    if isinstance(config.precision, ScaledPrecision):
        from titanlike.techniques.low_precision.float8 import Float8

        made["float8"] = Float8(config, model)
    if config.tp > 1:
        from titanlike.techniques.tp.tensor_parallel import tensor_parallel

        made["tp"] = tensor_parallel(config, model, mesh, batch, checked.get("tp"))
    if config.ep > 1:
        from titanlike.techniques.mixture.expert_parallel import ExpertParallel

        made["ep"] = ExpertParallel(config, model, made.get("tp"))
    if config.cp > 1:
        from titanlike.techniques.cp.context_parallel import context_parallel

        made["cp"] = context_parallel(config, mesh, batch)
    return made


def stage_transforms(config: Config, mesh: Mesh, plan: Plan) -> dict[str, Transform]:
    """Make all transforms of the config, by name, and open those of the plan. Collective."""
    for transform in plan.transforms.values():
        transform.open(mesh, plan)
    made, graph = dict(plan.transforms), plan.model_graph
    if plan.deferred:
        from titanlike.techniques.weight_gradients import DeferWeightGradients

        made["weight gradients later"] = DeferWeightGradients(plan.deferred, mesh.device)
    if plan.recomputed.count > 0:
        from titanlike.techniques.activation_checkpoint import ActivationCheckpointing

        save, blocks = config.activation_checkpoint.saved, plan.recomputed.blocks
        made["recomputation"] = ActivationCheckpointing(blocks, save, exchanged="ep" in made)
    if config.compile:
        made["compile"] = compiled_blocks(config, plan, made)
    if any(isinstance(module, BatchNorm) for module in graph.model.modules()):
        from titanlike.techniques.batchnorm import BatchNorms

        made["batch norms"] = BatchNorms(mesh)
    if experts_of(graph.model):
        from titanlike.techniques.mixture.expert_parallel import ExpertBalance

        def parts_of_sequences() -> bool:  # in the current step: of tensor-parallel ranks
            return any(getattr(other.ranks, "sequence", False) for other in made.values())

        context: Any = made.get("cp")
        take = None if context is None else context.ranks.take
        balance = ExpertBalance(mesh, parts_of_sequences, plan.microbatches_of, take)
        made["balance of experts"] = balance
    if config.exact:
        from titanlike.techniques.exact import ExactSums

        drawing = {n.target for n in graph.recording(graph.fields, True).nodes if n.random}
        made["exact sums"] = ExactSums(config.seed, mesh, plan.microbatches, plan.zero, drawing)
    if config.precision.low and not wrapped_in_fsdp(config):
        from titanlike.techniques.cast_parameters import CastParameters

        dtype = compute_dtype(config.precision)
        made["casts"] = CastParameters(dtype, accumulates=not config.exact)
    return made


def compiled_blocks(config: Config, plan: Plan, made: Mapping[str, Transform]) -> Transform:
    """The transform that compiles blocks, except those that another one keeps eager; made: all
    others, of which some are made later."""
    from titanlike.core.torch_private.compiler import overlap_in_compiled_blocks
    from titanlike.techniques.compiled_blocks import CompiledBlocks

    def why_not(block: str) -> str:
        if block in plan.model_graph.taking_gradients:
            return "it takes gradients in its forward"
        reasons = (transform.why_not_compiled(block) for transform in made.values())
        return next(filter(None, reasons), "")

    # the number of documents in a batch is a size, too
    dynamic = plan.variable or "document_ids" in plan.fields
    tp = made["tp"].ranks if config.tp_async else None
    overlap_in_compiled_blocks(None if tp is None else tp.group)
    return CompiledBlocks(dynamic, plan.blocks, why_not)
