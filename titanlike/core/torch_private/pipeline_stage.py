"""A stage of torch's pipeline runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _ComputationType

from titanlike.core.torch_private.fsdp import (
    parameter_groups,
    sum_each_in_reduce_dtype,
    sum_in_reduce_dtype,
)

# 2.13; not 2.15, which waits for sends within a step, nor 2.11, which has no metadata of messages
_TORCH_KEEPS_BUFFERS = hasattr(PipelineStage, "_setup_forward_recv_info") and not hasattr(
    _ComputationType, "WAIT_SEND_F"
)


class GradientSums(Protocol):
    """Adds the gradients of a stage's microbatches."""

    reached: set[nn.Parameter]  # FSDP's parameters that a backward of the step reached

    def backward(self, microbatch: int) -> None:
        """Called before the backward of a microbatch."""

    def end(self, microbatch: int, complete: bool) -> None:
        """Called after the backward; complete: whether all weight gradients exist. If not, it is
        called again when they do."""

    def finish(self) -> None:
        """Called after all backwards, before the gradients are used. Collective."""


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
    weight_gradients: Callable[[], Callable[[], None]] | None,
    skips_in: Sequence[int] = (),
    skips_out: Sequence[int] = (),
    begin_microbatch: Callable[[int, int], None],
    sums: GradientSums | None = None,
) -> PipelineStage:
    """One stage of torch's pipeline runtime.

    inputs, outputs: meta tensors like what one microbatch receives and sends. They make shapes
    static: to infer them, torch would run a forward and a backward, which sets FSDP's gradients to
    None. zero: 1 = gather parameters and reduce gradients once a step; 2 = reduce in each backward;
    3 = also gather in each forward and backward, block by block. weight_gradients: called after
    each backward; returns what W does, in a schedule that splits the backward. The backward is then
    full, and runs in I; torch's would walk through the graph twice, and through a checkpointed
    block for each of its weights. skips_in, skips_out: indices of the non-adjacent stages that the
    last of `inputs` come from and the last of `outputs` go to. begin_microbatch: called with the
    stage and the microbatch before each forward and backward. sums: called around each backward,
    takes its gradients; None = FSDP and autograd add them.
    """
    kind: Any = _Stage if zero == 1 else _ShardingStage
    near_in, near_out = len(inputs) - len(skips_in), len(outputs) - len(skips_out)
    if skips_in or skips_out:
        from titanlike.core.torch_private.pipeline_skips import SkippingStage

        kind = type("SkippingStage", (SkippingStage, kind), {})
    stage: Any = kind(
        module,
        index,
        stages,
        device,
        group=group,
        input_args=tuple(inputs[:near_in]),
        output_args=tuple(outputs[:near_out]),
        dw_builder=weight_gradients,
    )
    if skips_in or skips_out:
        ends = (skips_in, inputs[near_in:]), (skips_out, outputs[near_out:])
        stage.open_skips(*(_by_stage(stages, metas) for stages, metas in ends))
    stage.sums, stage.begin_microbatch = sums, begin_microbatch
    if zero > 1:
        stage.reshard_after_backward = zero == 3
    if hasattr(stage, "_get_init_p2p_neighbors_ops"):
        # Symptom (2.11): a first message goes to every adjacent stage, in a V also to the rank
        # itself, and gloo crashes.
        # Test: test_fences.py::test_torch_sends_first_messages_to_the_rank_itself
        first_messages, me = stage._get_init_p2p_neighbors_ops, dist.get_rank()
        stage._get_init_p2p_neighbors_ops = lambda: [op for op in first_messages() if op.peer != me]
    return stage


