"""A model's forward on meta, operation by operation: the full model's, and a rank's in step with
it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from titanlike.core.graph.units import call_key
from titanlike.core.torch_private.autograd import intercept_checkpoints
from titanlike.core.torch_private.deferred_dynamo import force_eager
from titanlike.core.torch_private.operators import TorchDispatchMode, arguments_of, decomposed
from titanlike.core.torch_private.tensors import tensors_in
from titanlike.techniques.tp.operators import (
    Shape,
    ShardingError,
)
from titanlike.techniques.tp.plan import DIVIDING, Entry


@dataclass(frozen=True)
class Step:
    """An operation of the full model, a sharded module's begin or end, or a block."""

    kind: Literal["operation", "begin", "end", "block"]
    name: str
    path: str  # of the module in the block where it was recorded
    shapes: tuple[Shape, ...] = ()  # of its tensor arguments
    given: Mapping[str, Any] = field(default_factory=dict)  # arguments by name, tensors as None
    results: tuple[Shape, ...] = ()
    inside: list[Step] = field(default_factory=list)  # of a block


class TracedForward(TorchDispatchMode):
    """A mode that intercepts a forward's operations outside of sharded layers."""

    def __init__(self, model: nn.Module, modules: Mapping[str, Entry]) -> None:
        super().__init__()
        self._model, self._modules = model, modules
        self._atoms: set[Any] = {torch.ops.aten.scaled_dot_product_attention.default}
        self._paths, self._blocks = [""], [""]  # running modules, and blocks
        self._muted = 0
        self.called = ""  # the operation at fault
        self._outer = ""  # the composite operation that the forward called

    @property
    def path(self) -> str:
        """The running module."""
        return self._paths[-1]

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run the model's forward on meta."""
        with contextlib.ExitStack() as stack:
            block = ""
            for name, module in self._model.named_modules():
                if name in self._modules:
                    self._watch(name, module, stack)
                elif name.rpartition(".")[2].isdigit() and not (block and within(name, block)):
                    block_forward = partial(self.block, name, module, module.forward)
                    stack.enter_context(patch.object(module, "forward", block_forward))
                    block = name
            self._follow_paths(stack)
            stack.enter_context(torch.inference_mode())
            stack.enter_context(force_eager())
            stack.enter_context(intercept_checkpoints(lambda change: None))
            stack.enter_context(self)
            stack.enter_context(torch.device("meta"))
            return forward()

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """A context in which operations are not intercepted."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def _follow_paths(self, stack: contextlib.ExitStack) -> None:
        names = {id(module): name for name, module in self._model.named_modules()}
        hooks = torch.nn.modules.module

        def enter(module: nn.Module, _: Any) -> None:
            self._paths.append(names.get(id(module), self.path))

        def leave(*_: Any) -> None:
            self._paths.pop()

        stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
        stack.callback(hooks.register_module_forward_hook(leave).remove)

    def _watch(self, name: str, module: nn.Module, stack: contextlib.ExitStack) -> None:
        style = self._modules[name].style
        leaf = is_leaf(style) or self._token_wise(name)

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.begin(name, tensors_in(args, kwargs))
            self._muted += 1

        def entered(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._muted -= 1
            self.gathered(name, tensors_in(args, kwargs))

        def leave(*_: Any) -> None:
            self._muted += 1

        def left(_: nn.Module, __: Any, result: Any) -> None:
            self._muted -= 1
            self.end(name, tensors_in(result))

        before: Any = partial(module.register_forward_pre_hook, with_kwargs=True)
        after: Any = module.register_forward_hook
        for needed, register, hook, first in (
            (leaf or style == "gather", before, enter, True),
            (style == "gather", before, entered, False),
            (style == "split", after, leave, True),
            (leaf or style == "split", after, left, False),
        ):
            if needed:
                stack.callback(register(hook, prepend=first).remove)

    def _token_wise(self, name: str) -> bool:
        """Whether a module declares that it computes each token separately, in whatever way (a
        routed layer sorts them): sharded tokens give the same shard of the result."""
        sequence = self._modules[name].style == "sequence"
        return sequence and getattr(self._model.get_submodule(name), "token_wise", False)

    def _in_block(self, path: str) -> str:
        """The name of a module relative to the running block."""
        return path.removeprefix(self._blocks[-1])

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return function(*args, **kwargs)
        outer = self._outer
        self._outer = outer or short_name(function._schema.name)
        try:
            if function not in self._atoms:
                with self:
                    result = decomposed(function, args, kwargs)
                if result is not NotImplemented:
                    return result
                self._atoms.add(function)
            return self.operation(function, args, kwargs)
        except ShardingError:
            self.called = self.called or self._outer
            raise
        except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
            self.called = self.called or self._outer
            raise self.raised(error, tensors_in(args, kwargs)) from error
        finally:
            self._outer = outer

    def raised(self, error: Exception, given: list[Tensor]) -> Exception:
        """The exception to raise instead of an operation's own."""
        return error

    # callbacks: a sharded module begins, has gathered its input, ends; an operation; a block
    def begin(self, name: str, given: list[Tensor]) -> None: ...
    def gathered(self, name: str, given: list[Tensor]) -> None: ...
    def end(self, name: str, results: list[Tensor]) -> None: ...
    def operation(self, function: Any, args: Any, kwargs: Any) -> Any: ...
    def block(
        self, name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any
    ) -> Any: ...


