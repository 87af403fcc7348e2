"""A call of an operator in the divided model, beside the same call in the whole one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titanlike.parallel.tp.layout import Layout, Shape, WrongCall


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of a call."""

    whole: Shape  # in the undivided model
    local: Shape
    layout: Layout


@dataclass(frozen=True)
class Call:
    """An operator's call in the divided model beside the same call in the whole one."""

    name: str  # "aten.mm"
    given: dict[str, Any]  # arguments by name, tensors as Operands
    whole: Mapping[str, Any]  # in the whole model, tensors as None
    operands: list[Operand]
    results: list[tuple[Shape, Shape]]  # shapes (whole, local)
    pointwise: bool = False  # as torch has tagged it

    def check_same_numbers(self) -> None:
        """Raises WrongCall where an argument that is no tensor is another than in the whole model."""
        for name, value in self.given.items():
            other = self.whole.get(name)
            if _has_operand(value) or name in ("dtype", "layout", "device", "pin_memory"):
                continue
            if name != "memory_format" and type(value) is type(other) and value != other:
                raise WrongCall(f"its {name} is {_shown(value)}, and {_shown(other)} in the model")

    @property
    def input(self) -> Operand:
        return self.operands[0]

    def dim(self, value: int) -> int:
        return value % max(len(self.input.whole), 1)


def _has_operand(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_operand, value))
    return isinstance(value, Operand)


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


Rule = Callable[[Call], "list[Layout]"]