def _by_stage(stages: Sequence[int], metas: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    by_stage: dict[int, list[Tensor]] = {}
    for stage, meta in zip(stages, metas, strict=True):
        by_stage.setdefault(stage, []).append(meta)
    return by_stage


class _Stage(PipelineStage):
    """A stage that sends a zero gradient for an input that its loss did not reach.

    Symptom: torch raises "expected metadata, got None" (2.13), or the previous stage hangs. Whether
    a gradient comes back may depend on values, as in `if x.sum() > 0`. Test:
    `test_fences.py::test_torchs_stage_expects_a_gradient_of_every_input`.
    """

    # Symptom (2.13): receive buffers of all microbatches, for each batch length, are allocated
    # before the first step and kept. Here each exists from its receive to its use.
    # Test: test_messages_in_memory.py
    # ::test_torchs_runtime_keeps_what_it_has_sent_to_the_end_of_a_step

    def _setup_forward_recv_info(self, *args: Any) -> None:
        super()._setup_forward_recv_info(*args)
        for infos in self.args_recv_info.values():
            _free(infos)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            _free(infos)
        return result

    _runtime_validate = True  # whether messages are validated; see `OrderRuntime.train`

    # 2.11 lacks it, and validates the forward's messages in these two, and no others

    def _validate_fwd_input(self, *args: Any) -> None:
        if self._runtime_validate:
            super()._validate_fwd_input(*args)  # type: ignore[misc]  # 2.11 alone has it

    def _validate_fwd_outputs(self, *args: Any) -> None:
        # not the last stage's: its logits may be another vocabulary shard than the announced one,
        # the first tensor-parallel rank's
        if self._runtime_validate and not self.is_last:
            super()._validate_fwd_outputs(*args)  # type: ignore[misc]  # 2.11 alone has it

    sums: GradientSums | None = None
    begin_microbatch: Callable[[int, int], None]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        _allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward:
            _allocate(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.begin_microbatch(self.stage_index, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _free(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> None:
        self.begin_microbatch(self.stage_index, bwd_chunk_id)
        if self.sums is not None:
            self.sums.backward(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.sums is not None:
            self.sums.end(bwd_chunk_id, full_backward)
        _free(self.grad_recv_info.get(bwd_chunk_id, ()))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> None:
        groups = self._groups if self.sums is None else []
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        sum_in_reduce_dtype(groups)  # those that the I before it has added
        if self.sums is not None:
            self.sums.end(bwd_chunk_id, True)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        gradients, groups = self._backward(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            return gradients, groups
        inputs = bwd_kwargs["input_values"]
        return tuple(map(_zero_if_missing, gradients, inputs)), groups

    def _backward(self, kind: str, kwargs: dict[str, Any], last: bool) -> Any:
        return super().backward_maybe_with_nosync(kind, kwargs, last)

    @cached_property
    def _groups(self) -> list[Any]:
        groups = parameter_groups(self.submod)
        if self.sums is None:
            sum_each_in_reduce_dtype(groups)
        return groups

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.sums is None:
            sum_in_reduce_dtype(self._groups)
        super().perform_reduce_grad(grad_scale_factor)
        waits = isinstance(self.submod, FSDPModule) and hasattr(
            PipelineStage, "wait_for_gradient_reduction"
        )
        if self.sums is not None and not waits:
            self.sums.finish()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Called by the runtime and by `perform_reduce_grad` for a stage with FSDP (2.15)."""
        super().wait_for_gradient_reduction(grad_scale_factor)  # type: ignore[misc]
        if self.sums is not None:
            self.sums.finish()


def _allocate(infos: Sequence[Any], device: torch.device) -> None:
    """Allocate the buffers of one microbatch's message, if torch has them in its records (2.13)."""
    for info in infos if _TORCH_KEEPS_BUFFERS else ():
        meta = getattr(info, "tensor_meta", None)
        if meta is not None and info.buffer is None:
            info.buffer = torch.empty_strided(
                meta.shape, meta.stride, dtype=meta.dtype, device=device
            )


def _free(infos: Sequence[Any]) -> None:
    for info in infos if _TORCH_KEEPS_BUFFERS else ():
        if getattr(info, "tensor_meta", None) is not None:
            info.buffer = None


def _zero_if_missing(gradient: Tensor | None, value: Any) -> Tensor | None:
    missing = gradient is None and isinstance(value, Tensor) and value.requires_grad
    return torch.zeros_like(value) if missing else gradient


class _ShardingStage(_Stage):
    """A stage whose full backwards reduce gradients block by block, into sharded gradients.

    Symptom: torch's stage accumulates unsharded gradients until the last microbatch, memory that no
    data-parallel degree shrinks. Test:
    `test_fences.py::test_torchs_stage_accumulates_unsharded_gradients`.
    """

    reshard_after_backward = False

    def _backward(self, kind: str, kwargs: dict[str, Any], last: bool) -> Any:
        assert kind == "full", "ZeRO 2 and 3 need whole backwards"
        if not isinstance(self.submod, FSDPModule):
            return super()._backward(kind, kwargs, last)
        self.submod.set_is_last_backward(False)  # the order's REDUCE_GRAD ends the step
        for group in self._groups:  # not of one rank, which would only cast its weights again
            alone = group.mesh_info.shard_mesh_size == 1
            group.reshard_after_backward = self.reshard_after_backward and not alone
        self.submod.set_requires_gradient_sync(True)
        # all-reduce over replicas only once a step
        self.submod.set_requires_all_reduce(last)
        names = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(kwargs[name] for name in names)), None
