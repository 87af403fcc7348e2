"""Write a stage's forward as Python source from its `StageGraph`, and compile it.

The function takes (received, batch): tensors from the stage before, and the batch's fields. It has
one line for each node (v0, v1, ...), frees each value after its last use, and returns what the next
stage receives. `Stage.source` holds the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from titanlike.graph.cut import StageGraph
from titanlike.graph.pytree import tree_flatten
from titanlike.graph.recording import DEVICE, Node


def write_forward(
    stage: nn.Module, graph: StageGraph, *, first: bool, device: torch.device
) -> tuple[str, Callable[..., Any]]:
    """The source of a stage's forward, and the function that it defines."""
    writer = _Writer(stage, graph, first, device)
    source = writer.write()
    exec(compile(source, "<stage>", "exec"), writer.names)
    return source, writer.names["forward"]


class _Writer:
    def __init__(
        self, stage: nn.Module, graph: StageGraph, first: bool, device: torch.device
    ) -> None:
        self._stage, self._graph, self._first, self._device = stage, graph, first, device
        self._lines = ["def forward(received, batch):"]
        self._variables: dict[Node, str] = {}
        self._relayed: dict[Node, str] = {}  # received tensors that may be sent on unchanged
        self._last_use = {use: node for node in graph.nodes for use in node.input_nodes}
        self.names: dict[str, Any] = {  # globals of the generated function
            "torch": torch,
            "receive": _PackGradient.apply,
            "to_send": to_send,
        }

    def write(self) -> str:
        for index, node in enumerate(self._graph.receives):
            self._receive(index, node)
        for index, node in enumerate(self._graph.nodes):
            self._variables[node] = f"v{index}"
            if node.kind == "input":
                first = self._first and node.target == "inputs"
                self._assign(node, "received[0]" if first else f"batch[{node.target!r}]")
            elif node.kind == "weight":
                path, _, last = node.target.rpartition(".")
                module = self._constant("module", self._stage.get_submodule(path))
                self._assign(node, f"{module}.{last}")
            else:
                self._call(node)
                self._free_inputs(node)
        self._send()
        return "\n".join(self._lines)

    def _line(self, text: str) -> None:
        self._lines.append(f"    {text}")

    def _assign(self, node: Node, expression: str) -> None:
        self._line(f"{self._variables[node]} = {expression}")

    def _receive(self, index: int, node: Node) -> None:
        self._variables[node] = name = f"a{index}"
        received = f"received[{index}]"
        if node in self._graph.differentiated:
            self._assign(node, f"receive({received})")
        else:
            dtype = self._constant("dtype", node.tensor.dtype)
            self._assign(node, f"{received}.detach().to({dtype})")
        if node.mutated:
            self._assign(node, f"{name}.clone()")
        else:
            self._relayed[node] = received  # a view, such as receive() returns, would be copied

    def _call(self, node: Node) -> None:
        function = self._function(node)
        arguments = [self._expression(value) for value in node.args]
        arguments += [f"{key}={self._expression(value)}" for key, value in node.kwargs.items()]
        if node.checkpointed:
            arguments = [function, *arguments, "use_reentrant=False"]
            function = "torch.utils.checkpoint.checkpoint"
        if not node.grad_enabled:
            self._line("with torch.no_grad():")
        indent = "" if node.grad_enabled else "    "
        name = self._variables[node]
        self._line(f"{indent}{name} = {function}({', '.join(arguments)})")
        if node.kind == "unit" and node.mutated:  # FSDP's hook is on the unit's own output
            self._assign(node, f"{name}.clone()")

    def _function(self, node: Node) -> str:
        module = self._stage.get_submodule(node.target) if node.kind == "unit" else None
        if node.chunked_head is not None:
            return self._constant("loss", node.chunked_head.loss_function(module))
        if module is not None:
            return self._constant("unit", module)
        return self._constant(getattr(node.target, "__name__", "function").strip("_"), node.target)

    def _free_inputs(self, node: Node) -> None:
        freed = [
            self._variables[use]
            for use in dict.fromkeys(node.input_nodes)
            if self._last_use[use] is node and use not in self._graph.sends
        ]
        if freed:
            self._line(f"{' = '.join(freed)} = None")

    def _send(self) -> None:
        graph = self._graph
        # torch detaches what was sent in place, so the stage must not have it saved for backward
        last = graph.output is not None
        used = set() if last else {use for node in graph.nodes for use in node.input_nodes}
        sent = []
        for node in graph.sends:
            name = self._relayed.get(node, self._variables[node])
            if node not in graph.differentiated_later:
                name = f"{name}.detach()"
            sent.append(f"to_send({name}{', used_here=True' * (node in used)})")
        self._line(f"return {sent[0]}" if len(sent) == 1 else f"return ({', '.join(sent)})")

    def _constant(self, prefix: str, value: Any) -> str:
        """A global name for an object."""
        name = f"{prefix.replace('.', '_')}_{len(self.names)}"
        self.names[name] = value
        return name

    def _expression(self, value: Any) -> str:
        """Source of a call's argument."""
        if isinstance(value, Node):
            return self._variables[value]
        if value is DEVICE:
            return self._expression(self._device)
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is list:
            return f"[{', '.join(map(self._expression, value))}]"
        if type(value) is tuple:
            return f"({''.join(self._expression(part) + ', ' for part in value)})"
        if type(value) is dict:
            items = (f"{key!r}: {self._expression(part)}" for key, part in value.items())
            return f"{{{', '.join(items)}}}"
        leaves, rebuild = tree_flatten(value)
        if any(isinstance(leaf, Node) or leaf is DEVICE for leaf in leaves):
            build = self._constant("build", lambda *leaves: rebuild(leaves))
            return f"{build}({', '.join(map(self._expression, leaves))})"
        return self._constant("constant", value)


# --- what the generated source calls -----------------------------------------------------------


def to_send(tensor: Tensor, used_here: bool = False) -> Tensor:
    """A tensor as it is sent: floating point, contiguous, no view, with a gradient in training.

    used_here: the stage itself uses it as well.
    """
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    used_here = used_here and tensor.grad_fn is not None
    if used_here or tensor._is_view() or not _is_packed(tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    return tensor


def _is_packed(tensor: Tensor) -> bool:
    """Whether its strides are those of a new tensor, as torch's pipeline runtime requires.

    is_contiguous() is weaker: it accepts any stride in a dimension of size 1.
    """
    packed = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != packed:
            return False
        packed *= max(size, 1)
    return True


class _PackGradient(torch.autograd.Function):
    """The same tensor; its gradient is packed before it is sent back.

    A gradient is often a slice of a larger one, as behind a `torch.cat` with a skip connection.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _is_packed(gradient):
            return gradient
        return gradient.clone(memory_format=torch.contiguous_format)
