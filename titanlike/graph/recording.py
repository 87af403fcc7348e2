"""What is recorded of a model's forward: a graph of inputs, weights, units and operations.

`RecordingBuilder` makes the nodes, `record_forward.py` calls it for each intercepted call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from titanlike.device.accelerator import KINDS
from titanlike.graph.gradient_flow import GradientFlow
from titanlike.graph.hidden_values import HiddenValues
from titanlike.graph.pytree import dataclass_fields, is_plain_dataclass, tree_flatten, tree_map
from titanlike.torch_private.tensors import GetAttrKey, MappingKey, tree_flatten_with_path


class DEVICE:
    """Placeholder in a node's arguments for the device of the stage that runs it."""


class RecordError(ValueError):
    """A forward that cannot be recorded: the reason, and what to write instead."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason, self.fix = reason, fix


@dataclass(eq=False)
class Node:
    """One value of the forward; stands for that value in the arguments of other nodes."""

    kind: Literal["input", "weight", "unit", "function"]
    target: Any  # a batch field, the name of a parameter, buffer or unit, or a function
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: Tensor | None = None  # on meta; None where the result is a container of tensors
    grad_enabled: bool = True
    random: bool = False  # draws random numbers: computed twice it differs
    has_parameters: bool = False  # is a parameter, or a unit with parameters
    mutated: bool = False  # its result is later changed in place
    checkpointed: bool = False  # its activations are recomputed in the backward, by the model
    checkpoints_inside: bool = False  # a unit whose forward does so with parts of itself
    gradients_inside: bool = False  # a unit whose forward takes gradients
    sized_by_values: bool = False  # another shape for other values: x[x > 0]
    # why a unit gives another result when it is computed again: "changes self.calls", ...; "" = not
    once: str = ""
    chunked_head: Any = None  # of the last stage: computes the loss, see optim/chunked_loss.py

    is_pytree_leaf: ClassVar[bool] = True

    @property
    def input_nodes(self) -> list[Node]:
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Node)]

    @property
    def tensor(self) -> Tensor:
        """`value`, which must be a tensor."""
        assert self.value is not None
        return self.value

    @property
    def shape(self) -> torch.Size:
        """Of `value`, which must be a tensor."""
        return self.tensor.shape


@dataclass(frozen=True)
class Recording:
    """A model's forward on batches of one shape."""

    nodes: list[Node]  # in execution order
    units: list[str]  # in the order of their first calls
    output: Any  # what the model returns, with nodes in place of tensors
    gradient_flow: GradientFlow
    # of a traced forward, which has no units: module -> position in `nodes` where it begins
    module_starts: dict[str, int] = field(default_factory=dict)


