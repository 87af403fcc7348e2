"""The recording of a model's forward: a graph of inputs, weights, units and operations.

`RecordingBuilder` makes the nodes; `record_forward.py` and `trace_forward.py` call it.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from titanlike.core.device.accelerator import KINDS
from titanlike.core.torch_private import tensors as torch_tree
from titanlike.core.torch_private.tensors import GetAttrKey, MappingKey, tree_flatten_with_path


class DEVICE:
    """Placeholder in a node's arguments for the device of the stage that runs it."""


class RecordError(ValueError):
    """A forward that cannot be recorded: the reason, and what to write instead."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason, self.fix = reason, fix


class UnknownTokens(ValueError):
    """A forward that cannot run on a shard of the tokens: the call, and why."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.call, self.reason = call, reason


@dataclass(eq=False)
class Node:
    """One value of the forward; in the arguments of other nodes it represents that value."""

    kind: Literal["input", "weight", "unit", "function"]
    target: Any  # a batch field, the name of a parameter, buffer or unit, or a function
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: Tensor | None = None  # on meta; None where the result is a container of tensors
    grad_enabled: bool = True
    random: bool = False  # draws random numbers, so recomputing it gives a different result
    has_parameters: bool = False  # is a parameter, or a unit with parameters
    mutated: bool = False  # its result is later changed in place
    checkpointed: bool = False  # its activations are recomputed in the backward, by the model
    checkpoints_inside: bool = False  # a unit that checkpoints parts of itself
    gradients_inside: bool = False  # a unit whose forward calls autograd.grad
    sized_by_values: bool = False  # its shape depends on values: x[x > 0]
    # why recomputing a unit gives a different result: "changes self.calls", ...; "" = it does not
    once: str = ""
    chunked_head: Any = None  # on the last stage: computes the loss, see techniques/chunked_loss.py

    is_pytree_leaf: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The name of its function, or its target."""
        return str(getattr(self.target, "__name__", self.target))

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
        """The shape of `value`, which must be a tensor."""
        return self.tensor.shape


@dataclass(frozen=True)
class Recording:
    """A model's forward on batches of one shape."""

    nodes: list[Node]  # in execution order
    output: Any  # what the model returns, with nodes in place of tensors
    # outputs that the loss depends on -> node -> the position in `nodes` of the last call from
    # which it gets a gradient (len(nodes) if from the loss); a node without an entry gets none
    last_uses: Callable[[Iterable[Tensor]], dict[Node, int]]
    traced: dict[str, int] | None = None  # `starts` of a traced forward, which has no units

    @cached_property
    def starts(self) -> dict[str, int]:
        """Unit -> the position in `nodes` where it begins for the first time, in that order."""
        if self.traced is not None:
            return self.traced
        first: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            if node.kind == "unit":
                first.setdefault(node.target, position)
        return first

    @cached_property
    def recomputable(self) -> set[Node]:
        """Nodes that are never sent: the batch, weights, and values computed only from the batch."""
        recomputable: set[Node] = set()
        for node in self.nodes:
            pure = not (node.random or node.has_parameters or node.mutated)
            if node.kind == "input" or (pure and recomputable.issuperset(node.input_nodes)):
                recomputable.add(node)
        return recomputable | {node for node in self.nodes if node.kind == "weight"}


