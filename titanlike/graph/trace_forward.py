"""A model's forward as torch's tracer sees it: a graph of tensor operations, without modules.

`split=trace` cuts this graph, as any other recording, where a named module begins, at any depth: also
inside of what `units.py` takes for one unit. A stage then holds weights and no modules. That has
limits that a recording of units has not; each is an error that says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from titanlike.graph.recording import DEVICE, Node, RecordError, Recording

OTHERWISE = "split=points or split=even, which leave modules whole"


def trace_forward(model: nn.Module, batch: dict[str, Tensor]) -> Recording:
    """`model(inputs, **others)` as torch.export traces it, in the model's current mode.

    model, batch: on meta; see `record`. Raises RecordError.
    """
    others = {name: tensor for name, tensor in batch.items() if name != "inputs"}
    first = (batch["inputs"],) if "inputs" in batch else ()
    try:
        with torch.device("meta"):  # what the forward makes is on the stage's device later
            program = torch.export.export(model, first, others, strict=False)
    except Exception as error:  # torch raises many kinds of its own, and passes on the model's
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"torch's tracer cannot follow its forward ({lines[0]})"
        raise RecordError(reason, OTHERWISE) from error
    signature = program.graph_signature
    if signature.inputs_to_lifted_tensor_constants:
        raise RecordError(
            "its forward makes a tensor of numbers (torch.tensor), which the tracer would fix",
            f"self.register_buffer('name', tensor) in the model, or {OTHERWISE}",
        )
    converter = _Converter()
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    fields = dict(zip(signature.user_inputs, _order(first, others), strict=True))
    inputs: list[Any] = []
    for place in program.graph_module.graph.nodes:
        if place.op != "placeholder":
            continue
        if place.name in names:
            name = names[place.name]
            weighs = isinstance(tensors[name], nn.Parameter)
            inputs.append(converter.add(Node("weight", name, value=tensors[name], weighs=weighs)))
        else:
            name = fields[place.name]
            inputs.append(converter.add(Node("input", name, value=batch[name])))
    with torch.enable_grad(), torch.device("meta"):
        flat = converter.convert(program.graph_module, inputs, grad=True)
    changed = len(signature.buffers_to_mutate) + len(signature.user_inputs_to_mutate)
    output = pytree.tree_unflatten(list(flat)[changed:], program.call_spec.out_spec)
    return converter.finish(output)


def _order(first: tuple[Tensor, ...], others: dict[str, Tensor]) -> Sequence[str]:
    """Names of the fields, as the tracer flattens them."""
    return (["inputs"] if first else []) + list(others)


class _Converter:
    """Makes nodes of a traced graph, and runs each on meta to know its value."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._values: dict[Node, Any] = {}
        self._versions: dict[Node, int] = {}
        self._begins: dict[str, int] = {}

    def add(self, node: Node, value: Any = None) -> Node:
        value = node.value if node.value is not None else value
        self._nodes.append(node)
        self._values[node] = value
        if isinstance(value, Tensor):
            node.value, self._versions[node] = value, value._version
        return node

    def convert(self, module: fx.GraphModule, inputs: Sequence[Any], *, grad: bool) -> Any:
        """The outputs of a graph, with nodes in place of tensors."""
        known: dict[fx.Node, Any] = {}
        arriving = iter(inputs)
        for step in module.graph.nodes:
            if step.op == "placeholder":
                known[step] = next(arriving)
            elif step.op == "output":
                return fx.node.map_arg(step.args[0], known.__getitem__)
            elif step.op == "get_attr":
                known[step] = getattr(module, step.target)  # a graph inside
            elif step.op == "call_function":
                known[step] = self._call(step, known, grad)
        raise AssertionError("a graph ends with its output")

    def _call(self, step: fx.Node, known: dict[fx.Node, Any], grad: bool) -> Any:
        args, kwargs = (fx.node.map_arg(x, known.__getitem__) for x in (step.args, step.kwargs))
        name = getattr(step.target, "__name__", str(step.target))
        if name == "wrap_with_set_grad_enabled":
            enabled, inside, *given = args
            with torch.set_grad_enabled(enabled):
                return self.convert(inside, given, grad=enabled)
        operation = isinstance(step.target, torch._ops.OpOverload)
        builtin = getattr(step.target, "__module__", "") in ("_operator", "builtins", "math")
        if not operation and not builtin:
            reason = f"torch's tracer gives {name}, which has a graph inside"
            raise RecordError(reason, OTHERWISE)
        if operation and not step.users and not step.target._schema.is_mutable:
            return None  # an assertion
        begins = len(self._nodes)
        for path, _ in step.meta.get("nn_module_stack", {}).values():
            if path:
                self._begins.setdefault(path, begins)
        result = step.target(*_mapped(args, self._value), **_mapped(kwargs, self._value))
        args, kwargs = _mapped(args, _on_device), _mapped(kwargs, _on_device)
        random = operation and _draws(step.target, args)
        return self.add(
            Node("function", step.target, args, kwargs, grad=grad, random=random), result
        )

    def _value(self, leaf: Any) -> Any:
        return self._values[leaf] if isinstance(leaf, Node) else leaf

    def finish(self, output: Any) -> Recording:
        for node, version in self._versions.items():
            node.mutated = node.value._version != version
        changed = [n.target for n in self._nodes if n.kind == "weight" and n.mutated]
        if changed:
            raise RecordError(f"its forward changes {changed[0]}", OTHERWISE)
        return Recording(self._nodes, list(self._begins), output, begins=self._begins)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A call's arguments with changed leaves, in lists and dicts of Python in place of the tracer's."""
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        return kind(_mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    return change(value)


def _draws(operation: Any, args: Any) -> bool:
    """Whether it takes random numbers. Dropout carries the tag in evaluation, too."""
    dropout = "dropout" in operation.__name__
    tagged = torch.Tag.nondeterministic_seeded in operation.tags
    return (tagged or dropout) and not (dropout and args[-1] is False)


def _on_device(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) and value.type == "meta" else value
