"""A stage's forward, written as Python source from its `StageGraph` and compiled."""

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
    """The Python source of a stage's forward and the function that it defines."""
    known: dict[str, Any] = {
        "torch": torch,
        "depart": depart,
        "attach": _Attach.apply,
        "arrive": _Arrive.apply,
    }
    variables: dict[Node, str] = {}
    lines = ["def forward(arrived, batch):"]

    def constant(prefix: str, value: Any) -> str:
        name = f"{prefix.replace('.', '_')}_{len(known)}"
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
        leaves, rebuild = tree_flatten(value)
        if any(isinstance(leaf, Node) or leaf is DEVICE for leaf in leaves):
            build = constant("build", lambda *x: rebuild(x))
            return f"{build}({', '.join(map(text, leaves))})"
        return constant("constant", value)

    last_use = {use: node for node in graph.nodes for use in node.uses}
    relayed: dict[Node, str] = {}
    untracked = []  # arrived leaves whose gradient is always zero
    for place, node in enumerate(graph.arrives):
        variables[node] = name = f"a{place}"
        if node.value.requires_grad:
            lines.append(f"    {name} = arrive(arrived[{place}])")
        else:
            lines.append(f"    {name} = arrived[{place}]")
            untracked.append(f"arrived[{place}]")
            kind = constant("dtype", node.value.dtype)
            lines.append(f"    {name} = {name}.detach().to({kind})")
        if node.mutated:
            lines.append(f"    {name} = {name}.clone()")
        elif node.value.requires_grad:
            relayed[node] = f"arrived[{place}]"  # as it is: a view would be copied
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
        module = stage.get_submodule(node.target) if node.kind == "unit" else None
        if node.chunked_head is not None:
            called = constant("loss", node.chunked_head.loss_function(module))
        elif module is not None:
            called = constant("unit", module)
        else:
            called = constant(getattr(node.target, "__name__", "function").strip("_"), node.target)
        arguments = [text(v) for v in node.args]
        arguments += [f"{k}={text(v)}" for k, v in node.kwargs.items()]
        if node.checkpointed:
            arguments = [called, *arguments, "use_reentrant=False"]
            called = "torch.utils.checkpoint.checkpoint"
        call = f"{name} = {called}({', '.join(arguments)})"
        lines += [f"    {call}"] if node.grad else ["    with torch.no_grad():", f"        {call}"]
        if node.kind == "unit" and node.mutated:  # in place it would lose FSDP's hook
            lines.append(f"    {name} = {name}.clone()")
        dead = [v for v in dict.fromkeys(node.uses) if last_use[v] is node and v not in graph.sends]
        if dead:
            lines.append(f"    {' = '.join(variables[v] for v in dead)} = None")
    sent = [relayed.get(node, variables[node]) for node in graph.sends]
    # torch detaches what was sent in place, and then nothing may have it saved for its backward
    kept = {use for node in graph.nodes for use in node.uses} if graph.output is None else set()
    departing = [
        f"depart({name}{', kept=True' * (node in kept)})"
        for name, node in zip(sent, graph.sends, strict=True)
    ]
    lines.append(f"    sent = [{', '.join(departing)}]")
    if untracked and graph.sends:
        at = next((i for i, node in enumerate(graph.sends) if node.value.requires_grad), 0)
        lines.append(f"    sent[{at}] = attach(sent[{at}], {', '.join(untracked)})")
    lines.append("    return sent[0]" if len(sent) == 1 else "    return tuple(sent)")
    source = "\n".join(lines)
    exec(compile(source, "<stage>", "exec"), known)
    return source, known["forward"]


def depart(tensor: Tensor, kept: bool = False) -> Tensor:
    """A tensor as it is sent: floating point, contiguous, no view, with a gradient in training.

    kept: the stage itself uses it, too.
    """
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    kept = kept and tensor.grad_fn is not None
    if kept or tensor._is_view() or not _is_packed(tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    return tensor


def _is_packed(tensor: Tensor) -> bool:
    """Whether its strides are those of a new tensor, which torch's runtime insists on.

    To be contiguous is not enough: a dimension of size 1 may have any stride then.
    """
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


class _Arrive(torch.autograd.Function):
    """The same tensor; its gradient is packed before it is sent back.

    A gradient is often a part of a larger one (of what `torch.cat` made, for a skip connection).
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _is_packed(gradient):
            return gradient
        return gradient.clone(memory_format=torch.contiguous_format)


class _Attach(torch.autograd.Function):
    """Give tensors that no gradient reaches a gradient of zero: their senders wait for one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.shapes)
