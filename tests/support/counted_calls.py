"""How often a step calls what, by kind."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.speed.step_kinds import CASTS, kind_of
from titanlike.core.training.build import StepPhases

_FREE = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach")


class Call(NamedTuple):
    """A call of an operator that reads or writes memory."""

    kind: str  # one of KINDS
    name: str  # "aten::mm"
    phase: str  # of the step, as `StepPhases` names it
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

    def __init__(self, ranges: StepPhases | None = None) -> None:
        """ranges: of a run, which name the phases."""
        super().__init__()
        self.calls: Counter[Call] = Counter()
        self._ranges, self._phase = ranges, ""

    def __enter__(self) -> CountedCalls:
        if self._ranges is not None:
            self._ranges.observers.append(self)
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
            node = torch._C._current_autograd_node()
            kind = kind_of([name, node.name() if node else "", self._phase])
            read, written = (tuple(tensor.dtype for tensor in each) for each in (given, made))
            shapes = tuple(tensor.shape for tensor in made)
            self.calls[Call(kind, name, self._phase, read, written, shapes)] += 1
        return result
