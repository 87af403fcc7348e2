"""An Order of several stages, or of several ranks: torch's pipeline runtime over this rank's stages.

torch's runtime sends, gathers and reduces between the computations of an Order
(`torch_private/pipeline_runtime.py`). One stage in one process needs none of it:
`microbatch_loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from titanlike.distributed.mesh import Mesh
from titanlike.distributed.transform import Transform
from titanlike.graph.cut import StageGraph, messages
from titanlike.graph.stage import FIELD, Stage
from titanlike.pipeline.order import Order
from titanlike.torch_private.pipeline_runtime import OrderRuntime
from titanlike.torch_private.pipeline_stage import GradientSums, make_stage


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
    """The runtime of an order for batches of one shape.

    stages: of this rank, by index; graphs: of all stages, in training; loss: of the last stage's
    output and the targets; fields: of the batch, that this rank's stages read; first: what the
    first stage takes of a microbatch, on meta; zero: see `distributed/sharding.py`;
    begin_microbatch: called with a stage and a microbatch before each forward; sums: what adds a
    stage's gradients where FSDP and autograd do not.
    """

    def torchs(index: int, stage: Stage) -> Any:
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

    # values that pass by stages -> whether a gradient comes back
    skips: dict[tuple[int, int], bool] = {}
    for index, graph in enumerate(graphs):
        skipping = graph.sends[len(graph.sends) - len(graph.skips_out) :]
        for to, node in zip(graph.skips_out, skipping, strict=True):
            back = node in graph.differentiated_later
            skips[index, to] = skips.get((index, to), False) or back
    wrapped = [torchs(index, stage) for index, stage in stages.items()]
    arguments = {FIELD + name: name for name in fields}
    return OrderRuntime(order, wrapped, loss, arguments, zero=zero, skips=skips)


def _nothing_queued() -> Callable[[], None]:
    """What W does where a stage's weight gradients are computed in I."""
    return lambda: None
