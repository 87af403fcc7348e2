"""What a recorded forward is: a graph of nodes, one for each unit and each operation between units."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from titanlike.graph.pytree import tree_flatten


class DEVICE:
    """Stands in a graph for the device of the stage that runs it."""


class RecordError(ValueError):
    """A forward that cannot be recorded: why, and what can be done about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason, self.fix = reason, fix


@dataclass(eq=False)
class Node:
    """One thing that the forward does, or uses; stands for its result in the arguments of others."""

    kind: Literal["input", "weight", "unit", "function"]
    target: Any  # a field of the batch, the name of a parameter, buffer or unit, or a function
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: Tensor | None = None  # on meta; None where the result is no tensor, but has some
    grad: bool = True  # whether autograd was on
    random: bool = False  # draws from a generator: done twice it gives something else
    weighs: bool = False  # is a parameter, or has some
    mutated: bool = False  # something later changes its result in place
    data_dependent: bool = (
        False  # a unit that meta tensors cannot run: what it does depends on values
    )
    repeats: bool = False  # a unit that uses a weight more than once
    checkpointed: bool = False  # its activations are computed again in the backward
    chunked_head: Any = None  # of the last stage: computes the loss, see optim/chunked_loss.py

    is_leaf_of_structures: ClassVar[bool] = True

    @property
    def uses(self) -> list[Node]:
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Node)]

    @property
    def shape(self) -> torch.Size:
        """Of its tensor, where it is one."""
        return self.value.shape


@dataclass(frozen=True)
class Recording:
    """A model's forward on batches of one shape."""

    nodes: list[Node]  # in the order in which they ran
    units: list[str]  # in the order in which they were first called
    output: Any  # what the model returns, with nodes in place of tensors
    # of a forward without units: the place in `nodes` where a module begins
    begins: dict[str, int] = field(default_factory=dict)
