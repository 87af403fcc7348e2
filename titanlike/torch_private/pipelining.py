"""Every private API of torch that titanlike uses, and what differs between torch 2.11 and 2.15.

Versions are told apart by features, never by number. Each fence says what torch does without it;
`tests/test_torch_private.py` tells when one can go.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

if TYPE_CHECKING:
    from titanlike.pipeline.order import Order

_Kind = torch_schedules._ComputationType
_Action = torch_schedules._Action
FIELD = "field:"  # what the names of a batch's fields begin with on their way through the runtime


def make_stage(
    module: nn.Module,
    index: int,
    stages: int,
    *,
    device: torch.device,
    group: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    zero: int,
    splits_weights: bool,
) -> PipelineStage:
    """One stage of torch's pipeline runtime.

    inputs, outputs: meta tensors like what arrives and leaves with one microbatch. Static, because else
    torch runs an extra forward and backward first, and sets FSDP's gradients to None with it.
    zero: 1 = gather parameters and reduce gradients once a step; 2 = reduce in each backward;
    3 = also gather in each forward and backward, block by block.
    splits_weights: whether a schedule that splits the backward may split this stage's. If not, the
    whole backward runs in the first half: torch goes twice through the graph of a weight that is
    used twice, and finds no weights in a stage that has none.
    """
    kind = PipelineStage if zero == 1 else _ShardingStage
    stage = kind(
        module,
        index,
        stages,
        device,
        group=group,
        input_args=tuple(inputs),
        output_args=tuple(outputs),
        dw_builder=None if splits_weights else lambda: lambda: None,
    )
    if zero > 1:
        stage.reshard_after_backward = zero == 3
    # Without it a wrong length or dtype between stages is silent garbage (2.13, 2.15).
    stage._runtime_validate = True
    if hasattr(stage, "_get_init_p2p_neighbors_ops"):
        # 2.11 sends a first message to every neighbour stage, also to itself in a V: gloo dies.
        first_messages, me = stage._get_init_p2p_neighbors_ops, dist.get_rank()
        stage._get_init_p2p_neighbors_ops = lambda: [op for op in first_messages() if op.peer != me]
    return stage


class _ShardingStage(PipelineStage):
    """A stage whose whole backwards reduce gradients block by block, into sharded gradients.

    torch's own accumulates unsharded gradients of the whole stage until the last microbatch, which
    takes memory that no data-parallel degree shrinks.
    """

    reshard_after_backward = False

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        assert backward_type == "full", "ZeRO 2 and 3 need whole backwards"
        if not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.submod.set_is_last_backward(False)  # the order's REDUCE_GRAD ends the step
        self.submod.set_reshard_after_backward(self.reshard_after_backward)
        self.submod.set_requires_gradient_sync(True)
        # replicas add up once a step: until then each keeps the sum of its own
        self.submod.set_requires_all_reduce(last_backward)
        names = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(bwd_kwargs[name] for name in names)), None


def halves_are_exact(stage: nn.Module, model: nn.Module) -> bool:
    """Whether torch's split backward gives a stage's gradients of weights right.

    2.11's is wrong for a weight that is used in parts, as in an LSTM or torch's own attention, and
    fails where some weights of the model are frozen.
    """
    if hasattr(PipelineStage, "_post_metadata_inference_cleanup"):  # 2.13
        return True
    in_parts = (nn.RNNBase, nn.MultiheadAttention)
    frozen = not all(parameter.requires_grad for parameter in model.parameters())
    return not (frozen or any(isinstance(module, in_parts) for module in stage.modules()))


def _lower(order: Order, resident: int) -> dict[int, list[Any]]:
    """Compute actions -> torch's actions, with gathers, reductions, sends and receives, per rank.

    resident: stages whose unsharded parameters a rank may hold at a time.
    """
    reduce = [_Kind.REDUCE_GRAD]
    if hasattr(_Kind, "WAIT_REDUCE_GRAD"):  # 2.15
        reduce.append(_Kind.WAIT_REDUCE_GRAD)
    ranks = {}
    for rank, acts in enumerate(order.ranks):
        left = dict.fromkeys(order.local(rank), order.microbatches)
        ranks[rank] = []
        compute = [_Action(act.stage, _Kind(act.kind), act.mb) for act in acts]
        for action in torch_schedules._add_unshard_reshard(compute, resident):
            ranks[rank].append(action)
            if action.computation_type in (_Kind.FULL_BACKWARD, _Kind.BACKWARD_WEIGHT):
                stage = action.stage_index
                left[stage] -= 1
                if left[stage] == 0:
                    ranks[rank] += [_Action(stage, kind, None) for kind in reduce]
    ranks = torch_schedules._add_send_recv(ranks, order.place.__getitem__, order.stages)
    if hasattr(torch_schedules, "_add_wait_send"):  # 2.15
        ranks = torch_schedules._add_wait_send(ranks)
    _check_transport_order(ranks, order.place)
    return ranks


def _check_transport_order(ranks: dict[int, list[Any]], place: tuple[int, ...]) -> None:
    """Assert that every rank receives from a peer in the order in which that peer sends.

    Messages between two ranks carry no tag: received in another order, activations and gradients
    are swapped silently (as torch's `defer_pp_recv` does).
    """
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for rank, actions in ranks.items():
        for action in actions:
            name, stage, mb = (
                action.computation_type.name,
                action.stage_index,
                action.microbatch_index,
            )
            if name in ("SEND_F", "SEND_B"):
                to = stage + (1 if name == "SEND_F" else -1)
                sent.setdefault((rank, place[to]), []).append((name[-1], to, mb))
            elif name in ("RECV_F", "RECV_B"):
                source = stage - (1 if name == "RECV_F" else -1)
                received.setdefault((place[source], rank), []).append((name[-1], stage, mb))
    assert sent == received, "a rank would receive messages of a peer in another order than sent"


class _Watched(list):
    """A rank's actions; tells of each when torch's runtime takes it.

    The runtime has no hook for it: it goes through its list once a step, by a for loop.
    """

    def __init__(self, actions: list[Any], act: Callable[[Any], None]) -> None:
        super().__init__(actions)
        self._act = act

    def __iter__(self) -> Iterator[Any]:
        act = self._act
        for action in super().__iter__():
            act(action)
            yield action
        act(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        """torch copies the order to print it beside an error: that takes no action."""
        return self[:]


class OrderRuntime(torch_schedules._PipelineScheduleRuntime):
    """torch's pipeline runtime on an Order, for every schedule: training and evaluation.

    It replaces torch's schedule classes: a hand-made order there never reduces FSDP's gradients,
    and their `eval()` sets gradients to None, divides them, or hangs.
    """

    def __init__(
        self,
        order: Order,
        stages: list[PipelineStage],
        loss: Callable[[Any, Tensor], Tensor],
        fields: Sequence[str],
        *,
        zero: int,
    ):
        """fields: of the batch, that this rank's stages take beside what arrives."""
        options: dict[str, Any] = {"scale_grads": False, "backward_requires_autograd": False}
        super().__init__(stages, order.microbatches, loss_fn=loss, **options)
        self.stage_index_to_group_rank = dict(enumerate(order.place))
        self._fields = list(fields)
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        # all stages stay resident for a step: fewer gathers, and what the memory plan counts
        resident = max(len(order.local(rank)) for rank in range(len(order.ranks)))
        self._train = _lower(order, resident)
        self._forward = _lower(order.forward_only(), resident)
        self.pipeline_order_with_comms = self._train
        if zero == 3:  # FSDP's own hooks gather each block when it runs
            self.register_custom_function(
                _Kind.UNSHARD, lambda action, _: self.unsharded_stages.add(action.stage_index)
            )
            self.register_custom_function(
                _Kind.RESHARD, lambda action, _: self.unsharded_stages.discard(action.stage_index)
            )

    def watch(self, act: Callable[[Any], None]) -> None:
        """Call `act` with each action of this rank when it begins, and with None after the last."""
        for order in (self._train, self._forward):
            order[self.rank] = _Watched(order[self.rank][:], act)

    def train(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Forward and backward of one batch: the losses of its microbatches, on the last stage."""
        losses: list[Tensor] = []
        self._call(batch, losses)
        return losses

    def evaluate(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Forward alone, over the same stages: gradients are left as they are."""
        losses: list[Tensor] = []
        self.pipeline_order_with_comms = self._forward
        try:
            with torch.no_grad():
                self._call(batch, losses)
        finally:
            self.pipeline_order_with_comms = self._train
            for stage in self._stages:
                stage.clear_runtime_states()
        return losses

    def _call(self, batch: dict[str, Tensor], losses: list[Tensor]) -> None:
        first = (batch["inputs"],) if any(stage.is_first for stage in self._stages) else ()
        last = any(stage.is_last for stage in self._stages)
        told: dict[str, Any] = {"target": batch["targets"], "losses": losses} if last else {}
        # told apart from what `step` itself takes by name: target, losses, return_outputs, ...
        told |= {FIELD + name: batch[name] for name in self._fields}
        self.step(*first, return_outputs=False, **told)


def generated_order(
    class_name: str, pp: int, microbatches: int, stages_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """The compute actions that torch's own schedule class generates, without running anything.

    `class_name` is a name that torch's `get_schedule_class` knows, such as "ZBVZeroBubble". Returns
    for each pipeline rank its `(kind, stage, microbatch)` in execution order, kind one of F, B, I
    and W. An overlapped pair becomes its forward and its backward: torch's runtime executes it
    like that. Raises what torch raises (ValueError or AssertionError) for sizes that the class
    refuses; sizes that it accepts may still give an order that is wrong, so check it.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # torch prints while it inserts sends
        ranks = get_schedule_ops(class_name, pp, microbatches, stages_per_rank)
    return [
        [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in rank
            if action is not None  # a bubble
            for part in action.sub_actions or (action,)
        ]
        for rank in ranks
    ]
