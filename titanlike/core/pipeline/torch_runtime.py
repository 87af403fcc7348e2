"""Make torch's pipeline runtime for an Order of several stages or ranks.

torch's runtime adds P2P sends and receives, all-gathers and reduce-scatters between the actions of
an Order (`core/torch_private/pipeline_runtime.py`). One stage in one process needs no communication, see
`microbatch_loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.transform import Transform
from titanlike.core.graph.cut import StageGraph, messages
from titanlike.core.graph.stage import FIELD, Stage
from titanlike.core.pipeline.order import Order
from titanlike.core.torch_private.pipeline_runtime import OrderRuntime
from titanlike.core.torch_private.pipeline_stage import GradientSums, make_stage


def make_runtime(
    order: Order,
    stages: Mapping[int, Stage],
    graphs: Sequence[StageGraph],
    loss: Callable[[Any, Tensor], Tensor],
    fields: Sequence[str],
    first: Tensor,
    mesh: Mesh,
    zero: int,
    transforms: Sequence[Transform],
    begin_microbatch: Callable[[int, int], None],
    sums: Mapping[int, GradientSums],
) -> OrderRuntime:
    """Make the runtime of an order for batches of one shape.

    stages: this rank's, by index; graphs: of all stages, in training; loss: called with the last
    stage's output and the targets; fields: batch fields that this rank's stages read; first: the
    first stage's input for a microbatch, on meta; zero: ZeRO level, see `core/distributed/sharding.py`;
    begin_microbatch: called with (stage, microbatch) before each forward and backward; sums: by
    stage, sums of gradients in place of those of FSDP and autograd.
    """

    def make_torch_stage(index: int, stage: Stage) -> Any:
        graph = graphs[index]
        received, sent = messages(graph)
        weight_gradients = None
        if order.splits_backward:
            takers = (transform.weight_gradients(index) for transform in transforms)
            weight_gradients = next(filter(None, takers), _nothing_queued)
        return make_stage(
            stage,
            index,
            order.stages,
            device=mesh.device,
            group=mesh.axes.get_group("pp"),
            inputs=[first] if index == 0 else received,
            outputs=sent,
            zero=zero,
            weight_gradients=weight_gradients,
            skips_in=graph.skips_in,
            skips_out=graph.skips_out,
            begin_microbatch=begin_microbatch,
            sums=sums.get(index),
        )

    # (source, target) of skip connections, which bypass stages -> whether a gradient comes back
    skips: dict[tuple[int, int], bool] = {}
    for index, graph in enumerate(graphs):
        skipping = graph.sends[len(graph.sends) - len(graph.skips_out) :]
        for to, node in zip(graph.skips_out, skipping, strict=True):
            has_gradient = node in graph.differentiated_later
            skips[index, to] = skips.get((index, to), False) or has_gradient
    wrapped = [make_torch_stage(index, stage) for index, stage in stages.items()]
    arguments = {FIELD + name: name for name in fields}
    return OrderRuntime(order, wrapped, loss, arguments, zero=zero, skips=skips)


def _nothing_queued() -> Callable[[], None]:
    """The work of W if the stage's weight gradients are computed in I: none."""
    return lambda: None
