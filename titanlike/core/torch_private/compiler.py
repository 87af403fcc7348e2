"""torch.compile: graph breaks and counts, compiler errors, and asynchronous tensor parallelism."""

from __future__ import annotations

import logging
import warnings
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


def as_if_compiling() -> AbstractContextManager[Any]:
    """A context in which `torch.compiler.is_compiling()` is true.

    Libraries then choose a forward that does not read tensor values (transformers' masks and
    mixtures of experts), which meta tensors need, too. Test:
    `test_fences.py::test_a_forward_can_be_told_that_it_is_compiled`.
    """
    return patch.object(torch.compiler, "is_compiling", lambda: True)


def is_graph_break(error: Exception) -> bool:
    """Whether the error says that a function cannot be compiled without a graph break."""
    from torch._dynamo import exc

    return isinstance(error, (exc.Unsupported, exc.UserError, exc.InternalTorchDynamoError))


def compiler_error(error: Exception) -> str:
    """Why the graph compiler (inductor) failed, in one line; "" = it did not."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import InductorError

    if not isinstance(error, (BackendCompilerFailed, InductorError)):
        return ""
    return next(line.strip() for line in str(error).splitlines() if line.strip())


def graph_break_reason(error: Exception) -> str:
    """What breaks the graph and where, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]

    def after(prefix: str) -> list[str]:
        return [line.removeprefix(prefix).strip() for line in lines if line.startswith(prefix)]

    reason = " ".join([lines[0].rstrip("."), *after("Explanation:")[:1]])
    return " ".join([reason, *(f"({place})".replace('"', "") for place in after("File ")[-1:])])


def allow_graphs(count: int) -> None:
    """Raise torch.compile's recompile limits to `count` graphs of a function.

    Symptom without it: the ninth kind of block (another size or setting), or the ninth length, ends
    the run with FailOnRecompileLimitHit, or runs uncompiled, silently, if graph breaks are allowed.
    Test: `test_compile_fences.py::test_torch_compiles_a_function_eight_times_only`.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def hide_checkpoint_warning() -> None:
    """Hide a wrong warning of torch.compile.

    Symptom: with a list of operators to save, it warns of in-place operators, which it has
    functionalized before the list is used. Test:
    `test_compile_fences.py::test_torch_warns_of_selective_checkpointing_under_compile`.
    """
    wrong = "context_fn is passed to torch.utils.checkpoint"
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(lambda record: wrong not in record.getMessage())


def graph_count() -> int:
    """The number of graphs compiled in this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def overlap_in_compiled_blocks(group: dist.ProcessGroup | None) -> None:
    """Let inductor fuse all-gather + matmul and matmul + reduce-scatter, in graphs compiled from
    now on, into kernels that overlap them in symmetric memory of the group's GPUs; None = disable.

    Source: torch._inductor.fx_passes.micro_pipeline_tp, which has no public switch. Test:
    `test_functional_collectives.py ::test_asynchronous_tensor_parallelism_has_no_public_switch`.
    """
    import torch._inductor.config as inductor  # late: it imports the compiler

    inductor._micro_pipeline_tp = group is not None
    if group is not None:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        with warnings.catch_warnings():
            # deprecated, but the pass checks that it was called (2.11 to 2.15)
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(group.group_name)
