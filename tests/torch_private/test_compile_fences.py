"""What torch.compile and recomputation get wrong, or do silently: when one of these fails, its
fence can go."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlike.core.torch_private import compiler
from titanlike.core.torch_private.autograd import ignore_ranges_in_selective_checkpoints


def compiled(function, **options):
    return torch.compile(function, backend="eager", **options)


def test_torch_compiles_a_function_eight_times_only() -> None:
    """Fence: `compiler.allow_graphs`."""

    def scaled(x: Tensor, factor: int) -> Tensor:
        return x * factor

    config = torch._dynamo.config
    for limit, most in ((8, 8), (64, 10)):
        torch._dynamo.reset()
        with config.patch(recompile_limit=8, accumulated_recompile_limit=256):
            if limit > 8:
                compiler.allow_graphs(limit)
            before, function = compiler.graph_count(), compiled(scaled, dynamic=False)
            for factor in range(2, 12):
                function(torch.ones(2), factor)
            assert compiler.graph_count() - before == most
    torch._dynamo.reset()


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14), reason="2.15 keeps it"
)
def test_torch_leaves_out_the_context_of_two_variable_arguments() -> None:
    """Fence: `Float8Linear.forward` in techniques/low_precision."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, *factors: Tensor) -> Tensor:
            return x * factors[0]

    def scaled(x: Tensor, *factors: Tensor) -> Tensor:
        return Scaled.apply(x, *factors)

    one, two, three = (torch.full((2,), n) for n in (1.0, 2.0, 3.0))
    assert torch.equal(compiled(scaled)(one, two, three, three), two)
    assert not torch.equal(compiled(scaled)(one, two, three), two), "the fence can go"


def test_torch_warns_of_selective_checkpointing_under_compile(caplog) -> None:
    """Fence: `compiler.hide_checkpoint_warning`."""
    linear = nn.Linear(4, 4, bias=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def forward(x: Tensor) -> Tensor:
        return checkpoint(linear, x, use_reentrant=False, context_fn=contexts)

    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addHandler(caplog.handler)
    filters, logger.filters = logger.filters, []
    torch._logging._internal.warning_once.cache_clear()
    try:
        torch._dynamo.reset()
        torch.compile(forward, backend="aot_eager", fullgraph=True)(
            torch.ones(2, 4)
        ).sum().backward()
        assert "context_fn is passed to torch.utils.checkpoint" in caplog.text
    finally:
        logger.filters = filters
        logger.removeHandler(caplog.handler)
        torch._dynamo.reset()


@pytest.mark.parametrize("context", [None, "noop"])
def test_torch_compiles_no_checkpoint_with_a_context_that_does_nothing(context: str) -> None:
    """Fence: `activation_checkpoint.checkpoint_blocks` leaves it out."""
    options = {} if context is None else {"context_fn": torch.utils.checkpoint.noop_context_fn}

    def forward(x: Tensor) -> Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False, **options)

    torch._dynamo.reset()
    function = torch.compile(forward, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    if context is None:
        function(x).sum().backward()
        return
    with pytest.raises(Exception) as caught:
        function(x)
    assert compiler.is_graph_break(caught.value) and "context_fn" in str(caught.value)


@pytest.mark.skipif(
    "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters,
    reason="2.11 leaves ranges alone",
)
def test_ranges_may_differ_in_a_selective_recomputation() -> None:
    """If torch ignores them by itself, `ignore_ranges_in_selective_checkpoints` can go."""
    keep = [torch.ops.aten.mm.default]

    def backward() -> None:
        calls = []

        def block(x: Tensor) -> Tensor:
            calls.append(x)
            with contextlib.ExitStack() as ranges:
                if len(calls) > 1:  # as FSDP's hooks do
                    ranges.enter_context(torch.profiler.record_function("in the recomputation"))
                return (x @ x).sin()

        contexts = functools.partial(create_selective_checkpoint_contexts, keep)
        x = torch.ones(2, 2, requires_grad=True)
        checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()

    ignored = torch.utils.checkpoint.SAC_IGNORED_OPS
    ranges = {operator for operator in ignored if str(operator).startswith("profiler.")}
    ignored -= ranges
    with pytest.raises(RuntimeError, match="_record_function_enter_new"):
        backward()
    ignore_ranges_in_selective_checkpoints()
    backward()
