"""The first operation that differs between a layout and one process is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titanlike.proof.comparison import Comparison, compare
from titanlike.proof.operations import Operation, first_operation

X, Y = torch.arange(4.0), torch.ones(4)


def compared(mine: Tensor, whole: Tensor, others: list[Tensor]) -> tuple[Comparison | None, bool]:
    row = compare("", "", mine, whole, tolerance=1e-6)
    of_sum = compare("", "", torch.stack([mine, *others]).sum(0), whole, tolerance=1e-6)
    return (of_sum, True) if not row.agrees and of_sum.agrees else (row, False)


def of(*named: tuple[str, Tensor | None]) -> list[Operation]:
    return [Operation(n, f"{n}.py:1", [] if t is None else [t]) for n, t in named]


REFERENCE = of(("exp", X), ("mul", Y), ("mul", X))
CASES: dict[str, tuple[list[Operation], list[list[Operation]], str]] = {
    "the second of a kind": (
        of(("exp", X), ("mul", Y), ("mul", 2 * X)),
        [],
        "mul (mul.py:1), by 1.0e+00; 2 before it agree",
    ),
    "pairs begin at the end": (
        of(("mul", 3 * X), ("exp", X), ("mul", Y), ("mul", X)),
        [],
        "those that one process has, too, agree",
    ),
    "one more of a kind": (
        of(("exp", X), ("mul", Y), ("mul", Y), ("mul", Y)),
        [],
        "too, agree; it is one of mul (mul.py:1)",
    ),
    "a collective has no pair": (
        of(("exp", X), ("c10d.allreduce_", None)),
        [],
        "too, agree; it is one of c10d.allreduce_ (c10d.allreduce_.py:1)",
    ),
    "what comes before and after it": (
        of(("fill", X), ("exp", Y), ("c10d.allreduce_", None)),
        [],
        "before it, of the layout alone, fill (fill.py:1); after it c10d.allreduce_",
    ),
    "parts of a sum": (
        of(("mul", X / 4)),
        [of(("mul", 3 * X / 4))],
        "mul (mul.py:1), right as a part of a sum over ranks; none sums it",
    ),
    "one process computes otherwise": (
        of(("fused", X)),
        [],
        "one process has none of them; it is one of fused (fused.py:1)",
    ),
    "nothing is computed": (of(("c10d.recv_", None)), [], ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_operation_that_differs_is_named(name: str) -> None:
    mine, peers, text = CASES[name]
    told = first_operation(mine, REFERENCE, peers, compared)
    assert text in told and bool(text) == bool(told), told
