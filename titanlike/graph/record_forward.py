"""Record what a model's forward does by running it once on meta tensors.

The model is any `nn.Module`. Each unit (see `find_units.py`) runs as it is and becomes one node.
Every torch call between units (a residual, a mask, a `torch.cat` with a skip connection, a weight
used directly) is intercepted and becomes a node as well. The graph holds every tensor that flows
through the model, so the model can be cut anywhere: see `cut.py`.

A recording is valid for one set of shapes. Unlike `torch.fx`'s tracer the model runs with real
shapes; unlike `torch.export` a unit stays a module, whose forward is not restricted.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import titanlike
from titanlike.device.accelerator import KINDS
from titanlike.graph import equal_units, side_effects
from titanlike.graph.constant_value import constant_value
from titanlike.graph.hidden_values import tensors
from titanlike.graph.pytree import tree_flatten
from titanlike.graph.recording import Node, RecordError, Recording, RecordingBuilder
from titanlike.graph.run_on_cpu import DependsOn, run_on_cpu, wanted
from titanlike.torch_private.autograd import intercept_checkpoints, intercept_custom_functions
from titanlike.torch_private.compiler import as_if_compiling

# Prefixes of functions that draw random numbers: called twice they return different tensors.
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "exponential_")
_RANDOM += ("uniform_", "cauchy_", "geometric_", "log_normal_", "rrelu", "gumbel_softmax")
# Calls that act on a tensor and return none: the generated forward of a stage would skip them.
_NOT_REPLAYED = ("register_hook", "retain_grad", "backward", "register_post_accumulate_grad_hook")
_TAKE_GRADIENTS = (torch.autograd.grad, Tensor.backward)
_READS_VALUES = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
_DEVICE_PROPERTIES: dict[str, Any] = {  # of a tensor: what the forward sees, from the run's device
    "device": lambda device: device,
    **{f"is_{kind}": lambda device, kind=kind: device.type == kind for kind in KINDS},
}
_MODELS = str(Path(titanlike.__file__).parent / "models")
_TENSOR_PROPERTIES = ("T", "H", "mT", "mH", "data", "real", "imag")  # properties that give a tensor


def record_forward(
    model: nn.Module,
    batch: dict[str, Tensor],
    units: Sequence[str],
    device: str = "cpu",
    buffers: Callable[[], dict[str, Tensor]] = dict,
) -> Recording:
    """Run `model(inputs, **others)` once on the meta device.

    batch: meta tensors of one microbatch: "inputs" and the model's other arguments.
    units: names of the modules that become one node each.
    device: type of the run's device, which the forward sees in place of meta.
    buffers: gives the model's buffers, which the forward may look at.
    Raises RecordError where the forward depends on values, or uses tensors of unknown origin.
    """
    try:
        return _record(model, batch, units, device, buffers)
    except (RuntimeError, NotImplementedError) as error:
        # torch.compile cannot look at values either: a library may have a forward for it
        with contextlib.suppress(Exception), as_if_compiling():
            return _record(model, batch, units, device, buffers)
        if "meta" not in str(error).lower():
            raise
        raise RecordError(
            f"its forward reads the values of tensors ({_users_line(error)}), so the operations "
            "it runs are not known in advance",
            "torch.where instead of `if tensor:`, shapes instead of .item() and .tolist(), masks "
            "instead of boolean indices; or these lines inside a block: blocks run as they are",
        ) from error


def _record(
    model: nn.Module,
    batch: dict[str, Tensor],
    units: Sequence[str],
    device: str,
    buffers: Callable[[], dict[str, Tensor]],
) -> Recording:
    interceptor = _Interceptor(model, units, device, buffers)
    for name, tensor in batch.items():
        interceptor.builder.add(Node("input", name, value=tensor))
    others = {name: tensor for name, tensor in batch.items() if name != "inputs"}
    first = (batch["inputs"],) if "inputs" in batch else ()
    with side_effects.restored(model, units), interceptor.active():
        return interceptor.finish(model(*first, **others))


def _users_line(error: BaseException) -> str:
    """`file.py:12: code` of the innermost line that is neither torch's nor titanlike's."""
    ours = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, titanlike.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((*ours, "<"))]
    models = [frame for frame in frames if frame.filename.startswith(_MODELS)]
    if not (found := users or models):
        return str(error).strip().splitlines()[0]
    return f"{found[-1].filename}:{found[-1].lineno}: {found[-1].line}"


class _Interceptor(TorchFunctionMode):
    """Intercepts torch functions, units, custom autograd functions and checkpointing."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[str],
        device: str,
        buffers: Callable[[], dict[str, Tensor]],
    ) -> None:
        super().__init__()
        self._device, self._buffers = torch.device(device), buffers
        self.builder = RecordingBuilder(model)
        self._model, self._units = model, list(units)
        self._called: list[str] = []  # units, in the order of their first calls
        self._rng = side_effects.RngMonitor()
        self._checkpoint_depth = 0  # of torch.utils.checkpoint
        # of the unit or custom function that is running
        self._running: list[str] = []  # its name; nested units after it
        self._arguments: tuple[Any, Any, list[Any]] = ((), {}, [])  # as they were at its call
        self._versions: list[int] = []  # of the tensors among them
        self._attributes: dict[str, Any] = {}  # plain ones, as they were at its call
        self._checkpoints_inside = False  # whether it called torch.utils.checkpoint
        self._gradients_inside = False  # whether it took gradients
        self._own_generator = False  # whether it drew from one that is not torch's default
        self._random = False  # whether it drew random numbers
        self._on_cpu = False  # whether it had to run on the CPU
        # equal for units that give equal results; None where that is not known
        self._call: Hashable | None = None
        # of such a call: the result's shape, strides, dtype, whether it has a gradient; whether the
        # call drew random numbers
        self._like: dict[Hashable, tuple[Any, ...]] = {}
        self._sized_by_values: list[Tensor] = []
        # of each unit: the tensors that it was given, and their versions after it
        self._given: list[tuple[Node, list[tuple[Tensor, int]]]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self._units:
                module = self._model.get_submodule(name)
                # before what tensor parallelism exchanges, which is part of the unit; behind the
                # model's own hooks, which may leave arguments out
                first = equal_units.is_divided(module)
                hook = self._pre_hook(name)
                before = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
                after = module.register_forward_hook(self._post_hook(name), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
                stack.enter_context(self._quick(module))
            stack.enter_context(torch.enable_grad())
            # a compiled module or function is recorded as what it compiles
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(intercept_checkpoints(self._change_checkpoint_depth))
            stack.enter_context(intercept_custom_functions(self._custom_function))
            stack.enter_context(self)
            # entered last: factory functions then reach the interceptor with device=meta
            stack.enter_context(torch.device("meta"))
            yield

    def finish(self, output: Any) -> Recording:
        self.builder.mark_mutated()
        self._check_rng()
        for node, given in self._given:
            if any(tensor._version != version for tensor, version in given):
                node.once = node.once or "is given a tensor that is later changed in place"
        sized = {id(tensor) for tensor in self._sized_by_values}
        for node in self.builder.nodes:
            node.sized_by_values = id(node.value) in sized
        output = self.builder.with_nodes(output)
        return Recording(self.builder.nodes, self._called, output, self.builder.gradient_flow)

    # --- torch functions between units ---------------------------------------------------------

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        accessed = ""  # by a getter
        if name == "__get__":
            accessed = getattr(getattr(function, "__self__", None), "__name__", "")
            if accessed in _DEVICE_PROPERTIES and args[0].is_meta and not self._on_cpu:
                return _DEVICE_PROPERTIES[accessed](self._device)
        if not self._on_cpu:
            args, kwargs = self._on_meta(name, args, kwargs)
        draws = name.startswith(_RANDOM) or "dropout" in name
        self._random |= draws and kwargs.get("training", True) is not False
        side_effects.check_running_statistics(name, args, kwargs)
        self._own_generator |= isinstance(kwargs.get("generator"), torch.Generator)
        if self._running:
            self._gradients_inside |= function in _TAKE_GRADIENTS
            if torch.is_autocast_enabled(self._device.type) and not self._on_cpu:
                raise NotImplementedError("meta tensors have no autocast")
            used = tensors(*args, *kwargs.values())
            if self._on_cpu:
                return function(*args, **kwargs)
            self.builder.check_used(self._running[0], used)
            _check_dtypes(self._running[0], name, used)
            result = function(*args, **kwargs)
            self.builder.hidden.add(self._running[0], name, used, result)
            return result
        if name in _READS_VALUES and (node := self.builder.unchanged_node(args[0])):
            value = constant_value(node, self._buffers)
            if value is not None:  # of sizes and buffers alone: the same in each step
                return getattr(value, name)(*args[1:], **kwargs)
        if name in _NOT_REPLAYED:
            raise RecordError(
                f"its forward calls {name} between its modules, which stages do not replay",
                "it inside a block",
            )
        recorded = name != "__get__" or accessed in _TENSOR_PROPERTIES
        # before the call, which may change its arguments in place
        arguments: Any = self.builder.with_nodes((args, kwargs)) if recorded else None
        random, self._random = self._random, False
        result = function(*args, **kwargs)
        self._pass_size_on((args, kwargs), result)
        if recorded and (tensors(result) or name == "__setitem__"):
            node = Node("function", function, *arguments)
            if name == "__get__":  # generated code calls getattr(x, "T") for x.T
                node = Node("function", getattr, (arguments[0][0], accessed))
            self.builder.add_call(node, result, random)
        return result

    def _on_meta(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call's arguments with meta in place of the run's device."""

        def is_device(value: Any) -> bool:
            named = isinstance(value, torch.device) and value.type == self._device.type
            return named or (isinstance(value, str) and value.split(":")[0] == self._device.type)

        if is_device(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if name in ("to", "empty_like", "type") or torch.device in map(type, args):
            args = tuple(torch.device("meta") if is_device(value) else value for value in args)
        return args, kwargs

    def _pass_size_on(self, given: Any, result: Any) -> None:
        """Of a call that is given a tensor whose size depends on values: what has as many rows."""
        # only shapes are read here: other methods of a tensor would be recorded
        if not self._sized_by_values:
            return
        sized = {id(tensor) for tensor in self._sized_by_values}
        rows = {tensor.shape[:1] for tensor in tensors(given) if id(tensor) in sized}
        for tensor in tensors(result):
            if tensor.shape and tensor.shape[:1] in rows and id(tensor) not in sized:
                self._sized_by_values.append(tensor)

    def _check_rng(self) -> None:
        if self._rng.used_since_last_check():
            raise RecordError(
                "its forward draws random numbers of Python or numpy between its modules, which "
                "would be the same in all steps",
                "torch.rand, or draw inside a block",
            )

    # --- units ---------------------------------------------------------------------------------

    def _pre_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._running:
                self._random = False
                self._check_rng()
                self._checkpoints_inside = self._own_generator = self._gradients_inside = False
                self._call = None
                self._attributes = side_effects.plain_attributes(module)
                # now: the unit may change a list that it is given
                identities = side_effects.argument_identities(args, kwargs)
                self._arguments = (*self.builder.with_nodes((args, kwargs)), identities)
                self._given_to_unit = args, kwargs  # which its own hooks may replace
                self._versions = [tensor._version for tensor in tensors(args, kwargs)]
                self.builder.hidden.enter(tree_flatten((args, kwargs))[0])
            self._running.append(name)

        return hook

    def _post_hook(self, name: str) -> Any:
        def hook(module: nn.Module, _: Any, __: Any, result: Any) -> None:
            form = _form(result) if self._call else ()
            self._running.pop()
            if self._running:
                return
            args, kwargs = self._given_to_unit
            if name not in self._called:
                self._called.append(name)
            args_before, kwargs_before, identities = self._arguments
            if side_effects.argument_identities(args, kwargs) != identities:
                raise RecordError(
                    f"its {name} changes an object, list or dict that it is given, which exists "
                    "only while the forward is recorded",
                    "a block that returns what it computed",
                )
            self.builder.check_used(name, tensors(result))
            self._pass_size_on((args, kwargs), result)
            node = Node("unit", name, args_before, kwargs_before)
            node.has_parameters = next(module.parameters(), None) is not None
            node.checkpointed = self._checkpoint_depth > 0
            node.checkpoints_inside = self._checkpoints_inside
            node.gradients_inside = self._gradients_inside
            node.once = self._once(module, args, kwargs)
            given = [(tensor, tensor._version) for tensor in tensors(args, kwargs)]
            self._given.append((node, given))
            if self._call and not (node.once or self._checkpoints_inside or self._gradients_inside):
                self._like.setdefault(self._call, (*form, self._random))
            self._on_cpu = False
            self.builder.add_call(node, result, self._random)

        return hook

    def _once(self, module: nn.Module, args: Any, kwargs: Any) -> str:
        """Why a unit that has run gives another result when it is computed again; "" = it does not."""
        if self._rng.used_since_last_check():  # a unit may draw: it runs in each step
            return "draws random numbers of Python or numpy, which differ the second time"
        if self._own_generator:
            return "draws from a torch.Generator of its own, which goes on the second time"
        if self._versions != [tensor._version for tensor in tensors(args, kwargs)]:
            return "changes a tensor that it is given in place"
        now = side_effects.plain_attributes(module)
        for name, value in self._attributes.items():
            if name in now and now[name] != value:
                return f"changes self.{name}"
        return ""

    @contextmanager
    def _quick(self, module: nn.Module) -> Iterator[None]:
        """Within it, a unit does not run again if an equal one has run, and one that fails on meta
        tensors runs on the CPU to find output shapes."""
        forward, own = module.forward, vars(module).get("forward")

        def quick(*args: Any, **kwargs: Any) -> Any:
            outermost = len(self._running) == 1
            call = equal_units.call_key(module, args, kwargs) if outermost else None
            if call in self._like:
                shape, strides, dtype, wants_gradient, random = self._like[call]
                self._random |= random
                result = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                others = wanted(module, args, kwargs)
                return DependsOn.apply(result, *others) if wants_gradient else result
            try:
                result = forward(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error).lower():
                    raise
                self._on_cpu = True
                if own is None:
                    vars(module).pop("forward", None)
                depth = len(self._running)
                result = run_on_cpu(module, args, kwargs, self._sized_by_values)
                del self._running[depth:]  # of a repeated call that raised
                return result
            if call and equal_units.is_new(result, args, kwargs):
                self._call = call
            return result

        module.forward = quick
        try:
            yield
        finally:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own

    # --- torch.utils.checkpoint and torch.autograd.Function ------------------------------------

    def _change_checkpoint_depth(self, change: int) -> None:
        self._checkpoint_depth += change
        self._checkpoints_inside |= bool(self._running)

    def _custom_function(self, kind: Any, call: Any, args: tuple[Any, ...]) -> Any:
        """Record a torch.autograd.Function as one call, since it defines its own backward."""
        if self._running:
            return call(*args)
        arguments = self.builder.with_nodes(args)
        self.builder.hidden.enter(args)
        self._running.append(kind.__name__)
        try:
            result = call(*args)
        finally:
            self._running.pop()

        def apply(*real: Any) -> Any:
            return kind.apply(*real)

        # random: whether it draws is unknown, so no other stage recomputes it
        self.builder.add_call(Node("function", apply, arguments, {}), result, random=True)
        return result


def _check_dtypes(unit: str, name: str, used: Sequence[Tensor]) -> None:
    """Raise RecordError for a product of tensors of two dtypes: on meta it has a result."""
    if name in _PRODUCTS and len(dtypes := {tensor.dtype for tensor in used}) > 1:
        shown = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise RecordError(
            f"its {unit} calls {name} with {shown} tensors: weights are fp32 here, and computed with "
            "in the dtype of `precision`",
            "a block that casts nothing to a dtype of its own",
        )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
