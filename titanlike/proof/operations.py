"""The operations of a step between two recorded places, in a layout and in one process: the first
that differs, with the source line that calls it.

Operations of one kind are paired from the last one backwards, as far as both have them. Operations
of the layout only, such as collectives, have no pair: they are named, not compared.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlike.core.graph.recording import tree_flatten
from titanlike.core.torch_private import deferred_dynamo
from titanlike.core.torch_private.autograd import in_backward, running_node, sequence_number
from titanlike.core.torch_private.operators import TorchDispatchMode
from titanlike.proof.comparison import Comparison

# files whose lines are not reported
_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), deferred_dynamo.__file__)
_SHOWN = 3
DIFFERS = ", by "
# (this rank's result, one process's, those of ranks that may have partial sums) -> (their
# comparison, whether it is the sum's)
Compared = Callable[[Tensor, Tensor, list[Tensor]], tuple[Comparison | None, bool]]


class Operation(NamedTuple):
    name: str  # torch's: aten.mm
    line: str  # FILE:LINE of its call; for a backward, of its forward's
    results: list[Tensor]

    def __str__(self) -> str:
        return f"{self.name} ({self.line})" if self.line else self.name


class Operations(TorchDispatchMode):
    """Records operations from the place before `end` to `end`, in a step and microbatch."""

    supports_higher_order_operators = True

    def __init__(self, end: Any, microbatch: int) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self._end, self._microbatch, self._closed = end, microbatch, False
        self._backward = end.phase.startswith("gradient")
        self._lines: dict[int, str] = {}  # forwards' lines, by autograd's sequence numbers

    def at(self, place: Any, microbatch: int) -> None:
        """Called when a place is reached."""
        if (place, microbatch) == (self._end, self._microbatch):
            self._closed = True
        elif not self._closed and place.phase != "share":
            self.found.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its inner operations are recorded
        result = func(*args, **(kwargs or {}))
        name, schema = str(getattr(func, "overloadpacket", func)), getattr(func, "_schema", None)
        returns = schema.returns if schema else ()
        view = any(each.alias_info and not each.alias_info.is_write for each in returns)
        if (
            self._closed
            or view
            or "empty" in name
            or name.startswith(("profiler", "fsdp", "_c10d"))
        ):
            return result
        backward, node = in_backward(), running_node()
        line = _line()
        if not backward:
            self._lines.setdefault(sequence_number(), line)
        elif node is not None and not node.python:
            line = self._lines.get(node.number, "") or node.name
        if backward == self._backward:
            tensors = (leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor))
            results = [t.detach().cpu().clone() for t in tensors if not name.startswith("c10d.")]
            self.found.append(Operation(name, line, results))
        return result


def _line() -> str:
    """The innermost line of code outside of torch and of this package."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"


def first_operation(
    in_layout: list[Operation],
    reference: list[Operation],
    peers: list[list[Operation]],
    compared: Compared,
) -> str:
    """A text about the first operation that differs; peers: operations of ranks that may have the
    other partial sums."""
    theirs, layout = _by_kind(reference), _by_kind(in_layout)
    others = [_by_kind(operations) for operations in peers]
    counts = [Counter(each.name for each in operations) for operations in (in_layout, reference)]
    # alone: of the layout; after: those of them since the last one that is paired
    agreed, alone, after, first, part = 0, list[Operation](), list[Operation](), "", ""
    for key, operation in layout.items():
        rows = []
        results = theirs[key].results if key in theirs else []
        for index, pair in enumerate(zip(operation.results, results, strict=False)):
            parts = [of[key].results for of in others if key in of]
            rows.append(compared(*pair, [part[index] for part in parts if len(part) > index]))
        compared_rows = [row for row, _ in rows if row is not None]
        wrong = [row for row in compared_rows if not row.agrees]
        # where one side has more of a kind, these may be others than those that they are paired with
        unsure = wrong and counts[0][operation.name] != counts[1][operation.name]
        if not compared_rows or unsure:
            if not operation.line.startswith("<"):  # FSDP's, before a stage's forward
                alone.append(operation)
                after.append(operation)
        elif wrong and not first:
            first = f"operation: {operation}{DIFFERS}{wrong[0].relative:.1e}"
            first += f"; {agreed} before it agree" if agreed else ""
            first += f"; before it, of the layout alone, {_names(alone)}" if alone else ""
            after = []
        elif not first:
            agreed, after, summed = agreed + 1, [], any(of_sum for _, of_sum in rows)
            part = f"{operation}, right as a part of a sum over ranks" if summed else ""
    if first:
        return f"{first}; after it {_names(after)}" if after else first
    if part:
        return f"operation: {part}; {f'after it {_names(after)}' if after else 'none sums it'}"
    if not agreed and not any(operation.results for operation in alone):
        return ""
    those = "those that one process has, too, agree" if agreed else "one process has none of them"
    return f"operation: {those}" + (f"; it is one of {_names(alone)}" if alone else "")


def _by_kind(operations: list[Operation]) -> dict[tuple[str, int], Operation]:
    """Map (name, index from the last of that name) to operations, in order."""
    counts: dict[str, int] = defaultdict(int)
    by_kind = {}
    for operation in reversed(operations):
        by_kind[operation.name, counts[operation.name]] = operation
        counts[operation.name] += 1
    return dict(reversed(by_kind.items()))


def _names(operations: Iterable[Operation]) -> str:
    """By line; collectives first, then the last ones."""
    lines: dict[str, dict[str, None]] = {}
    for operation in reversed([*operations]):
        lines.setdefault(operation.line, {})[operation.name] = None
    texts = [f"{', '.join(reversed(names))} ({line})" for line, names in lines.items()]
    texts.sort(key=lambda text: "c10d" not in text)
    return ", ".join(texts[:_SHOWN]) + f" and {len(texts) - _SHOWN} more lines" * (
        len(texts) > _SHOWN
    )
