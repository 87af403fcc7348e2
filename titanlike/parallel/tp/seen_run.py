"""A model's forward on meta, whose operations outside of divided layers are seen, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titanlike.parallel.tp.layout import Shape, WrongCall
from titanlike.parallel.tp.plan import DIVIDING, Entry
from titanlike.torch_private.autograd import intercept_checkpoints
from titanlike.torch_private.operators import TorchDispatchMode, in_parts
from titanlike.torch_private.tensors import tree_leaves

CallKey = Callable[[nn.Module, Any, Any], Hashable | None]


@dataclass(frozen=True)
class Step:
    """What the whole model did: an operation, or a divided module's beginning or end, or a block."""

    kind: Literal["operation", "begin", "end", "block"]
    name: str
    path: str  # of the module in the block where it was recorded
    shapes: tuple[Shape, ...] = ()  # of the tensors that it is given
    given: Mapping[str, Any] = field(default_factory=dict)  # arguments by name, tensors as None
    results: tuple[Shape, ...] = ()
    inside: list[Step] = field(default_factory=list)  # of a block


class SeenRun(TorchDispatchMode):
    """A forward whose operations outside of divided layers are seen, one by one."""

    def __init__(self, model: nn.Module, modules: Mapping[str, Entry], key: CallKey) -> None:
        super().__init__()
        self._model, self._modules, self._key = model, modules, key
        self._atoms: set[Any] = {torch.ops.aten.scaled_dot_product_attention.default}
        self._names: dict[Any, list[str]] = {}
        self._paths, self._prefixes, self._muted = [""], [""], 0
        self.called = ""  # the operation that is not right
        self._outer = ""  # the operation that the forward calls, which may be made of several

    @property
    def path(self) -> str:
        return self._paths[-1]

    def relative(self, path: str) -> str:
        """The name of a module in the block that runs."""
        return path.removeprefix(self._prefixes[-1])

    def run(self, batch: dict[str, Tensor]) -> Any:
        others = {name: tensor for name, tensor in batch.items() if name != "inputs"}
        first = (batch["inputs"],) if "inputs" in batch else ()
        return self.see(partial(self._model, *first, **others))

    def see(self, forward: Callable[[], Any]) -> Any:
        """forward: of the model, on meta."""
        with contextlib.ExitStack() as stack:
            blocks: list[str] = []
            for name, module in self._model.named_modules():
                if name in self._modules:
                    self._watch(name, module, stack)
                nested = any(name.startswith(f"{block}.") for block in blocks[-1:])
                if name.rpartition(".")[2].isdigit() and name not in self._modules and not nested:
                    self._watch_block(name, module, stack)
                    blocks.append(name)
            stack.enter_context(self._paths_followed())
            stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(intercept_checkpoints(lambda change: None))
            stack.enter_context(self)
            stack.enter_context(torch.device("meta"))
            return forward()

    @contextlib.contextmanager
    def _paths_followed(self) -> Iterator[None]:
        names = {id(module): name for name, module in self._model.named_modules()}
        hooks = torch.nn.modules.module
        before = hooks.register_module_forward_pre_hook(
            lambda module, _: self._paths.append(names.get(id(module), self.path))
        )

        def left(*_: Any) -> None:
            self._paths.pop()

        after = hooks.register_module_forward_hook(left)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _watch(self, name: str, module: nn.Module, stack: contextlib.ExitStack) -> None:
        style = self._modules[name].style
        leaf = is_leaf(style) or self.token_wise(name)

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.begin(name, args, kwargs)
            self._muted += 1

        def inside(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._muted -= 1
            self.changed(name, args, kwargs)

        def behind(*_: Any) -> None:
            self._muted += 1

        def after(_: nn.Module, __: Any, result: Any) -> None:
            self._muted -= 1
            self.end(name, result)

        def pre(hook: Any, first: bool) -> None:
            handle = module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)
            stack.callback(handle.remove)

        if leaf or style == "gather":
            pre(before, True)
        if style == "gather":
            pre(inside, False)
        if style == "split":
            stack.callback(module.register_forward_hook(behind, prepend=True).remove)
        if leaf or style == "split":
            stack.callback(module.register_forward_hook(after).remove)

    def _watch_block(self, name: str, module: nn.Module, stack: contextlib.ExitStack) -> None:
        own, forward = vars(module).get("forward"), module.forward

        def restore() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own

        module.forward = partial(self.block, name, module, forward)
        stack.callback(restore)

    def token_wise(self, name: str) -> bool:
        """Whether a divided module says that it computes each token by itself, however it does it (a
        routed layer sorts them): a rank's part of the tokens gives that part of the result."""
        sequence = self._modules[name].style == "sequence"
        return sequence and getattr(self._model.get_submodule(name), "token_wise", False)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return function(*args, **kwargs)
        outer = self._outer
        self._outer = outer or function._schema.name.split("::")[1]
        try:
            if function not in self._atoms:
                with self:
                    result = in_parts(function, args, kwargs)
                if result is not NotImplemented:
                    return result
                self._atoms.add(function)
            return self.operation(function, args, kwargs)
        except WrongCall:
            self.called = self.called or self._outer
            raise
        except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
            self.called = self.called or self._outer
            raise self.raised(error, args, kwargs) from error
        finally:
            self._outer = outer

    def _named(self, function: Any, args: Any, kwargs: Any, change: Callable[..., Any]) -> Any:
        """Arguments by name, each `change`d."""
        if function not in self._names:
            self._names[function] = [argument.name for argument in function._schema.arguments]
        given = dict(zip(self._names[function], args, strict=False)) | kwargs
        return {
            name: [change(part) for part in value]
            if isinstance(value, (list, tuple))
            else change(value)
            for name, value in given.items()
        }

    def raised(self, error: Exception, args: Any, kwargs: Any) -> Exception:
        return error

    def begin(self, name: str, args: Any, kwargs: Any) -> None: ...
    def changed(self, name: str, args: Any, kwargs: Any) -> None: ...
    def end(self, name: str, result: Any) -> None: ...
    def operation(self, function: Any, args: Any, kwargs: Any) -> Any: ...
    def block(
        self, name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any
    ) -> Any: ...


def tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def shapes_of(tensors: list[Tensor]) -> tuple[Shape, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


class WholeRun(SeenRun):
    def __init__(self, model: nn.Module, modules: Mapping[str, Entry], key: CallKey) -> None:
        super().__init__(model, modules, key)
        self.steps: list[Step] = []
        self.output: tuple[Shape, ...] = ()
        self._equal: dict[Hashable, tuple[str, list[Step]]] = {}  # a block, and what it did
        self.alike: dict[str, str] = {}  # blocks that were not run, and the equal ones that were
        # as the other run keeps them: torch detaches a new tensor that somebody else refers to
        self._results: list[Any] = []

    def changed(self, name: str, args: Any, kwargs: Any) -> None:
        shapes = shapes_of(tensors_in(args, kwargs))
        self.steps.append(Step("begin", "", self.relative(name), shapes))

    def end(self, name: str, result: Any) -> None:
        self.steps.append(Step("end", "", self.relative(name), shapes_of(tensors_in(result))))

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        shapes = shapes_of(tensors_in(args, kwargs))
        result = function(*args, **kwargs)
        self._results.append(result)
        given = self._named(
            function, args, kwargs, lambda value: None if isinstance(value, Tensor) else value
        )
        results = shapes_of(tensors_in(result))
        name = function._schema.name
        self.steps.append(Step("operation", name, self.relative(self.path), shapes, given, results))
        return result

    def block(self, name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        key = self._key(module, args, kwargs)
        outside, path = self.steps, self.relative(self.path)
        if key in self._equal:
            self.alike[name], inside = self._equal[key]
            outside.append(Step("block", "", path, inside=inside))
            return args[0]
        self.steps = []
        self._prefixes.append(name)
        result = forward(*args, **kwargs)
        self._prefixes.pop()
        inside, self.steps = self.steps, outside
        outside.append(Step("block", "", path, inside=inside))
        if key is not None and same_form(result, args):
            self._equal[key] = name, inside
        return result


def same_form(result: Any, args: Any) -> bool:
    """Whether a block's result may stand in for its first argument."""
    given = args[0] if args else None
    if not isinstance(result, Tensor) or not isinstance(given, Tensor):
        return False
    return (result.shape, result.dtype, result.stride()) == (
        given.shape,
        given.dtype,
        given.stride(),
    )


def is_leaf(style: str) -> bool:
    """Whether all that the module does is known to be right."""
    return style in DIVIDING or style == "vocab"
