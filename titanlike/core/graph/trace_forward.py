"""Trace a model's forward with torch.export: a graph of tensor operations, without modules.

`split=trace` cuts this graph where a named module begins, at any depth, also inside what `units.py`
takes for one unit. A stage then has weights and no modules. torch.export is more restricted than
`record_forward.py`; each limit is an error that says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from titanlike.core.graph.recording import DEVICE, Node, RecordError, Recording, RecordingBuilder
from titanlike.core.torch_private.operators import OpOverload
from titanlike.core.torch_private.tensors import tree_unflatten

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
    converter = _Converter(model)
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    weights: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    weights |= dict(model.named_buffers(remove_duplicate=False))
    order = ["inputs"] * len(first) + list(others)  # as the tracer flattens the arguments
    fields = dict(zip(signature.user_inputs, order, strict=True))
    inputs: list[Any] = []
    for placeholder in program.graph_module.graph.find_nodes(op="placeholder"):
        if name := names.get(placeholder.name):
            is_parameter = isinstance(weights[name], nn.Parameter)
            node = Node("weight", name, value=weights[name], has_parameters=is_parameter)
        else:
            name = fields[placeholder.name]
            node = Node("input", name, value=batch[name])
        inputs.append(converter.add(node, node.value))
    with torch.enable_grad(), torch.device("meta"):
        flat = converter.convert(program.graph_module, inputs)
    changed = len(signature.buffers_to_mutate) + len(signature.user_inputs_to_mutate)
    output = tree_unflatten(list(flat)[changed:], program.call_spec.out_spec)
    recording = converter.builder.finish(output, converter.starts)
    for node in recording.nodes:
        if node.kind == "weight" and node.mutated:
            raise RecordError(f"its forward changes {node.target}", _ALTERNATIVE)
    return recording


class _Converter:
    """Converts fx nodes to `Node`s, running each on meta to find its value."""

    def __init__(self, model: nn.Module) -> None:
        self.builder = RecordingBuilder(model)
        self.starts: dict[str, int] = {}  # module -> position in the nodes where it begins
        self._values: dict[Node, Any] = {}

    def add(self, node: Node, value: Any) -> Node:
        node.value = value if isinstance(value, Tensor) else None
        self._values[node] = value
        return self.builder.add(node)

    def convert(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Convert a graph; returns its outputs, with nodes in place of tensors."""
        converted: dict[fx.Node, Any] = {}
        rest = iter(inputs)
        for fx_node in module.graph.nodes:
            if fx_node.op == "placeholder":
                converted[fx_node] = next(rest)
            elif fx_node.op == "output":
                return fx.node.map_arg(fx_node.args[0], converted.__getitem__)
            elif fx_node.op == "get_attr":
                converted[fx_node] = getattr(module, fx_node.target)  # a subgraph
            elif fx_node.op == "call_function":
                converted[fx_node] = self._call(fx_node, converted)
        raise AssertionError("a graph ends with its output")

    def _call(self, fx_node: fx.Node, converted: dict[fx.Node, Any]) -> Any:
        arguments: Any = fx.node.map_arg((fx_node.args, fx_node.kwargs), converted.__getitem__)
        args, kwargs = arguments
        target: Any = fx_node.target
        name = getattr(target, "__name__", str(target))
        if name == "wrap_with_set_grad_enabled":
            enabled, subgraph, *inputs = args
            with torch.set_grad_enabled(enabled):
                return self.convert(subgraph, inputs)
        operation = isinstance(target, OpOverload)
        builtin = getattr(target, "__module__", "") in ("_operator", "builtins", "math")
        if not operation and not builtin:
            reason = f"torch's tracer gives {name}, which contains a subgraph"
            raise RecordError(reason, _ALTERNATIVE)
        if operation and not fx_node.users and not target._schema.is_mutable:
            return None  # an assertion
        for path, _ in fx_node.meta.get("nn_module_stack", {}).values():
            if path:
                self.starts.setdefault(path, len(self.builder.nodes))
        values, named = _mapped(
            (args, kwargs), lambda leaf: self._values[leaf] if isinstance(leaf, Node) else leaf
        )
        result = target(*values, **named)
        on_meta = lambda leaf: isinstance(leaf, torch.device) and leaf.type == "meta"  # noqa: E731
        args, kwargs = _mapped((args, kwargs), lambda leaf: DEVICE if on_meta(leaf) else leaf)
        node = Node("function", target, args, kwargs, grad_enabled=torch.is_grad_enabled())
        if operation:  # dropout has the tag in evaluation as well
            dropout = "dropout" in target.__name__
            tagged = torch.Tag.nondeterministic_seeded in target.tags
            node.random = (tagged or dropout) and not (dropout and args[-1] is False)
        return self.add(node, result)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each leaf of fx arguments; fx's own lists and dicts become plain ones."""
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        return kind(_mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    return change(value)