def replay(recording: Recording, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """Run a recorded forward node by node, and return the model's output; batch: on meta."""
    values: dict[Node, Any] = {}
    for node in recording.nodes:
        if node.kind == "input":
            values[node] = batch[node.target]
        elif node.kind == "weight":
            path, _, last = node.target.rpartition(".")
            values[node] = getattr(model.get_submodule(path), last)
        else:
            function = model.get_submodule(node.target) if node.kind == "unit" else node.target
            args, kwargs = with_values((node.args, node.kwargs), values, torch.device("meta"))
            values[node] = function(*args, **kwargs)
    return with_values(recording.output, values)


# --- making a recording ------------------------------------------------------------------------


class RecordingBuilder:
    """Makes a node for each call, and finds the node of each tensor in a call's arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.nodes: list[Node] = []
        self._flow = _GradientFlow()
        self._node_of: dict[int, Node] = {}  # by the id of its tensor
        self._versions: dict[Node, int] = {}  # keeps the tensors alive, so ids stay unique
        tensors = [*model.named_buffers(), *model.named_parameters()]
        self._names = {id(tensor): name for name, tensor in tensors}
        # By id, tensors that units compute from their arguments and weights, returned or not: a block
        # may store one for a later block, which may be on a different stage. Tensors computed from
        # sizes (a table of positions that blocks share) are not here: each stage computes them.
        self._made: dict[int, tuple[Tensor, str]] = {}
        self._given: set[int] = set()  # ids of the running unit's arguments

    def add(self, node: Node) -> Node:
        if node.value is not None:
            self._node_of[id(node.value)] = node
            self._versions[node] = node.value._version
        self._flow.add(node, len(self.nodes))
        self.nodes.append(node)
        return node

    def add_call(self, node: Node, result: Any) -> None:
        """Add a call with its result; raises RecordError under autocast."""
        node.grad_enabled = torch.is_grad_enabled()
        if any(torch.is_autocast_enabled(kind) for kind in KINDS):
            raise RecordError(
                "its forward turns autocast on between its modules, where stages do not apply it",
                "precision=bf16, and autocast inside blocks only",
            )
        if isinstance(result, Tensor):
            node.value = result
            self.add(node)
        else:
            self._add_parts(self.add(node), result)

    def _add_parts(self, node: Node, result: Any) -> None:
        """Add a getter node for each tensor in a container that a call returned."""
        for path, leaf in tree_flatten_with_path(result)[0]:
            if not any(isinstance(inner, Tensor) for inner in tree_flatten(leaf)[0]):
                continue
            part = node
            keys: list[Any] = [*path]
            for depth, key in enumerate(keys, 1):
                value = leaf if depth == len(keys) and isinstance(leaf, Tensor) else None
                is_field = isinstance(key, GetAttrKey)
                get: Any = getattr if is_field else operator.getitem
                of = key.name if is_field else key.key if isinstance(key, MappingKey) else key.idx
                part = self.add(Node("function", get, (part, of), value=value))
            for name, content in _fields(leaf).items() if _is_plain_dataclass(leaf) else ():
                value = content if isinstance(content, Tensor) else None
                inner = self.add(Node("function", getattr, (part, name), value=value))
                self._add_parts(inner, () if value is not None else content)

    def with_nodes(self, value: Any) -> Any:
        """Replace tensors by their nodes in arguments or an output; raises RecordError."""
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
        return self._node_of.get(id(leaf)) or self._add_weight(leaf)

    def _add_weight(self, tensor: Tensor) -> Node:
        """Add a node for a tensor that no recorded call made: a parameter or buffer."""
        name = self._names.get(id(tensor))
        if name is None and id(tensor) in self._made:
            unit = self._made[id(tensor)][1]
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
        return self.add(Node("weight", name, value=tensor, has_parameters=is_parameter))

    def enter(self, *arguments: Any) -> None:
        """Begin a unit with these arguments: operations inside it may use their tensors."""
        self._given = {id(tensor) for tensor in tensors(*arguments)}

    def add_inside(self, unit: str, function: str, used: Sequence[Tensor], result: Any) -> None:
        """Called with each torch function that a unit calls, and the tensors in its arguments."""
        if function.endswith("_like") or function.startswith("new_"):
            return  # the result has an argument's shape and dtype, but does not depend on its values
        if function == "to" or function.endswith("_as"):
            used = used[:1]  # likewise for the other argument
        if any(id(t) in self._made or id(t) in self._given or t.requires_grad for t in used):
            for tensor in tensors(result):
                self._made.setdefault(id(tensor), (tensor, unit))

    def check_used(self, unit: str, used: Sequence[Tensor]) -> None:
        """Raise RecordError if a unit uses a tensor that is neither an argument nor its own."""
        for tensor in used:
            _, maker = self._made.get(id(tensor), (None, ""))
            node = self._node_of.get(id(tensor))
            if maker == unit or id(tensor) in self._given:
                continue
            if not maker and (node is None or node.kind == "weight"):
                continue
            if node is not None and not maker:
                maker = node.target if node.kind == "unit" else "the model's own forward"
            raise RecordError(
                f"its {unit} reads a tensor of {maker} that is stored somewhere (in a dict, a list "
                "or an attribute), not passed as an argument: another stage would not find it",
                f"a forward that returns it from where it is computed and passes it to {unit}",
            )

    def constant(
        self, tensor: Tensor, buffers: Callable[[], Mapping[str, Tensor]]
    ) -> Tensor | None:
        """Compute a recorded tensor on the CPU, such as a causal mask that the forward compares;
        None if it depends on the batch, parameters, units, random numbers or an in-place change.
        buffers: returns the model's buffers by name."""
        node = self._node_of.get(id(tensor))
        if node is None:
            return None
        todo, used, values = [node], {node}, dict[Node, Any]()
        while todo:
            use = todo.pop()
            changed = use.value is None or use.value._version != self._versions[use]
            unknown = use.random or use.has_parameters or use.kind in ("input", "unit")
            if use.kind == "weight" and not unknown:
                values[use] = buffers().get(use.target)
                unknown = values[use] is None
            if changed or unknown:
                return None
            todo += set(use.input_nodes) - used
            used.update(use.input_nodes)
        device = torch.device("cpu")
        with device, torch.no_grad():
            for use in self.nodes:
                if use in used and use.kind == "function":
                    args, kwargs = with_values((use.args, use.kwargs), values, device)
                    values[use] = use.target(*args, **kwargs)
        return values[node]

    def finish(self, output: Any, traced: dict[str, int] | None = None) -> Recording:
        """Return the recording. output: nodes in place of tensors. Raises RecordError if the
        forward changed the batch in place."""
        for node, version in self._versions.items():
            node.mutated = node.tensor._version != version
            if node.mutated and node.kind == "input":
                raise RecordError(
                    f"its forward changes the batch's {node.target} in place",
                    f"{node.target} = {node.target}.clone() before",
                )
        return Recording(self.nodes, output, self._flow.last_uses, traced)


# --- gradient flow between calls ----------------------------------------------------------------

_Edge = tuple[Hashable, int]  # a function of the autograd graph, and which of its results


class _GradientFlow:
    """Tracks which call made each node of the autograd graph while a forward is recorded.

    A stage may use an earlier stage's tensor without needing its gradient: `x.detach()`, `x > 0`,
    an output that the loss ignores. In one process the backward then computes no gradient along
    that path, and a parameter without any other path to the loss has none at all: it gets no update
    and no weight decay. So such a tensor is sent without `requires_grad`, and no gradient is sent
    back, see `cut.py`.

    The recorded values have autograd graphs (on meta): they are read here and never run.
    """

    def __init__(self) -> None:
        self._position: dict[
            Hashable, int
        ] = {}  # autograd function -> index of the node that made it
        self._edges: dict[Node, _Edge | None] = {}  # in the order of the nodes

    def add(self, node: Node, position: int) -> None:
        """Called with each node when it is recorded: its value may be changed later."""
        self._edges[node] = None
        if node.value is not None and node.value.grad_fn is not None:
            self._edges[node] = _edge(node.value)
            new = _functions_before([node.value], self._position.__contains__)
            self._position |= dict.fromkeys(new, position)

    def last_uses(self, trained: Iterable[Tensor]) -> dict[Node, int]:
        """See `Recording`."""
        end = len(self._edges)
        trained = [value for value in trained if value.grad_fn is not None]
        last = {_edge(value): end for value in trained}
        for function in _functions_before(trained):
            position = self._position.get(function, end)
            for edge in function.next_functions:
                last[edge] = max(position, last.get(edge, -1))
        uses = {node: last[edge] for node, edge in self._edges.items() if edge in last}
        # a node changed in place has moved in the autograd graph: any later call may use it
        changed = (node for node in self._edges if node.mutated and node.tensor.requires_grad)
        return uses | dict.fromkeys(changed, end)


def used_by(total: Tensor, outputs: Sequence[Tensor]) -> list[bool]:
    """Whether `total` is computed from each output directly, not only from tensors derived from it."""
    ends = {value.grad_fn for value in outputs}
    functions = _functions_before([total], ends.__contains__)
    edges = {edge for f in functions for edge in f.next_functions} | {_edge(total)}
    return [value.grad_fn is not None and _edge(value) in edges for value in outputs]


def _edge(value: Tensor) -> _Edge:
    return value.grad_fn, value.output_nr


def _functions_before(
    values: Iterable[Tensor], is_end: Callable[[Any], bool] = lambda _: False
) -> list[Any]:
    """Walk the autograd graphs of these values backwards, up to and without nodes where `is_end` is
    true; returns the visited nodes."""
    functions: dict[Hashable, None] = {}
    todo = [value.grad_fn for value in values]
    while todo:
        function = todo.pop()
        if function is not None and function not in functions and not is_end(function):
            functions[function] = None
            todo += [before for before, _ in function.next_functions]
    return list(functions)


# --- nested values -----------------------------------------------------------------------------


def tree_flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves, and a function that rebuilds the structure from new leaves.

    torch's pytree flattens tuples, lists, dicts, named tuples and registered classes (transformers
    registers its outputs). Here the fields of any other dataclass are flattened too.
    """
    outer, spec = torch_tree.tree_flatten(value)
    leaves: list[Any] = []
    parts: list[tuple[Any, int, Callable[..., Any] | None]] = []  # (outer leaf, leaves, rebuild)
    for leaf in outer:
        inner, rebuild = (
            tree_flatten(_fields(leaf)) if _is_plain_dataclass(leaf) else ([leaf], None)
        )
        leaves += inner
        parts.append((leaf, len(inner), rebuild))

    def build(new: Sequence[Any]) -> Any:
        rest = iter(new)
        outer = []
        for leaf, size, rebuild in parts:
            inner = [next(rest) for _ in range(size)]
            outer.append(inner[0] if rebuild is None else _copy_with(leaf, rebuild(inner)))
        return torch_tree.tree_unflatten(outer, spec)

    return leaves, build


def tree_map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to each leaf of a structure."""
    leaves, build = tree_flatten(value)
    return build([function(leaf) for leaf in leaves])


