"""Which unit computed which tensor, also one that the unit does not return.

A block may store a tensor in a dict, a list or an attribute, and a later block may read it there
(stash and pop). The two may be on different stages, where nothing is read, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any

from torch import Tensor

from titanlike.torch_private.tensors import tree_leaves


class HiddenValues:
    """What units compute of their arguments and weights, while a forward is recorded.

    What a unit computes of sizes alone may be stored (a table of positions that blocks share): each
    stage computes its own.
    """

    def __init__(self) -> None:
        # by id; keeps them alive, so ids stay unique
        self._made: dict[int, tuple[Tensor, str]] = {}
        self._given: set[int] = set()  # ids of the running unit's arguments

    def enter(self, arguments: Iterable[Any]) -> None:
        """A unit is called with these tensors."""
        self._given = {id(tensor) for tensor in tensors(*arguments)}

    def add(self, unit: str, function: str, used: Sequence[Tensor], result: Any) -> None:
        """To be called with each torch function that a unit calls, and the tensors in its arguments."""
        if function.endswith("_like") or function.startswith("new_"):
            return  # of an argument's shape and dtype, not of its values
        if function == "to" or function.endswith("_as"):
            used = used[:1]  # likewise of the other argument
        if any(id(t) in self._made or id(t) in self._given or t.requires_grad for t in used):
            for tensor in tensors(result):
                self._made.setdefault(id(tensor), (tensor, unit))

    def is_given(self, tensor: Tensor) -> bool:
        """Whether it is an argument of the running unit."""
        return id(tensor) in self._given

    def made_by(self, tensor: Tensor) -> str | None:
        """The unit that computed the tensor."""
        return self._made[id(tensor)][1] if id(tensor) in self._made else None


def tensors(*values: Any) -> list[Tensor]:
    """The tensors in values and nested containers. Called for each torch function: it is quick where
    a value is a tensor or a number itself."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif not isinstance(value, (int, float, str, NoneType)):
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
