"""What a training step is spent on, by kind: products, attention, loss, casts, optimizer, ...

`kind_of` tells the kind of an operator or kernel from its name and from what called it. Two tables
are made by it: `CountedCalls`, how often a step calls what (on the CPU; the same on a GPU but for compiled
blocks), and the seconds of a trace.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlike.torch_private.autograd import node_that_runs
from titanlike.torch_private.operators import TorchDispatchMode
from titanlike.torch_private.tensors import tree_leaves
from titanlike.training.build import Ranges

CASTS, OTHERS = "casts and copies", "element-wise and others"

# The first that fits a name: of the kernel, the operator, what called it, the phase of the step.
_KINDS = (
    ("optimizer", r"^Optimizer\.step|^optimizer$|_fused_(adam|sgd)"),
    ("collectives", r"^c10d|^nccl|^gloo|^_c10d_functional|^fsdp::|^record_param_comms"),
    (
        "matrix products",
        r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|_scaled_grouped_mm|convolution\w*)$"
        r"|^titanlike::expert_linear|^nvjet|gemm|cutlass",
    ),
    ("attention", r"scaled_dot_product|attention|attn|^fmha|sdpa"),
    ("loss", r"Loss|^loss$|softmax|nll_loss|cross_entropy"),
    ("norm and clip", r"^(gradient )?norm$|^clip$|^norm and clip$|_foreach_norm"),
    (
        CASTS,
        r"^aten::(_foreach_)?(_to_)?(copy|clone)|^Mem(cpy|set)|_fused_(_to_copy|clone)(_\d+)?$",
    ),
    ("accumulation", r"AccumulateGrad$|^aten::_foreach_add_"),
)
_FREE = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach")
KINDS = (*(kind for kind, _ in _KINDS), OTHERS)


def kind_of(names: Sequence[str]) -> str:
    """names: of a kernel or operator, and of what called it, in any order."""
    return next((kind for kind, of in _KINDS if any(re.search(of, n) for n in names)), OTHERS)


class Call(NamedTuple):
    """A call of an operator that reads or writes memory."""

    kind: str  # one of KINDS
    name: str  # "aten::mm"
    phase: str  # of the step, as `Ranges` names it
    read: tuple[torch.dtype, ...]  # of each tensor
    written: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]  # of what is written; a list's each

    @property
    def casts(self) -> int:
        """Tensors that it writes in another dtype, and does nothing else."""
        if self.kind != CASTS:
            return 0
        sources = self.read[-len(self.written) :]
        return sum(a != b for a, b in zip(sources, self.written, strict=False))


class CountedCalls(TorchDispatchMode):
    """A context: how often each call is made within it, in `calls`. Blocks must not be compiled."""

    def __init__(self, ranges: Ranges | None = None) -> None:
        """ranges: of a run, which name the phases."""
        super().__init__()
        self.calls: Counter[Call] = Counter()
        self._ranges, self._phase = ranges, ""

    def __enter__(self) -> CountedCalls:
        if self._ranges is not None:
            self._ranges.add(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._ranges is not None:
            self._ranges.remove(self)

    def begin(self, phase: str) -> None:
        self._phase = phase

    def start_action(self, action: Any) -> None:
        """Of a schedule."""

    def action_queued(self, action: Any, received: bool) -> None:
        """Of a schedule."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not made and name.endswith("_"):  # lists are changed in place, and not returned
            made = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)]
        if made and not function.is_view and not name.startswith(_FREE):
            kind = kind_of([name, node_that_runs(), self._phase])
            read, written = (tuple(tensor.dtype for tensor in each) for each in (given, made))
            shapes = tuple(tensor.shape for tensor in made)
            self.calls[Call(kind, name, self._phase, read, written, shapes)] += 1
        return result
