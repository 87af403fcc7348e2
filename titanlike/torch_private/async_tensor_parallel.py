"""torch.compile's pass that overlaps tensor parallelism's collectives with matrix products."""

from __future__ import annotations

import warnings

import torch.distributed as dist


def overlap_in_compiled_blocks(group: dist.ProcessGroup | None) -> None:
    """Let inductor replace all-gather + product, and product + reduce-scatter, in what it compiles from
    now on by kernels that do both at once, over symmetric memory of the group's GPUs; None = not.

    Source: torch._inductor.fx_passes.micro_pipeline_tp, which has no public switch.
    Test: `test_functional_collectives.py
    ::test_asynchronous_tensor_parallelism_has_no_public_switch`.
    """
    import torch._inductor.config as inductor  # late: it imports the compiler

    inductor._micro_pipeline_tp = group is not None
    if group is not None:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        with warnings.catch_warnings():
            # "no need to call this any more", but the pass asks whether it was (2.11 to 2.15)
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(group.group_name)
