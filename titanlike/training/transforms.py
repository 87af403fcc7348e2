"""What a config does to this rank's stages: a row a technique, in the order in which they are applied.

A technique is imported where a config asks for it, and nowhere else on the way of a run. FSDP is none of
them: stages are sharded behind all of these (`build.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from titanlike.config.schema import Config
from titanlike.parallel.batchnorm import BatchNorms, has_statistics
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.placement import experts_of
from titanlike.parallel.sharding import compute_dtype, wrapped_in_fsdp
from titanlike.parallel.transform import Transform
from titanlike.training.draft import Draft, Ranks


@dataclass(frozen=True)
class _Asked:
    """What a technique is made of."""

    config: Config
    mesh: Mesh
    plan: Draft
    ranks: Ranks
    made: dict[str, Transform] = field(default_factory=dict)  # those of the rows above


def stage_transforms(config: Config, mesh: Mesh, plan: Draft, ranks: Ranks) -> dict[str, Transform]:
    """Those that the config asks for, by their names. Collective: some make process groups.

    ranks: with which the draft was made.
    """
    asked = _Asked(config, mesh, plan, ranks)
    for name, wanted, make in _ROWS:
        if wanted(asked):
            asked.made[name] = make(asked)
    return asked.made


def _float8(a: _Asked) -> Transform:
    from titanlike.models.float8 import Float8

    return Float8(a.config, a.mesh.device)


def _tensor_parallel(a: _Asked) -> Transform:
    from titanlike.parallel.tp.tensor_parallel import TensorParallel

    assert a.plan.tensor is not None and a.ranks.tensor is not None
    return TensorParallel(a.plan.tensor, a.ranks.tensor, a.mesh, a.config.launch.timeout)


def _expert_parallel(a: _Asked) -> Transform:
    from titanlike.parallel.activation_checkpoint import keeps, saved_operators
    from titanlike.parallel.expert_parallel import SEND_TOKENS, ExpertParallel, ExpertRanks

    group = a.mesh.expert_group
    rank = 0 if group is None else dist.get_rank(group)
    model, eager = a.plan.model_graph.model, set()
    if a.plan.variable and not keeps(SEND_TOKENS, saved_operators(a.config)):
        recomputed = (name for blocks in a.plan.recomputed.blocks for name in blocks)
        eager = {name for name in recomputed if experts_of(model.get_submodule(name))}
    return ExpertParallel(ExpertRanks(a.config.ep, rank, group), eager)


def _context_parallel(a: _Asked) -> Transform:
    assert a.plan.context is not None and a.ranks.context is not None
    timeout = timedelta(seconds=a.config.launch.timeout)
    a.ranks.context.group = dist.new_group(
        a.mesh.context_ranks(), timeout=timeout, use_local_synchronization=True
    )
    return a.plan.context.parallel


def _weight_gradients_later(a: _Asked) -> Transform:
    from titanlike.parallel.weight_gradients import WeightGradientsLater

    return WeightGradientsLater(a.plan.deferred, a.mesh.device)


def _recomputation(a: _Asked) -> Transform:
    from titanlike.parallel.activation_checkpoint import ActivationCheckpointing, saved_operators

    save, exchanged = saved_operators(a.config), a.config.ep > 1
    return ActivationCheckpointing(a.plan.recomputed.blocks, save, exchanged)


def _compiled(a: _Asked) -> Transform:
    from titanlike.parallel.compiled_blocks import CompiledBlocks
    from titanlike.torch_private.compiler import overlap_in_compiled_blocks

    def why_not(block: str) -> str:
        if block in a.plan.model_graph.taking_gradients:
            return "it takes gradients in its forward"
        return next(filter(None, (one.why_not_compiled(block) for one in a.made.values())), "")

    group = None if a.ranks.tensor is None else a.ranks.tensor.group
    overlap_in_compiled_blocks(group if a.config.tp_async else None)
    # the number of documents in a batch is a size, too
    dynamic = a.plan.variable or "document_ids" in a.plan.fields
    return CompiledBlocks(dynamic, a.plan.blocks, why_not)


def _batch_norms(a: _Asked) -> Transform:
    return BatchNorms(a.mesh)


def _expert_balance(a: _Asked) -> Transform:
    from titanlike.parallel.expert_balance import ExpertBalance

    tensor = a.ranks.tensor
    return ExpertBalance(a.mesh, lambda: tensor is not None and tensor.sequence)


def _casts(a: _Asked) -> Transform:
    from titanlike.parallel.cast_parameters import CastParameters

    return CastParameters(compute_dtype(a.config))


def _has_norms(a: _Asked) -> bool:
    return any(map(has_statistics, a.plan.model_graph.model.modules()))


def _has_experts(a: _Asked) -> bool:
    return bool(experts_of(a.plan.model_graph.model))


_Row = tuple[str, Callable[[_Asked], bool], Callable[[_Asked], Transform]]
_ROWS: list[_Row] = [
    ("float8", lambda a: a.plan.float8 is not None, _float8),
    ("tp", lambda a: a.plan.tensor is not None, _tensor_parallel),
    ("ep", lambda a: a.config.ep > 1, _expert_parallel),
    ("cp", lambda a: a.plan.context is not None, _context_parallel),
    ("weight gradients later", lambda a: bool(a.plan.deferred), _weight_gradients_later),
    ("recomputation", lambda a: a.plan.recomputed.count > 0, _recomputation),
    ("compile", lambda a: a.config.compile, _compiled),
    ("batch norms", _has_norms, _batch_norms),
    ("balance of experts", _has_experts, _expert_balance),
    ("casts", lambda a: a.config.precision.low and not wrapped_in_fsdp(a.config), _casts),
]