def with_values(value: Any, values: Mapping[Node, Any], device: Any = DEVICE) -> Any:
    """Replace nodes by values, and DEVICE by `device`, in a nested structure."""

    def real(leaf: Any) -> Any:
        return values[leaf] if isinstance(leaf, Node) else device if leaf is DEVICE else leaf

    return tree_map(value, real)


def tensors(*values: Any) -> list[Tensor]:
    """Find the tensors in values and nested containers. Called for each torch function, so there
    is a fast path for plain tensors and numbers."""
    result = []
    for value in values:
        if isinstance(value, Tensor):
            result.append(value)
        elif not isinstance(value, (int, float, str, NoneType)):
            result += [leaf for leaf in torch_tree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return result


def describe(value: Any) -> str:
    """Describe a structure: "a dict of 'hidden' [2, 8, 4], 'aux' [1]"."""
    if hasattr(value, "shape"):
        return f"a tensor {list(value.shape)}"
    # a transformers ModelOutput is both; as a dict it has the fields that are set
    plain = _is_plain_dataclass(value) and not isinstance(value, dict)
    named, kind = _fields(value) if plain else value, f"a {type(value).__name__}"
    if isinstance(named, dict):
        shapes = {k: f" {list(v.shape)}" if hasattr(v, "shape") else "" for k, v in named.items()}
        return f"{kind} of {', '.join(f'{name!r}{shape}' for name, shape in shapes.items())}"
    return f"{kind} of {len(value)}" if isinstance(value, (tuple, list)) else kind


def _is_plain_dataclass(value: Any) -> bool:
    """Whether `value` is an instance of a dataclass that does not declare itself a pytree leaf."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return not getattr(value, "is_pytree_leaf", False)


def _fields(value: Any) -> dict[str, Any]:
    """Name -> value of a dataclass's fields, not recursive."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _copy_with(value: Any, fields: dict[str, Any]) -> Any:
    copied = copy.copy(value)
    for name, field_value in fields.items():
        object.__setattr__(copied, name, field_value)  # the dataclass may be frozen
    return copied
