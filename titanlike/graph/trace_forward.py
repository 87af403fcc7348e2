"""Trace a model's forward with torch.export: a graph of tensor operations, without modules.

`split=trace` cuts this graph where a named module begins, at any depth, also inside what
`find_units.py` takes for one unit. A stage then has weights and no modules. torch.export is more
restricted than `record_forward.py`; each limit is an error that says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from titanlike.graph.gradient_flow import GradientFlow
from titanlike.graph.recording import DEVICE, Node, RecordError, Recording
from titanlike.torch_private.operators import OpOverload
from titanlike.torch_private.tensors import tree_unflatten

_ALTERNATIVE = "split=points or split=even, which leave modules whole"


def trace_forward(model: nn.Module, batch: dict[str, Tensor]) -> Recording:
    """Trace `model(inputs, **others)` in the model's current mode.

    model, batch: on meta, see `record_forward`. Raises RecordError.
    """
    others = {name: tensor for name, tensor in batch.items() if name != "inputs"}
    first = (batch["inputs"],) if "inputs" in batch else ()
    try:
        with torch.device("meta"):  # tensors that the forward creates
            program = torch.export.export(model, first, others, strict=False)
    except Exception as error:  # of many kinds: torch's and the model's
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"torch's tracer cannot follow its forward ({lines[0]})"
        raise RecordError(reason, _ALTERNATIVE) from error
    signature = program.graph_signature
    if signature.inputs_to_lifted_tensor_constants:
        raise RecordError(
            "its forward creates a tensor from numbers (torch.tensor), which the tracer would freeze",
            f"self.register_buffer('name', tensor) in the model, or {_ALTERNATIVE}",
        )
    converter = _Converter()
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    order = ["inputs"] * len(first) + list(others)  # in which the tracer flattens them
    fields = dict(zip(signature.user_inputs, order, strict=True))
    inputs: list[Any] = []
    for placeholder in program.graph_module.graph.find_nodes(op="placeholder"):
        if name := names.get(placeholder.name):
            is_parameter = isinstance(tensors[name], nn.Parameter)
            node = Node("weight", name, value=tensors[name], has_parameters=is_parameter)
        else:
            name = fields[placeholder.name]
            node = Node("input", name, value=batch[name])
        inputs.append(converter.add(node))
    with torch.enable_grad(), torch.device("meta"):
        flat = converter.convert(program.graph_module, inputs, grad=True)
    changed = len(signature.buffers_to_mutate) + len(signature.user_inputs_to_mutate)
    output = tree_unflatten(list(flat)[changed:], program.call_spec.out_spec)
    return converter.finish(output)


class _Converter:
    """Converts fx nodes to `Node`s, running each on meta to find its value."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._gradient_flow = GradientFlow()
        self._values: dict[Node, Any] = {}
        self._versions: dict[Node, int] = {}
        self._module_starts: dict[str, int] = {}

    def add(self, node: Node, value: Any = None) -> Node:
        value = node.value if node.value is not None else value
        self._nodes.append(node)
        self._values[node] = value
        if isinstance(value, Tensor):
            node.value, self._versions[node] = value, value._version
        self._gradient_flow.add(node)
        return node

    def convert(self, module: fx.GraphModule, inputs: Sequence[Any], *, grad: bool) -> Any:
        """The outputs of a graph, with nodes in place of tensors."""
        known: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for fx_node in module.graph.nodes:
            if fx_node.op == "placeholder":
                known[fx_node] = next(given)
            elif fx_node.op == "output":
                return fx.node.map_arg(fx_node.args[0], known.__getitem__)
            elif fx_node.op == "get_attr":
                known[fx_node] = getattr(module, fx_node.target)  # a subgraph
            elif fx_node.op == "call_function":
                known[fx_node] = self._call(fx_node, known, grad)
        raise AssertionError("a graph ends with its output")

    def _call(self, fx_node: fx.Node, known: dict[fx.Node, Any], grad: bool) -> Any:
        arguments: Any = fx.node.map_arg((fx_node.args, fx_node.kwargs), known.__getitem__)
        args, kwargs = arguments
        target: Any = fx_node.target
        name = getattr(target, "__name__", str(target))
        if name == "wrap_with_set_grad_enabled":
            enabled, subgraph, *given = args
            with torch.set_grad_enabled(enabled):
                return self.convert(subgraph, given, grad=enabled)
        operation = isinstance(target, OpOverload)
        builtin = getattr(target, "__module__", "") in ("_operator", "builtins", "math")
        if not operation and not builtin:
            reason = f"torch's tracer gives {name}, which contains a subgraph"
            raise RecordError(reason, _ALTERNATIVE)
        if operation and not fx_node.users and not target._schema.is_mutable:
            return None  # an assertion
        position = len(self._nodes)
        for path, _ in fx_node.meta.get("nn_module_stack", {}).values():
            if path:
                self._module_starts.setdefault(path, position)
        values, named = _mapped(
            (args, kwargs), lambda x: self._values[x] if isinstance(x, Node) else x
        )
        result = target(*values, **named)
        args, kwargs = _mapped((args, kwargs), _with_device_placeholder)
        random = operation and _is_random(target, args)
        call = (target, args, kwargs)
        return self.add(Node("function", *call, grad_enabled=grad, random=random), result)

    def finish(self, output: Any) -> Recording:
        for node, version in self._versions.items():
            node.mutated = node.tensor._version != version
        changed = [n.target for n in self._nodes if n.kind == "weight" and n.mutated]
        if changed:
            raise RecordError(f"its forward changes {changed[0]}", _ALTERNATIVE)
        starts = self._module_starts
        return Recording(self._nodes, list(starts), output, self._gradient_flow, starts)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of each leaf of fx arguments, in plain lists and dicts instead of fx's own."""
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        return kind(_mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    return change(value)


def _is_random(operation: Any, args: Any) -> bool:
    """Whether it draws random numbers. Dropout has the tag in evaluation as well."""
    dropout = "dropout" in operation.__name__
    tagged = torch.Tag.nondeterministic_seeded in operation.tags
    return (tagged or dropout) and not (dropout and args[-1] is False)


def _with_device_placeholder(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) and value.type == "meta" else value
