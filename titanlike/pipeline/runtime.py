"""torch's pipeline runtime over this rank's stages, for one shape of batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from titanlike.graph.cut import StageGraph, messages, same_messages
from titanlike.graph.model_graph import Fields, ModelGraph, shapes
from titanlike.graph.stage import Stage
from titanlike.optim.chunked_loss import loss_of_output
from titanlike.optim.loss import Loss
from titanlike.parallel.mesh import Mesh
from titanlike.pipeline.order import Order
from titanlike.torch_private.pipeline_runtime import OrderRuntime
from titanlike.torch_private.pipeline_stage import make_stage, split_backward_is_exact


@dataclass(frozen=True)
class RuntimeFactory:
    """Makes the runtime for each shape of batch."""

    order: Order
    model_graph: ModelGraph
    stages: Mapping[int, Stage]  # of this rank, by index
    loss: Loss
    mesh: Mesh
    zero: int  # see `parallel/sharding.py`

    def make(self, fields: Fields) -> OrderRuntime:
        """Add the forwards of such a batch to the stages; the runtime that calls them.

        Raises ValueError where a forward uses modules that it did not use in the draft.
        """
        training, evaluation = (self.model_graph.graphs(fields, on) for on in (True, False))
        wrapped = []
        for index, stage in self.stages.items():
            graphs = {True: training[index], False: evaluation[index]}
            assert same_messages(*graphs.values()), "checked by the draft"
            _check_modules(stage, [*graphs.values()], fields)
            stage.add_forwards(shapes(fields), graphs, index, self.mesh.device)
            wrapped.append(self._torch_stage(index, training[index], fields))
        used = [training[index].fields | evaluation[index].fields for index in self.stages]
        names = sorted(set().union(*used))
        last = self.order.stages - 1

        def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
            graphs = training if self.stages[last].training else evaluation
            return loss_of_output(self.loss, graphs[last], output, targets)

        return OrderRuntime(self.order, wrapped, loss_of, names, zero=self.zero)

    def _torch_stage(self, index: int, graph: StageGraph, fields: Fields) -> Any:
        received, sent = messages(graph)
        if index == 0:
            field = fields["inputs"]
            shape = (self.model_graph.microbatch_size, *field.shape)
            received = [torch.empty(shape, dtype=field.dtype, device="meta")]
        stage = self.stages[index]
        return make_stage(
            stage,
            index,
            self.order.stages,
            device=self.mesh.device,
            group=self.mesh.axes.get_group("pp"),
            inputs=received,
            outputs=sent,
            zero=self.zero,
            splits_weights=self._may_split_backward(graph)
            and split_backward_is_exact(stage, self.model_graph.model),
        )

    def _may_split_backward(self, graph: StageGraph) -> bool:
        """Whether a schedule may compute weight gradients later than input gradients."""
        for node in graph.nodes:
            if node.chunked_head is not None or node.checkpointed or node.data_dependent:
                return False  # what both halves need would be computed twice
        has_parameters = bool(self.model_graph.parameters_of(graph))
        return has_parameters and not self.model_graph.reuses_weights(graph)


def _check_modules(stage: Stage, graphs: list[StageGraph], fields: Fields) -> None:
    modules = dict(stage.named_modules())
    missing = [name for graph in graphs for name in graph.units if name not in modules]
    if missing:
        shown = ", ".join(f"{name} {list(field.shape)}" for name, field in fields.items())
        raise ValueError(f"model: for a batch of {shown} its forward also uses {missing[0]}")
