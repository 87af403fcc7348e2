"""A pipeline stage: a module with some of the model's units, and a generated forward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from titanlike.core.graph.cut import StageGraph
from titanlike.core.graph.recording import DEVICE, Node, tree_flatten
from titanlike.core.graph.units import Unit

# Prefix of batch fields among a stage's keyword arguments, some of which are torch's pipeline
# runtime's: target, losses, return_outputs, ...
FIELD = "field:"


class Stage(nn.Module):
    """Consecutive units of a model; its forward maps received tensors to tensors to send.

    The first stage receives the batch's "inputs"; keyword arguments are the batch's fields.
    Parameters have the names that they have in the model. There is one generated forward for each
    shape of batch, in training and in evaluation (see `_Writer`).
    """

    # Whether received tensors that later stages use as well are forwarded unchanged: gradients from
    # those stages are then added after this stage's instead of before.
    relays = True

    def __init__(self, model: nn.Module, units: Iterable[str], weights: Iterable[str]) -> None:
        """Take the modules `units`, and the parameters and buffers `weights`, out of the model."""
        super().__init__()
        self._forwards: dict[Hashable, Callable[..., Any]] = {}
        self._selected: Hashable = None
        self.source = ""  # Python source of the last generated forward
        for name in units:
            path, _, last = name.rpartition(".")
            self._parent(path).add_module(last, model.get_submodule(name))
        for name in weights:
            path, _, last = name.rpartition(".")
            owner, parent = model.get_submodule(path), self._parent(path)
            if last in owner._parameters:
                parent.register_parameter(last, owner._parameters[last])
            else:
                persistent = last not in owner._non_persistent_buffers_set
                parent.register_buffer(last, owner._buffers[last], persistent=persistent)

    def _parent(self, path: str) -> nn.Module:
        """Return the module at `path`; it and its parents are created where they do not exist."""
        module: nn.Module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, nn.Module())
            child = module._modules[name]
            assert child is not None
            module = child
        return module

    def add_forwards(
        self, shapes: Hashable, graphs: dict[bool, StageGraph], index: int, device: torch.device
    ) -> None:
        """Generate and select the forwards for batches of these shapes.

        graphs: by `self.training`; index: the stage's.
        """
        for training, graph in graphs.items():
            writer = _Writer(self, graph, first=index == 0, device=device)
            self.source, self._forwards[shapes, training] = writer.compiled()
        self._selected = shapes

    def select_forward(self, shapes: Hashable) -> None:
        """Use the forward for batches of these shapes from now on."""
        self._selected = shapes

    def forward(self, *received: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        fields = {name.removeprefix(FIELD): tensor for name, tensor in batch.items()}
        return self._forwards[self._selected, self.training](received, fields)


def fsdp_groups(stage: nn.Module, units: Sequence[Unit], used: Iterable[str]) -> list[list[str]]:
    """Group the units that FSDP gathers together: each block alone, consecutive others (norm and
    head) together. Returns names.

    used: weights that the stage's forward uses directly. These weights, weights that two units
    share, and the units that contain them are gathered with the root module of the stage.
    """
    used = set(used)
    parameters = stage.named_parameters(remove_duplicate=False)
    seen = {id(parameter) for name, parameter in parameters if name in used}
    shared = set(seen)
    parameters_of = [{id(p) for p in stage.get_submodule(unit.name).parameters()} for unit in units]
    for parameter_ids in parameters_of:
        shared |= parameter_ids & seen
        seen |= parameter_ids
    groups: list[list[str]] = []
    before: Unit | None = None
    for unit, parameter_ids in zip(units, parameters_of, strict=True):
        if not parameter_ids or parameter_ids & shared:
            continue
        if before is not None and not unit.block and not before.block:
            groups[-1].append(unit.name)
        else:
            groups.append([unit.name])
        before = unit
    return groups


# --- the source of a stage's forward -----------------------------------------------------------


class _Writer:
    """Writes a stage's forward as Python source.

    The function takes (received, batch): tensors from other stages, and the batch's fields. It has
    one line for each node (v0, v1, ...), frees each value after its last use, and returns what
    other stages receive.
    """

    def __init__(
        self, stage: Stage, graph: StageGraph, *, first: bool, device: torch.device
    ) -> None:
        self._stage, self._graph, self._first, self._device = stage, graph, first, device
        self._relays = stage.relays
        self._lines = ["def forward(received, batch):"]
        self._variables: dict[Node, str] = {}
        self._relayed: dict[Node, str] = {}  # received tensors that may be forwarded unchanged
        self._last_use = {use: node for node in graph.nodes for use in node.input_nodes}
        self._names: dict[str, Any] = {  # globals of the generated function
            "torch": torch,
            "receive": _PackGradient.apply,
            "to_send": to_send,
        }

    def compiled(self) -> tuple[str, Callable[..., Any]]:
        """The source, and the function that it defines."""
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
        self._send()
        source = "\n".join(self._lines)
        exec(compile(source, "<stage>", "exec"), self._names)
        return source, self._names["forward"]

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
        module = self._stage.get_submodule(node.target) if node.kind == "unit" else None
        if node.chunked_head is not None:
            function = self._constant("loss", node.chunked_head.loss_function(module))
        elif module is not None:
            function = self._constant("unit", module)
        else:
            name = getattr(node.target, "__name__", "function").strip("_")
            function = self._constant(name, node.target)
        arguments = [self._expression(value) for value in node.args]
        arguments += [f"{key}={self._expression(value)}" for key, value in node.kwargs.items()]
        if node.checkpointed:
            arguments = [function, *arguments, "use_reentrant=False"]
            function = "torch.utils.checkpoint.checkpoint"
        if not node.grad_enabled:
            self._line("with torch.no_grad():")
        indent = "" if node.grad_enabled else "    "
        self._line(f"{indent}{self._variables[node]} = {function}({', '.join(arguments)})")
        if node.kind == "unit" and node.mutated:  # FSDP's hook is on the unit's own output
            self._assign(node, f"{self._variables[node]}.clone()")
        freed = [
            self._variables[use]
            for use in dict.fromkeys(node.input_nodes)
            if self._last_use[use] is node and use not in self._graph.sends
        ]
        if freed:
            self._line(f"{' = '.join(freed)} = None")

    def _send(self) -> None:
        graph = self._graph
        # torch detaches sent tensors in place, so the stage must not have saved them for backward
        used = set() if graph.output is not None else set(self._last_use)
        adjacent = len(graph.sends) - len(graph.skips_out)  # tensors that torch's runtime sends
        sent = []
        for index, node in enumerate(graph.sends):
            name = self._variables[node]
            name = self._relayed.get(node, name) if self._relays else name
            if node not in graph.differentiated_later:
                name = f"{name}.detach()"
            sent.append(
                f"to_send({name}{', used_here=True' * (node in used and index < adjacent)})"
            )
        self._line(f"return {sent[0]}" if len(sent) == 1 else f"return ({', '.join(sent)})")

    def _constant(self, prefix: str, value: Any) -> str:
        """Make a global name for an object."""
        name = f"{prefix.replace('.', '_')}_{len(self._names)}"
        self._names[name] = value
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
    """Convert a tensor for P2P: floating point, contiguous, no view, with a gradient in training.

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
    """Whether a tensor's strides are those of a new one, as torch's pipeline runtime requires.

    is_contiguous() is weaker: it accepts any stride in a dimension of size 1.
    """
    packed = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != packed:
            return False
        packed *= max(size, 1)
    return True


class _PackGradient(torch.autograd.Function):
    """The identity, whose backward makes the gradient contiguous before it is sent back.

    A gradient is often a slice of a larger one, as after a `torch.cat` with a skip connection.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _is_packed(gradient):
            return gradient
        return gradient.clone(memory_format=torch.contiguous_format)
