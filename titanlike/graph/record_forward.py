"""What a model's forward does, as a graph of its units: the model is run once on meta tensors.

The model is any `nn.Module`. Its units (see `units.py`) are called as they are and become one node
each; what its forward does between them (a residual, a mask, a `torch.cat` with a skip connection,
a weight that is used directly) is recorded call by call, and becomes a node of its own. So every
tensor that flows through the model is known, with what it is made from and who uses it, and the
model can be cut anywhere: see `cut.py`.

A recording holds for one set of shapes. In contrast to `torch.fx`'s tracer the model runs with real
shapes, and in contrast to `torch.export` a unit stays a module: it may do what it likes inside.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from titanlike.graph.pytree import fields, is_plain_dataclass, tree_flatten, tree_map
from titanlike.graph.recording import DEVICE, Node, RecordError, Recording
from titanlike.graph.run_on_cpu import run_on_cpu
from titanlike.graph.side_effects import (
    Dice,
    SideEffect,
    refuse_running_statistics,
    states_of,
    undone,
)
from titanlike.torch_private.recording import intercept_checkpoints, intercept_custom_functions

# Functions that draw random numbers: run twice they do not give the same tensor.
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "exponential_")
_RANDOM += ("uniform_", "cauchy_", "geometric_", "log_normal_", "rrelu", "gumbel_softmax")
# What acts on a tensor and gives none: the stages would not do it.
_UNSEEN = ("register_hook", "retain_grad", "backward", "register_post_accumulate_grad_hook")


def record_forward(model: nn.Module, batch: dict[str, Tensor], units: Sequence[str]) -> Recording:
    """Run `model` once on the meta device: `model(inputs, **others)`.

    batch: meta tensors of one microbatch, "inputs" and what else the model takes.
    units: names of the modules that are called as they are.
    Raises RecordError where the forward depends on values, or uses tensors that nobody knows.
    """
    recorder = _Recorder(model, units)
    for name, tensor in batch.items():
        recorder.add(Node("input", name, value=tensor))
    others = {name: tensor for name, tensor in batch.items() if name != "inputs"}
    first = (batch["inputs"],) if "inputs" in batch else ()
    try:
        with undone(model, units), recorder.listening():
            output = model(*first, **others)
            return recorder.finish(output)
    except SideEffect as effect:
        raise RecordError(effect.reason, effect.fix) from None
    except (RuntimeError, NotImplementedError) as error:
        if "meta" in str(error).lower():
            raise RecordError(
                f"its forward looks at the values of tensors ({_first_line(error)}), so what it "
                "does is not known before it runs",
                "it without .item(), .tolist() and `if tensor:` between its modules (inside of blocks "
                "they do no harm)",
            ) from error
        raise


class _Recorder(TorchFunctionMode):
    """Sees each call of a torch function; is told of each call of a unit."""

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        super().__init__()
        self._nodes: list[Node] = []
        self._model, self._units = model, list(units)
        self._node: dict[int, Node] = {}  # by the id of its tensor
        self._versions: list[tuple[Node, int]] = []  # these keep the tensors, and so their ids
        self._inside: list[str] = []  # the unit that is running
        self._given: tuple[Any, Any, list[Any]] = ((), {}, [])  # its arguments, as they were
        self._used: Counter[int] = Counter()  # parameters, by id, in the unit that is running
        self._dice = Dice()
        self._drew = self._tried = False
        self._checkpoints = 0  # that are running, of torch.utils.checkpoint
        self._names = {
            id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]
        }
        self._order: list[str] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self._units:
                module = self._model.get_submodule(name)
                before = module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
                after = module.register_forward_hook(self._leave(name), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
                stack.enter_context(self._on_meta_or_tried_out(module))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(intercept_checkpoints(self._checkpoint))
            stack.enter_context(intercept_custom_functions(self._custom))
            stack.enter_context(self)
            # within: factory functions say to the recorder that they mean the stage's device
            stack.enter_context(torch.device("meta"))
            yield

    def add(self, node: Node) -> Node:
        self._nodes.append(node)
        if node.value is not None:
            self._node[id(node.value)] = node
            self._versions.append((node, node.value._version))
        return node

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        random = name.startswith(_RANDOM) or "dropout" in name
        self._drew |= random and kwargs.get("training", True) is not False
        refuse_running_statistics(name, args, kwargs)
        if self._inside:
            if name != "__get__":
                given = pytree.tree_leaves((args, kwargs))
                self._used.update(id(leaf) for leaf in given if isinstance(leaf, nn.Parameter))
            return function(*args, **kwargs)
        if name in _UNSEEN:
            raise RecordError(
                f"its forward calls {name} between its modules, which the stages would not do",
                "it inside of a block",
            )
        # before the call, which may change its arguments in place
        known = None if name == "__get__" and not _is_view(function) else self._known(args, kwargs)
        drew, self._drew = self._drew, False
        result = function(*args, **kwargs)
        leaves = pytree.tree_leaves(result)
        gives = any(isinstance(leaf, Tensor) for leaf in leaves) or name == "__setitem__"
        if known is not None and gives:
            self._did(Node("function", *_as_function(function, *known)), result, drew)
        return result

    def _enter(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._inside:
                self._drew = False
                self._refuse_dice()
                self._used.clear()
                # now: the unit may change a list that it is given
                self._given = (*self._known(args, kwargs), states_of(args, kwargs))
            self._inside.append(name)

        return hook

    def _refuse_dice(self) -> None:
        if self._dice.look():
            raise RecordError(
                "its forward draws random numbers of Python or numpy between its modules, which "
                "would be drawn once for all steps",
                "torch.rand, or draw inside of a block",
            )

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self._inside.pop()
            if self._inside:
                return
            if name not in self._order:
                self._order.append(name)
            weighs = next(module.parameters(), None) is not None
            args_before, kwargs_before, states = self._given
            if states_of(args, kwargs) != states:
                raise RecordError(
                    f"its {name} changes an object, list or dict that it is given, which is made "
                    "once, when the forward is recorded",
                    "a block that returns what it made",
                )
            self._dice.look()  # what a unit draws is drawn at run time, too
            node = Node("unit", name, args_before, kwargs_before, weighs=weighs)
            node.checkpointed = self._checkpoints > 0
            node.data_dependent = self._tried
            node.repeats = max(self._used.values(), default=0) > 1
            self._tried = False
            self._did(node, result, self._drew)

        return hook

    def _checkpoint(self, depth: int) -> None:
        self._checkpoints += depth

    def _custom(self, kind: Any, call: Any, args: tuple[Any, ...]) -> Any:
        """A torch.autograd.Function: its backward is its own, so it is one call."""
        if self._inside:
            return call(*args)
        known, _ = self._known(args, {})
        self._inside.append(kind.__name__)
        try:
            result = call(*args)
        finally:
            self._inside.pop()

        def apply(*real: Any) -> Any:
            return kind.apply(*real)

        # whether it draws is not seen: a stage sends what it made
        self._did(Node("function", apply, known, {}), result, random=True)
        return result

    def _did(self, node: Node, result: Any, random: bool) -> None:
        node.grad, node.random = torch.is_grad_enabled(), random
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise RecordError(
                "its forward turns autocast on around its modules, which the stages would not know of",
                "precision=bf16, and autocast inside of blocks at most",
            )
        if isinstance(result, Tensor):
            node.value = result
        self.add(node)
        if not isinstance(result, Tensor):
            self._take_apart(node, result)

    def _take_apart(self, node: Node, result: Any) -> None:
        """Add the tensors in a result that is none, as nodes."""
        for path, leaf in pytree.tree_flatten_with_path(result)[0]:
            if not any(isinstance(inner, Tensor) for inner in tree_flatten(leaf)[0]):
                continue
            part = node
            for at, key in enumerate(path, 1):
                value = leaf if at == len(path) and isinstance(leaf, Tensor) else None
                part = self.add(Node("function", *_part(part, key), value=value))
            for name, field_of in fields(leaf).items() if is_plain_dataclass(leaf) else ():
                inner = Node("function", getattr, (part, name))
                if isinstance(field_of, Tensor):
                    inner.value = field_of
                self.add(inner)
                self._take_apart(inner, () if inner.value is not None else field_of)

    def _known(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments with nodes in place of tensors."""

        def replace(leaf: Any) -> Any:
            if isinstance(leaf, torch.device) and leaf.type == "meta":
                return DEVICE
            if isinstance(leaf, str) and leaf == "meta":
                return DEVICE
            if isinstance(leaf, nn.Module):
                raise RecordError(
                    f"its forward hands a {type(leaf).__name__} to another module, and a stage has "
                    "modules of its own",
                    "a module that holds it",
                )
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in self._node:
                self._meet(leaf)
            return self._node[id(leaf)]

        return tree_map(args, replace), tree_map(kwargs, replace)

    def _meet(self, tensor: Tensor) -> None:
        """A tensor that no recorded call made: a weight or a buffer."""
        name = self._names.get(id(tensor))
        if name is None:
            raise RecordError(
                f"its forward uses a tensor of shape {tuple(tensor.shape)} that is neither a "
                "parameter nor a buffer nor computed from the batch",
                "self.register_buffer('name', tensor) in its constructor",
            )
        self.add(Node("weight", name, value=tensor, weighs=isinstance(tensor, nn.Parameter)))

    def finish(self, output: Any) -> Recording:
        for node, version in self._versions:
            node.mutated = node.value._version != version
            if node.mutated and node.kind == "input":
                raise RecordError(
                    f"its forward changes the batch's {node.target} in place",
                    f"{node.target} = {node.target}.clone() before",
                )
        self._refuse_dice()
        (output,), _ = self._known((output,), {})
        return Recording(self._nodes, self._order, output)

    @contextmanager
    def _on_meta_or_tried_out(self, module: nn.Module) -> Iterator[None]:
        """Within it, a unit that cannot run on meta is tried on the CPU, for the shapes it returns."""
        forward, own = module.forward, vars(module).get("forward")

        def on_meta_or_tried_out(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error).lower():
                    raise
                self._tried = True
                if own is None:
                    vars(module).pop("forward", None)
                return run_on_cpu(module, args, kwargs)

        module.forward = on_meta_or_tried_out
        try:
            yield
        finally:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own


def _is_view(function: Any) -> bool:
    """Whether a getter of Tensor gives a tensor (x.T, x.data), not a property (x.shape)."""
    return getattr(getattr(function, "__self__", None), "__name__", "") in (
        ("T", "H", "mT", "mH", "data", "real", "imag")
    )


def _as_function(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """What generated code can call: `x.T` is called as getattr(x, "T")."""
    if getattr(function, "__name__", "") == "__get__":
        return getattr, (args[0], function.__self__.__name__), {}
    return function, args, kwargs


def _part(node: Node, key: Any) -> tuple[Any, tuple[Node, Any]]:
    """The call that takes a part out of a result."""
    if isinstance(key, pytree.GetAttrKey):
        return getattr, (node, key.name)
    return operator.getitem, (node, key.key if isinstance(key, pytree.MappingKey) else key.idx)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
