"""Collectives that torch.compile traces into its graph, where inductor can overlap them."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


def run(operation: str, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """all_reduce (a sum), all_gather or reduce_scatter (along `dim`), all_to_all, without gradient.

    torch has no other form of these that its pass for asynchronous tensor parallelism recognizes.
    Test: test_functional_collectives.py
    ::test_torchs_pass_recognizes_what_a_divided_layer_exchanges
    """
    if operation == "all_reduce":
        result = functional.all_reduce(x, "sum", group)
    elif operation == "all_gather":
        result = functional.all_gather_tensor(x.contiguous(), dim, group)
    elif operation == "all_to_all":
        result = functional.all_to_all_single(x.contiguous(), None, None, group)
    else:
        result = functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, group)
    return functional.wait_tensor(result)