class RecordingBuilder:
    """Makes a node of each call, and finds the node of each tensor in a call's arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.nodes: list[Node] = []
        self.gradient_flow = GradientFlow()
        self.hidden = HiddenValues()
        self._node_of: dict[int, Node] = {}  # by the id of its tensor
        self._versions: list[tuple[Node, int]] = []  # keeps the tensors alive, so ids stay unique
        tensors = [*model.named_buffers(), *model.named_parameters()]
        self._names = {id(tensor): name for name, tensor in tensors}

    def add(self, node: Node) -> Node:
        self.nodes.append(node)
        self.gradient_flow.add(node)
        if node.value is not None:
            self._node_of[id(node.value)] = node
            self._versions.append((node, node.value._version))
        return node

    def add_call(self, node: Node, result: Any, random: bool) -> None:
        """Add a call with its result; raises RecordError under autocast."""
        node.grad_enabled, node.random = torch.is_grad_enabled(), random
        if any(torch.is_autocast_enabled(kind) for kind in KINDS):
            raise RecordError(
                "its forward turns autocast on between its modules, where stages do not apply it",
                "precision=bf16, and autocast inside blocks only",
            )
        if isinstance(result, Tensor):
            node.value = result
        self.add(node)
        if not isinstance(result, Tensor):
            self._add_parts(node, result)

    def _add_parts(self, node: Node, result: Any) -> None:
        """Add a getter node for each tensor in a container that a call returned."""
        for path, leaf in tree_flatten_with_path(result)[0]:
            if not any(isinstance(inner, Tensor) for inner in tree_flatten(leaf)[0]):
                continue
            part = node
            for depth, key in enumerate(path, 1):
                value = leaf if depth == len(path) and isinstance(leaf, Tensor) else None
                part = self.add(Node("function", *_getter(part, key), value=value))
            for name, content in dataclass_fields(leaf).items() if is_plain_dataclass(leaf) else ():
                value = content if isinstance(content, Tensor) else None
                inner = self.add(Node("function", getattr, (part, name), value=value))
                self._add_parts(inner, () if value is not None else content)

    def unchanged_node(self, tensor: Tensor) -> Node | None:
        """The node of a tensor, where nothing that it is computed of was changed in place."""
        versions = {node: version for node, version in self._versions}
        todo = [self._node_of[id(tensor)]] if id(tensor) in self._node_of else []
        found = dict.fromkeys(todo)
        while todo:
            node = todo.pop()
            if node.value is None or node.value._version != versions[node]:
                return None
            new = [use for use in node.input_nodes if use not in found]
            found |= dict.fromkeys(new)
            todo += new
        return next(iter(found), None)

    def check_used(self, unit: str, used: Sequence[Tensor]) -> None:
        """Raise RecordError where a unit uses a tensor that it is not given and that is not its own."""
        for tensor in used:
            made_by = self.hidden.made_by(tensor)
            if made_by == unit or self.hidden.is_given(tensor):
                continue
            node = self._node_of.get(id(tensor))
            if made_by is None and (node is None or node.kind == "weight"):
                continue
            maker = made_by
            if not maker:
                assert node is not None
                maker = node.target if node.kind == "unit" else "the model's own forward"
            raise RecordError(
                f"its {unit} reads a tensor of {maker} that is stored somewhere (in a dict, a list "
                "or an attribute), not passed as an argument: another stage would not find it",
                f"a forward that returns it from where it is computed and passes it to {unit}",
            )

    def with_nodes(self, value: Any) -> Any:
        """Arguments or an output with nodes in place of tensors; raises RecordError."""
        return tree_map(value, self._node_for)

    def _node_for(self, leaf: Any) -> Any:
        on_meta = isinstance(leaf, torch.device) and leaf.type == "meta"
        if on_meta or (isinstance(leaf, str) and leaf == "meta"):
            return DEVICE
        if isinstance(leaf, nn.Module):
            raise RecordError(
                f"its forward passes a {type(leaf).__name__} to another module, and a stage holds "
                "its own modules only",
                "a module that contains it",
            )
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._node_of:
            self._add_weight(leaf)
        return self._node_of[id(leaf)]

    def _add_weight(self, tensor: Tensor) -> None:
        """Add the parameter or buffer that a tensor is, as no recorded call made it."""
        name = self._names.get(id(tensor))
        if name is None and (unit := self.hidden.made_by(tensor)):
            raise RecordError(
                f"its forward uses a tensor that is computed inside of {unit}, which does not "
                "return it",
                f"a {unit} that returns it",
            )
        if name is None:
            raise RecordError(
                f"its forward uses a tensor of shape {tuple(tensor.shape)} that is neither a "
                "parameter nor a buffer nor computed from the batch",
                "self.register_buffer('name', tensor) in its constructor",
            )
        is_parameter = isinstance(tensor, nn.Parameter)
        self.add(Node("weight", name, value=tensor, has_parameters=is_parameter))

    def mark_mutated(self) -> None:
        """Set `mutated` of all nodes; raises RecordError for a changed batch."""
        for node, version in self._versions:
            node.mutated = node.tensor._version != version
            if node.mutated and node.kind == "input":
                raise RecordError(
                    f"its forward changes the batch's {node.target} in place",
                    f"{node.target} = {node.target}.clone() before",
                )


def _getter(node: Node, key: Any) -> tuple[Any, tuple[Node, Any]]:
    """The call that takes a part out of a result."""
    if isinstance(key, GetAttrKey):
        return getattr, (node, key.name)
    return operator.getitem, (node, key.key if isinstance(key, MappingKey) else key.idx)
