"""FSDP2: missing and late gradients, custom all-gathers, and hooks around its collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlike.core.torch_private.autograd import call_when_added


def reduce_missing_gradients(module: nn.Module, reached: set[nn.Parameter], zero: int) -> None:
    """Let FSDP reduce zeros for a module's parameters without gradient, and add the others to
    `reached`.

    zero: 1 = gradients are reduced once a step, 2 and 3 = in each backward. Symptom without it:
    FSDP leaves such a parameter out of its reduce-scatter, and ranks whose reduce-scatters differ
    mix up gradients, or hang. Test:
    `test_fences.py::test_fsdp_mixes_up_gradients_that_one_rank_alone_has`.
    """

    def fill_before(group: Any, state: Any) -> None:
        post_backward = group.post_backward

        def with_every_gradient(*unused: Any) -> None:
            # after the last backward torch calls it once more for all groups, also if they are
            # reduced already
            if group.reduce_grads and (zero == 1 or not state._state_ctx.is_last_backward):
                _fill(group.fsdp_params, reached)
            post_backward(*unused)

        group.post_backward = with_every_gradient

    for group, state in _groups(module):
        fill_before(group, state)


def gather_with(part: FSDPModule, block: nn.Module) -> None:
    """All-gather a part of a block, and reduce its gradients, together with the block.

    Symptom without it: the part's hooks run inside the block's forward, where torch.compile breaks
    the graph, and leaves a recomputed block uncompiled. Test:
    `test_fences.py::test_hooks_of_fsdp_inside_of_a_block_break_its_graph`.
    """
    state: Any = part._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = block.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = block.register_forward_hook(state._post_forward)


def gather_other(
    parameter: nn.Parameter,
    send: Callable[[], tuple[Tensor, ...]],
    receive: Callable[..., Tensor],
) -> None:
    """Let FSDP all-gather other bytes than a parameter's.

    send: returns what this rank sends, each with the rows of its shard; receive: makes the weight
    that modules compute with from what was gathered of each, which it keeps. torch calls these hooks on tensor
    subclasses; a plain shard may have them, too (its `lazy_init`: "allow monkey patch"). Test:
    test_float8_casts.py::test_a_weight_is_cast_once_a_step
    """
    shard: Any = parameter._local_tensor  # type: ignore[attr-defined]

    def before(mesh: Any) -> Any:
        return send(), None

    def after(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        made: Any = receive(*outputs)
        if out is None:
            return made, tuple(outputs)
        out._scale = made._scale
        return None

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after


def sum_in_reduce_dtype(groups: Iterable[Any]) -> None:
    """Add the unsharded gradients of a split backward to FSDP's sums over microbatches, in fp32.

    groups: of the stage, see `parameter_groups`. Symptoms without it (2.11, 2.13), in bf16: torch
    adds to its sums in backwards alone, so weight gradients that are computed one after the other
    are added in bf16; of those after the last backward it raises "expects uniform gradient dtype".
    Tests: test_weight_gradients.py::test_weight_gradients_are_summed_in_fp32,
    test_weight_gradients_may_all_come_after_the_last_backward
    """
    for group in groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                _sum_in_reduce_dtype(parameter)


def sum_each_in_reduce_dtype(groups: Iterable[Any]) -> None:
    """As `sum_in_reduce_dtype`, whenever `add_gradient` has added to a parameter: so no more than one
    has a gradient beside its sum. Test:
    test_weight_gradients.py::test_weight_gradients_are_added_to_their_sum_one_by_one
    """
    for group in groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                call_when_added(
                    parameter._unsharded_param, partial(_sum_in_reduce_dtype, parameter)
                )


def _sum_in_reduce_dtype(parameter: Any) -> None:
    if not hasattr(parameter, "to_accumulated_grad_if_needed"):
        return  # 2.15 keeps all in .grad, in fp32
    if parameter.unsharded_accumulated_grad is None:
        parameter.to_accumulated_grad_if_needed()
    else:
        parameter.accumulate_unsharded_grad_if_needed()


def parameter_groups(module: nn.Module) -> list[Any]:
    """FSDP's parameter groups in a module; [] if it is not wrapped. Walks through all modules: call
    it once, not in each step."""
    return [group for group, _ in _groups(module)]


def _groups(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter group, and the FSDP state of its module."""
    # modules that are all-gathered together share a state
    parts = (part for part in module.modules() if isinstance(part, FSDPModule))
    for state in dict.fromkeys(part._get_fsdp_state() for part in parts):
        groups = getattr(state, "_fsdp_param_groups", None)  # 2.13
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            yield group, state


def _fill(parameters: list[Any], reached: set[nn.Parameter]) -> None:
    """Set missing gradients of a group's FSDPParams to zeros, in the dtype of the others."""
    missing, accumulated = [], None
    for parameter in parameters:
        if not parameter.sharded_param.requires_grad or not hasattr(parameter, "_unsharded_param"):
            continue
        if parameter.unsharded_accumulated_grad is not None:
            accumulated = parameter.unsharded_accumulated_grad.dtype
        elif parameter._unsharded_param.grad is None:
            missing.append(parameter)
            continue
        reached.add(parameter.sharded_param)
    for parameter in missing:
        if hasattr(type(parameter), "unsharded_zero_grad_data"):  # 2.15: always in .grad
            parameter._unsharded_param.grad = parameter.unsharded_zero_grad_data
            continue
        like = parameter._unsharded_param  # in float8 a tensor subclass of torchao
        zeros = torch.zeros(like.shape, dtype=accumulated or like.dtype, device=like.device)
        if accumulated is None:
            like.grad = zeros
        else:
            parameter.unsharded_accumulated_grad = zeros


def watch_collectives(
    groups: Iterable[Any], tell: Callable[[str], object], waits_alone: bool = False
) -> Callable[[], None]:
    """Call `tell` with "gather" or "reduce" when a rank begins to launch or to wait for FSDP's
    collective, and with "" when it goes on; return a function that removes this.

    groups: see `parameter_groups`; waits_alone: not at launches. torch has no hook for it. Test:
    `test_timeline.py::test_gathers_and_reductions_are_told_from_computing`.
    """
    methods = {"wait_for_unshard": "gather", "finalize_backward": "reduce"}
    if not waits_alone:
        methods |= {"unshard": "gather", "post_backward": "reduce"}

    def wrapped(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tell(kind)
            try:
                return method(*args, **kwargs)
            finally:
                tell("")

        return call

    stack = ExitStack()
    for group in groups:
        for name, kind in methods.items():
            stack.enter_context(patch.object(group, name, wrapped(getattr(group, name), kind)))
    return stack.close
