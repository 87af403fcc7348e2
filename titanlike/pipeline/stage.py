"""One stage: the units of the whole model that it runs, under their names in it, and a forward.

The forward is written from a `StageGraph`, one for each shape of batch and for training and
evaluation apart; `Stage.source` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from titanlike.pipeline.cut import StageGraph
from titanlike.pipeline.partition import Unit
from titanlike.pipeline.record import DEVICE, Node


class Stage(nn.Module):
    """Runs consecutive units of a model: what arrives -> what is sent on.

    The first stage takes the batch's "inputs", the others what the stage before sends; keyword
    arguments are fields of the batch. Parameters have the names that they have in the model.
    """

    def __init__(self, model: nn.Module, units: Iterable[str], weights: Iterable[str]) -> None:
        """model: is taken apart."""
        super().__init__()
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._current: Hashable = None
        self.source = ""
        for name in units:
            path, _, last = name.rpartition(".")
            self._container(path).add_module(last, model.get_submodule(name))
        for name in weights:
            path, _, last = name.rpartition(".")
            owner, here = model.get_submodule(path), self._container(path)
            if last in owner._parameters:
                here.register_parameter(last, owner._parameters[last])
            else:
                persistent = last not in owner._non_persistent_buffers_set
                here.register_buffer(last, owner._buffers[last], persistent=persistent)

    def _container(self, path: str) -> nn.Module:
        module: nn.Module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module._modules[name]
        return module

    def learn(
        self, shapes: Hashable, graphs: dict[bool, StageGraph], index: int, device: torch.device
    ) -> None:
        """Write the forwards for batches of some shapes; graphs: in training, in evaluation."""
        for training, graph in graphs.items():
            self.source, program = write(self, graph, first=index == 0, device=device)
            self._programs[shapes, training] = program
        self._current = shapes

    def use(self, shapes: Hashable) -> None:
        """Run batches of these shapes from now on."""
        self._current = shapes

    def forward(self, *arrived: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self._programs[self._current, self.training](arrived, batch)


def gather_groups(stage: nn.Module, units: Sequence[Unit], used: Iterable[str]) -> list[list[str]]:
    """Names of what is gathered together: each block by itself, neighbours that are none (norm and
    head) as one.

    used: weights that the stage's forward uses itself. They, and weights that two units share,
    belong to the stage as a whole, and so do the units that hold them.
    """
    seen: set[int] = {id(stage.get_parameter(name)) for name in used if _is_parameter(stage, name)}
    twice = set(seen)
    for unit in units:
        own = {id(parameter) for parameter in stage.get_submodule(unit.name).parameters()}
        twice |= own & seen
        seen |= own
    groups: list[list[str]] = []
    before: Unit | None = None
    for unit in units:
        own = {id(parameter) for parameter in stage.get_submodule(unit.name).parameters()}
        if not own or own & twice:
            continue
        if before is not None and not unit.block and not before.block:
            groups[-1].append(unit.name)
        else:
            groups.append([unit.name])
        before = unit
    return groups


def _is_parameter(stage: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last in stage.get_submodule(path)._parameters


def write(
    stage: Stage, graph: StageGraph, *, first: bool, device: torch.device
) -> tuple[str, Callable[..., Any]]:
    """The Python source of a stage's forward and the function that it defines."""
    known: dict[str, Any] = {"torch": torch, "depart": depart, "attach": _Attach.apply}
    variables: dict[Node, str] = {}
    lines = ["def forward(arrived, batch):"]

    def constant(prefix: str, value: Any) -> str:
        name = f"{prefix}_{len(known)}"
        known[name] = value
        return name

    def text(value: Any) -> str:
        """An expression for an argument."""
        if isinstance(value, Node):
            return variables[value]
        if value is DEVICE:
            return text(device)
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        kind = type(value)
        if kind is list:
            return f"[{', '.join(map(text, value))}]"
        if kind is tuple:
            return f"({''.join(text(v) + ', ' for v in value)})"
        if kind is dict:
            return f"{{{', '.join(f'{k!r}: {text(v)}' for k, v in value.items())}}}"
        leaves, spec = pytree.tree_flatten(value)
        if any(isinstance(leaf, Node) or leaf is DEVICE for leaf in leaves):
            build = constant("build", lambda *x: pytree.tree_unflatten(x, spec))
            return f"{build}({', '.join(map(text, leaves))})"
        return constant("constant", value)

    last_use = {use: node for node in graph.nodes for use in node.uses}
    untracked = []  # arrived leaves whose gradient is always zero
    for place, node in enumerate(graph.arrives):
        variables[node] = name = f"a{place}"
        lines.append(f"    {name} = arrived[{place}]")
        if not node.value.requires_grad:
            untracked.append(f"arrived[{place}]")
            kind = constant("dtype", node.value.dtype)
            lines.append(f"    {name} = {name}.detach().to({kind})")
        if node.mutated:
            lines.append(f"    {name} = {name}.clone()")
    for place, node in enumerate(graph.nodes):
        variables[node] = name = f"v{place}"
        if node.kind == "input":
            where = "arrived[0]" if first and node.target == "inputs" else f"batch[{node.target!r}]"
            lines.append(f"    {name} = {where}")
            continue
        if node.kind == "weight":
            path, _, last = node.target.rpartition(".")
            lines.append(f"    {name} = {constant('module', stage.get_submodule(path))}.{last}")
            continue
        called = (
            constant("unit", stage.get_submodule(node.target))
            if node.kind == "unit"
            else constant(getattr(node.target, "__name__", "function").strip("_"), node.target)
        )
        arguments = [text(v) for v in node.args]
        arguments += [f"{k}={text(v)}" for k, v in node.kwargs.items()]
        call = f"{name} = {called}({', '.join(arguments)})"
        lines += [f"    {call}"] if node.grad else ["    with torch.no_grad():", f"        {call}"]
        dead = [v for v in dict.fromkeys(node.uses) if last_use[v] is node and v not in graph.sends]
        if dead:
            lines.append(f"    {' = '.join(variables[v] for v in dead)} = None")
    sent = [variables[node] for node in graph.sends]
    lines.append(f"    sent = [{', '.join(f'depart({name})' for name in sent)}]")
    if untracked and graph.sends:
        at = next((i for i, node in enumerate(graph.sends) if node.value.requires_grad), 0)
        lines.append(f"    sent[{at}] = attach(sent[{at}], {', '.join(untracked)})")
    lines.append("    return sent[0]" if len(sent) == 1 else "    return tuple(sent)")
    source = "\n".join(lines)
    exec(compile(source, "<stage>", "exec"), known)
    return source, known["forward"]


def depart(tensor: Tensor) -> Tensor:
    """A tensor as it is sent: floating point, contiguous, no view, with a gradient in training."""
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    if tensor._is_view() or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    return tensor


class _Attach(torch.autograd.Function):
    """Give tensors that no gradient reaches a gradient of zero: their senders wait for one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.shapes)
