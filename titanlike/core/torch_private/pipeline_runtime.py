"""torch's pipeline runtime, driven by an Order; the orders of torch's schedule classes.

Differences between torch 2.11 and 2.15 are detected by features, never by version numbers.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

_Kind = torch_schedules._ComputationType
_Action = torch_schedules._Action
# computations that may wait for a P2P receive; all actions with work on the device
_RECEIVING = (_Kind.FORWARD, _Kind.FULL_BACKWARD, _Kind.BACKWARD_INPUT)
_ON_DEVICE = (*_RECEIVING, _Kind.BACKWARD_WEIGHT, _Kind.UNSHARD, _Kind.REDUCE_GRAD)


class Order(Protocol):
    """The attributes of `pipeline.order.Order` that are used here."""

    @property
    def ranks(self) -> tuple[tuple[Any, ...], ...]: ...
    @property
    def stage_to_rank(self) -> tuple[int, ...]: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def stages(self) -> int: ...
    def local(self, rank: int) -> tuple[int, ...]: ...
    def forward_only(self) -> Order: ...


def _lower(order: Order, resident: int) -> dict[int, list[Any]]:
    """Lower compute actions to torch's of each rank: with gathers, reductions, sends and receives.

    resident: stages whose unsharded parameters a rank may hold at a time.
    """
    reduce: list[Any] = [_Kind.REDUCE_GRAD]
    if hasattr(_Kind, "WAIT_REDUCE_GRAD"):  # 2.15
        newer: Any = _Kind
        reduce.append(newer.WAIT_REDUCE_GRAD)
    ranks: dict[int, list[Any]] = {}
    for rank, acts in enumerate(order.ranks):
        left = dict.fromkeys(order.local(rank), order.microbatches)
        actions = ranks[rank] = []
        compute: list[_Action | None] = [
            _Action(act.stage, _Kind(act.kind), act.mb) for act in acts
        ]
        for action in torch_schedules._add_unshard_reshard(compute, resident):
            actions.append(action)
            if action.computation_type in (_Kind.FULL_BACKWARD, _Kind.BACKWARD_WEIGHT):
                stage = action.stage_index
                left[stage] -= 1
                if left[stage] == 0:
                    actions += [_Action(stage, kind, None) for kind in reduce]
    ranks = torch_schedules._add_send_recv(ranks, order.stage_to_rank.__getitem__, order.stages)
    if hasattr(torch_schedules, "_add_wait_send"):  # 2.15
        ranks = torch_schedules._add_wait_send(ranks)
    _check_transport_order(ranks, order.stage_to_rank)
    return ranks


def _check_transport_order(ranks: dict[int, list[Any]], place: tuple[int, ...]) -> None:
    """Assert that every rank receives from a peer in the order in which that peer sends.

    P2P messages carry no tag: in another order, activations and gradients are silently swapped
    (torch's `defer_pp_recv` does so).
    """
    sent: dict[tuple[int, int], list[Any]] = {}  # by (sender, receiver): (way, stage, microbatch)
    received: dict[tuple[int, int], list[Any]] = {}
    for rank, actions in ranks.items():
        for action in actions:
            kind, _, way = action.computation_type.name.partition("_")
            stage, step = action.stage_index, 1 if way == "F" else -1
            if kind == "SEND":
                message = way, stage + step, action.microbatch_index
                sent.setdefault((rank, place[stage + step]), []).append(message)
            elif kind == "RECV":
                message = way, stage, action.microbatch_index
                received.setdefault((place[stage - step], rank), []).append(message)
    assert sent == received, "a rank would receive messages of a peer in another order than sent"


class _Actions(list[Any]):
    """A rank's actions, which call the runtime before and after each one.

    torch's runtime has no hook for it; it iterates over its list once a step.
    Test: `test_fences.py::test_the_runtime_takes_its_actions_one_by_one_from_a_list`.
    """

    def __init__(
        self,
        actions: list[Any],
        runtime: OrderRuntime,
        received: dict[int, list[Any]],
        posts: Mapping[int, list[Any]],
    ):
        """received: see `_received_after`; posts: this rank's, see `skip_posts`."""
        super().__init__(actions)
        self._runtime, self._received, self._posts = runtime, received, posts

    def __iter__(self) -> Iterator[Any]:
        for index, action in enumerate(super().__iter__()):
            self._runtime.begin(action, self._posts.get(index, ()))
            yield action
            self._runtime.done(action, self._received.get(index, ()))
        self._runtime.begin(None, self._posts.get(len(self), ()))

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        """torch copies the order to print it with an error: no action begins."""
        return self[:]


def _received_after(
    ranks: dict[int, list[Any]],
    place: tuple[int, ...],
    me: int,
    posts: Mapping[int, Mapping[int, list[Any]]] = MappingProxyType({}),
) -> dict[int, list[Any]]:
    """Map the index of an action of rank `me` to the sends of `me` that have certainly been
    received after it: their receiver waited for them before it sent something that has arrived.

    posts: see `skip_posts`.
    """
    computed = {  # (F or B, stage, microbatch) -> index of the computation on the stage's rank
        ("F" if kind == "F" else "B", action.stage_index, action.microbatch_index): index
        for actions in ranks.values()
        for index, action in enumerate(actions)
        if (kind := action.computation_type.value) in ("F", "B", "I")
    }

    def sends(rank: int) -> Iterator[tuple[int, Any, int, int]]:
        """Yield (index, action, receiving rank, index of its computation that waits)."""
        for index, action in enumerate(ranks[rank]):
            name, _, way = action.computation_type.name.partition("_")
            if name == "SEND":
                stage = action.stage_index + (1 if way == "F" else -1)
                waiting = computed[way, stage, action.microbatch_index]
                yield index, action, place[stage], waiting
        for index, messages in posts.get(rank, {}).items():
            for message in messages:
                if place[message.source] == rank:
                    waiting = computed["F" if message.forward else "B", message.to, message.mb]
                    yield index, message, place[message.to], waiting

    # by rank: (index of a send to `me`, index of the computation of `me` that waits for it)
    answers = {
        rank: sorted((index, waiting) for index, _, to, waiting in sends(rank) if to == me)
        for rank in ranks
    }
    received_after: dict[int, list[Any]] = {}
    for _, action, to, received in sends(me):
        arrived = next((waiting for index, waiting in answers[to] if index > received), None)
        if arrived is not None:
            received_after.setdefault(arrived, []).append(action)
    return received_after


def _post(operations: Sequence[Any]) -> list[Any]:
    """Launch sends or receives one by one.

    Symptom without it (2.11): torch launches batches of one. NCCL puts all batches of a rank, to
    any peer, into one stream, where an early receive blocks later sends; single messages have a
    stream per peer. Test: `test_fences.py::test_torch_batches_single_messages`.
    """
    return [op.op(op.tensor, op.peer, group=op.group, tag=op.tag) for op in operations]


class OrderRuntime(torch_schedules._PipelineScheduleRuntime):
    """torch's pipeline runtime on an Order, for every schedule: training and evaluation.

    It replaces torch's schedule classes. Symptoms: with a loaded order they never reduce FSDP's
    gradients; their `eval()` sets gradients to None, scales them, or hangs. Test:
    `test_fences.py::test_torchs_own_eval_still_touches_gradients`.
    """

    def __init__(
        self,
        order: Order,
        stages: list[PipelineStage],
        loss: Callable[[Any, Tensor], Tensor],
        fields: Mapping[str, str],
        *,
        zero: int,
        skips: Mapping[tuple[int, int], bool] = MappingProxyType({}),
    ):
        """fields: keyword argument of this rank's stages -> field of the batch; skips: all ranks'
        skip connections (stage, later stage) -> whether gradients come back."""
        options: dict[str, Any] = {"scale_grads": False, "backward_requires_autograd": False}
        super().__init__(stages, order.microbatches, loss_fn=loss, **options)
        self.stage_index_to_group_rank = dict(enumerate(order.stage_to_rank))
        self._fields = dict(fields)
        self._local: dict[int, Any] = {stage.stage_index: stage for stage in stages}
        self._gathered = {  # FSDP modules by stage
            index: [part for part in stage.submod.modules() if isinstance(part, FSDPModule)]
            for index, stage in self._local.items()
        }
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        # all stages stay resident for a step: fewer all-gathers, as the memory plan assumes
        resident = max(len(order.local(rank)) for rank in range(len(order.ranks)))
        self._train = _lower(order, resident)
        self._forward = _lower(order.forward_only(), resident)
        self.pipeline_order_with_comms = self._train
        self._sending: dict[Any, list[Any]] = {}  # by action: sends that may not be received yet
        # called when each action of this rank begins, and with None after the last
        self.on_action: Callable[[Any], None] = lambda _: None
        # called when a computation is in the device's queue (False), and before that when its wait
        # for messages is (True)
        self.on_queued: Callable[[Any, bool], None] = lambda action, received: None
        self._validated: set[bool] = set()  # whether gradients were on in steps that have run
        if not hasattr(_Kind, "WAIT_SEND_F"):
            # Symptom (2.11, 2.13): each sent tensor stays in memory to the end of the step, where
            # torch waits for its sends. Test: test_messages_in_memory.py
            # ::test_torchs_runtime_keeps_what_it_has_sent_to_the_end_of_a_step
            functions = self._comp_type_to_function_map
            functions[_Kind.SEND_F] = functions[_Kind.SEND_B] = self._send
        for kind in (_Kind.RECV_F, _Kind.RECV_B):
            self._comp_type_to_function_map[kind] = self._receive
        self._arriving: dict[Any, list[Any]] = {}  # by computation: skip messages that it waits for
        posts: Mapping[int, Mapping[int, list[Any]]] = {}
        for ranks in (self._train, self._forward):
            if skips:
                from titanlike.core.torch_private.pipeline_skips import skip_posts

                posts = skip_posts(ranks, order.stage_to_rank, skips)
            waits_here = _Kind.SEND_F in self._comp_type_to_function_map  # else torch waits
            received = {}
            if waits_here or skips:
                received = _received_after(ranks, order.stage_to_rank, self.rank, posts)
            actions = ranks[self.rank]
            ranks[self.rank] = _Actions(actions, self, received, posts.get(self.rank, {}))
        for index in self._local if skips else ():
            self._local[index].on_this_rank = self._local
        self._last = order.stages - 1
        self._waiting = {  # (forward, stage, microbatch) -> the computation that needs its message
            (action.computation_type == _Kind.FORWARD, action.stage_index, mb): action
            for action in self._train[self.rank][:]
            if action.computation_type in _RECEIVING and (mb := action.microbatch_index) is not None
        }
        register = self.register_custom_function
        if zero < 3:
            register(_Kind.UNSHARD, lambda act, _: self._gather(act.stage_index))
        else:  # FSDP's hooks gather each block when it runs
            register(_Kind.UNSHARD, lambda act, _: self.unsharded_stages.add(act.stage_index))
            register(_Kind.RESHARD, lambda act, _: self.unsharded_stages.discard(act.stage_index))

    def _gather(self, index: int) -> None:
        """All-gather a stage's parameters module by module: each while the previous one is copied
        out.

        Symptom without it: torch launches all at once, so a whole stage's buffers are in memory
        next to its parameters; it waits for all before the first forward anyway. Test:
        `test_fences.py::test_torch_gathers_all_units_of_a_stage_at_once`.
        """
        previous: Any = None
        for module in self._gathered[index]:
            work = module.unshard(async_op=True)
            if previous is not None:
                previous.wait()
            previous = work
        if previous is not None:
            previous.wait()
        self.unsharded_stages.add(index)

    def _arguments(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {argument: batch[field] for argument, field in self._fields.items()}

    def run_alone(self, index: int, received: Sequence[Tensor], batch: dict[str, Tensor]) -> None:
        """Run one microbatch of one local stage as torch's runtime does, without P2P: forward and,
        with gradients on, a full backward from zeros and the reduction. Collective over dp."""
        stage: Any = self._local[index]
        output = stage.submod(*received, **self._arguments(batch))
        if torch.is_grad_enabled():
            outputs = (output,) if isinstance(output, Tensor) else tuple(output)
            gradients = [torch.zeros_like(tensor) for tensor in outputs]
            values = {"stage_output": outputs, "output_grads": gradients, "input_values": received}
            stage.backward_maybe_with_nosync("full", values, last_backward=True)
            if stage.dw_builder is not None:
                stage.dw_builder()()  # W
            stage.perform_reduce_grad(1)
        for part in self._gathered[index]:  # without a backward they stay gathered
            part.reshard()

    def begin(self, action: Any, messages: Sequence[Any]) -> None:
        """Before an action (None = after the last): launch these skip messages; wait for those it
        needs."""
        for message in messages:
            if message.source in self._local:
                sends = self._local[message.source].skip_sends(message)
                self._sending[message] = _post(sends)
            else:
                waiting = self._waiting[message.forward, message.to, message.mb]
                receives = self._local[message.to].skip_receives(message)
                self._arriving.setdefault(waiting, []).extend(_post(receives))
        self.on_action(action)
        if self._arriving:
            torch_schedules._wait_batch_p2p(self._arriving.pop(action, []))

    def _send(self, action: Any, _: Any) -> None:
        stage = self._local[action.stage_index]
        forward = action.computation_type == _Kind.SEND_F
        operations = stage.get_fwd_send_ops if forward else stage.get_bwd_send_ops
        self._sending[action] = _post(operations(action.microbatch_index))

    def _receive(self, action: Any, _: Any) -> None:
        stage, microbatch = self._local[action.stage_index], action.microbatch_index
        forward = action.computation_type == _Kind.RECV_F
        operations = stage.get_fwd_recv_ops if forward else stage.get_bwd_recv_ops
        works = _post(operations(microbatch))
        # torch waits for its list in order: this is called once the waits for the messages are in the
        # device's queue
        waiting = self._waiting[forward, action.stage_index, microbatch]
        works.append(SimpleNamespace(wait=partial(self.on_queued, waiting, True)))
        received = self.fwd_recv_ops if forward else self.bwd_recv_ops
        received[action.stage_index, microbatch] = works

    def done(self, action: Any, received: Sequence[Any]) -> None:
        """After an action, release the tensors of these sends, which are received by now; never
        waits.

        Symptom without `detach_`: torch keeps each loss, and with it its microbatch's graph and
        what the last stage received, to the end of a step. Test:
        test_messages_in_memory.py::test_torchs_losses_keep_what_the_last_stage_received
        """
        for send in received:
            torch_schedules._wait_batch_p2p(self._sending.pop(send, []))
        backward = action.computation_type in (_Kind.FULL_BACKWARD, _Kind.BACKWARD_INPUT)
        if backward and action.stage_index == self._last:
            self._internal_losses[action.microbatch_index].detach_()
        if action.computation_type in _ON_DEVICE:
            self.on_queued(action, False)

    def train(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Forward and backward of one batch; return its microbatches' losses on the last stage."""
        losses: list[Tensor] = []
        first = (batch["inputs"],) if any(stage.is_first for stage in self._stages) else ()
        last = any(stage.is_last for stage in self._stages)
        kwargs: dict[str, Any] = {"target": batch["targets"], "losses": losses} if last else {}
        kwargs |= self._arguments(batch)
        # Validate shapes and dtypes of messages in the first step with gradients and the first
        # without: a runtime's batches have one shape. Symptom without it: a message of another
        # length or dtype is received as garbage (2.11 to 2.15), or each is validated in each step,
        # which takes host time. Test:
        # test_fences.py::test_torch_does_not_validate_messages_by_default
        for stage in self._stages:
            stage._runtime_validate = torch.is_grad_enabled() not in self._validated
        try:
            self.step(*first, return_outputs=False, **kwargs)
            for works in self._sending.values():
                torch_schedules._wait_batch_p2p(works)
        finally:
            self._sending.clear()
            self._arriving.clear()
        self._validated.add(torch.is_grad_enabled())
        return losses

    def evaluate(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Forward only, over the same stages; gradients are left alone."""
        self.pipeline_order_with_comms = self._forward
        try:
            with torch.no_grad():
                return self.train(batch)  # the order has no backwards
        finally:
            self.pipeline_order_with_comms = self._train
            for stage in self._stages:
                stage.clear_runtime_states()


def generated_order(
    class_name: str, pp: int, microbatches: int, stages_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """The compute actions that torch's schedule class generates, without running anything.

    class_name: as for torch's `get_schedule_class`. Returns `(kind, stage, microbatch)` of each
    pipeline rank in execution order; an overlapped pair becomes its forward and its backward, as
    torch executes it. Raises ValueError or AssertionError for sizes that the class refuses; for
    others the order may still be wrong: check it.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # torch prints while it inserts sends
        ranks: Any = get_schedule_ops(class_name, pp, microbatches, stages_per_rank)
    return [
        [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in rank
            if action is not None  # a bubble
            for part in action.sub_actions or (action,)
        ]
        for rank in ranks
    ]