class ReferenceTrace(TracedForward):
    """The forward of the full model."""

    def __init__(self, model: nn.Module, modules: Mapping[str, Entry]) -> None:
        super().__init__(model, modules)
        self.steps: list[Step] = []
        self._equal: dict[Hashable, tuple[str, list[Step]]] = {}  # a block, and its steps
        self.alike: dict[str, str] = {}  # skipped block -> the equal one that ran
        # kept alive as in the other trace: torch detaches a new tensor with other references
        self._results: list[Any] = []

    def gathered(self, name: str, given: list[Tensor]) -> None:
        self.steps.append(Step("begin", "", self._in_block(name), shapes_of(given)))

    def end(self, name: str, results: list[Tensor]) -> None:
        self.steps.append(Step("end", "", self._in_block(name), shapes_of(results)))

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        shapes = shapes_of(tensors_in(args, kwargs))
        result = function(*args, **kwargs)
        self._results.append(result)
        given = by_name(function, args, kwargs, lambda tensor: None)
        results = shapes_of(tensors_in(result))
        name, path = function._schema.name, self._in_block(self.path)
        self.steps.append(Step("operation", name, path, shapes, given, results))
        return result

    def block(self, name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        key = call_key(module, args, kwargs)
        outside, path = self.steps, self._in_block(self.path)
        if key in self._equal:
            self.alike[name], inside = self._equal[key]
            outside.append(Step("block", "", path, inside=inside))
            return args[0]
        self.steps = []
        self._blocks.append(name)
        result = forward(*args, **kwargs)
        self._blocks.pop()
        inside, self.steps = self.steps, outside
        outside.append(Step("block", "", path, inside=inside))
        if key is not None and same_form(result, args):
            self._equal[key] = name, inside
        return result


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def shapes_of(tensors: list[Tensor]) -> tuple[Shape, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def by_name(
    function: Any, args: Any, kwargs: Any, change: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """Arguments by name, with `change` applied to tensors."""

    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [changed(part) for part in value]
        return change(value) if isinstance(value, Tensor) else value

    values = arguments_of(function, args, kwargs)
    return {name: changed(value) for name, value in values.items()}


def same_form(result: Any, args: Any) -> bool:
    """Whether a block's result may stand in for its first argument."""
    tensors = [x for x in (result, *args[:1]) if isinstance(x, Tensor)]
    return len(tensors) == 2 and len({(x.shape, x.dtype, x.stride()) for x in tensors}) == 1


def is_leaf(style: str) -> bool:
    """Whether the module is correct by construction."""
    return style in DIVIDING or style == "vocab"


def within(path: str, block: str) -> bool:
    return f"{path}.".startswith(f"{block}.")


def short_name(name: str) -> str:
    return name.split("::")[-1]
