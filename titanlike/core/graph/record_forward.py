"""Record a model's forward as a graph by running it once on meta tensors.

The model is any `nn.Module`. Each unit (see `units.py`) runs as it is and becomes one node.
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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import titanlike
from titanlike.core.device.accelerator import KINDS
from titanlike.core.graph import side_effects
from titanlike.core.graph.recording import (
    Node,
    RecordError,
    Recording,
    RecordingBuilder,
    tensors,
    tree_flatten,
)
from titanlike.core.graph.units import (
    MODELS,
    call_key,
    depends_on,
    is_divided,
    is_new,
    run_on_cpu,
)
from titanlike.core.torch_private.autograd import intercept_checkpoints, intercept_custom_functions
from titanlike.core.torch_private.deferred_dynamo import force_eager

# Prefixes of functions that draw random numbers: called twice they return different tensors.
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "exponential_")
_RANDOM += ("uniform_", "cauchy_", "geometric_", "log_normal_", "rrelu", "gumbel_softmax")
# Calls that have side effects and return no tensor: a stage's generated forward would omit them.
_NOT_REPLAYED = ("register_hook", "retain_grad", "backward", "register_post_accumulate_grad_hook")
_TAKE_GRADIENTS = (torch.autograd.grad, Tensor.backward)
_READS_VALUES = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
_DEVICE_PROPERTIES: dict[str, Any] = {  # tensor property -> its value, from the run's device type
    "device": lambda device: device,
    **{f"is_{kind}": lambda device, kind=kind: device.type == kind for kind in KINDS},
}
_MODELS = tuple(
    str(Path(titanlike.__file__).parents[1].joinpath(*package.split("."))) for package in MODELS
)
_TENSOR_PROPERTIES = ("T", "H", "mT", "mH", "data", "real", "imag")  # properties that give a tensor


def record_forward(
    model: nn.Module,
    batch: dict[str, Tensor],
    units: Sequence[str],
    device: str = "cpu",
    buffers: Callable[[], Mapping[str, Tensor]] = dict,
) -> Recording:
    """Run `model(inputs, **others)` once on the meta device and record it.

    batch: meta tensors of one microbatch: "inputs" and the model's other arguments; units: names of
    the modules that become one node each; device: type of the run's device, which the forward sees
    instead of meta; buffers: returns the model's buffers, whose values the forward may read. Raises
    RecordError if the forward depends on values of tensors, or uses tensors of unknown origin.
    """
    others = {name: tensor for name, tensor in batch.items() if name != "inputs"}
    first = (batch["inputs"],) if "inputs" in batch else ()

    def record() -> Recording:
        interceptor = _Interceptor(model, units, device, buffers)
        for name, tensor in batch.items():
            interceptor.builder.add(Node("input", name, value=tensor))
        with side_effects.restored(model, units), interceptor.active():
            return interceptor.finish(model(*first, **others))

    try:
        return record()
    except (RuntimeError, NotImplementedError) as error:
        from titanlike.core.torch_private.compiler import as_if_compiling

        # torch.compile cannot read values either, so a library may have a forward for it
        with contextlib.suppress(Exception), as_if_compiling():
            return record()
        if "meta" not in str(error).lower():
            raise
        raise RecordError(
            f"its forward reads the values of tensors ({_users_line(error)}), so the operations "
            "it runs are not known in advance",
            "torch.where instead of `if tensor:`, shapes instead of .item() and .tolist(), masks "
            "instead of boolean indices; or these lines inside a block: blocks run as they are",
        ) from error


def _users_line(error: BaseException) -> str:
    """`file.py:12: code` of the innermost line that is neither torch's nor titanlike's."""
    own_code = tuple(
        f"{Path(file).parent}{os.sep}" for file in (torch.__file__, titanlike.__file__)
    )
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((*own_code, "<"))]
    models = [frame for frame in frames if frame.filename.startswith(_MODELS)]
    if not (named := users or models):
        return str(error).strip().splitlines()[0]
    return f"{named[-1].filename}:{named[-1].lineno}: {named[-1].line}"


@dataclass
class _Call:
    """A running call of a unit or of a torch.autograd.Function."""

    name: str
    node: Node  # its node in the recording
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    # snapshot at its beginning: ids of arguments, versions of tensors among them, the unit's plain
    # attributes
    identities: Sequence[Any] = ()
    versions: Sequence[int] = ()
    attributes: Mapping[str, Any] | None = None
    depth: int = 1  # 1 + the number of running calls of units inside of it
    on_cpu: bool = False  # runs on the CPU because it fails on meta tensors
    key: Hashable = None  # equal for units with equal results; None = not known


class _Interceptor(TorchFunctionMode):
    """Intercepts torch functions, units, custom autograd functions and checkpointing."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[str],
        device: str,
        buffers: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        super().__init__()
        self._model, self._units = model, list(units)
        self._device, self._buffers = torch.device(device), buffers
        self.builder = RecordingBuilder(model)
        self._call: _Call | None = None  # the outermost running call
        self._checkpoints = 0  # the number of running torch.utils.checkpoint calls
        self._rng = side_effects.rng_state()
        # key of a unit's call -> the result's shape, strides, dtype, whether it has a gradient, whether
        # the call drew random numbers
        self._results: dict[Hashable, tuple[Any, ...]] = {}
        self._sized_by_values: list[Tensor] = []
        # (unit, its tensor arguments and their versions after the call)
        self._given: list[tuple[Node, list[tuple[Tensor, int]]]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self._units:
                module = self._model.get_submodule(name)
                # before tensor parallelism's collectives, which are part of the unit; after the
                # model's own hooks, which may drop arguments
                first = is_divided(module)
                # functions, as copying a module copies bound methods
                before = module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: self._before_unit(
                        name, module, args, kwargs
                    ),
                    with_kwargs=True,
                    prepend=first,
                )
                after = module.register_forward_hook(lambda *call: self._after_unit(*call))
                stack.callback(before.remove)
                stack.callback(after.remove)
                stack.enter_context(self._shortened(module))
            stack.enter_context(torch.enable_grad())
            # compiled modules and functions are recorded uncompiled
            stack.enter_context(force_eager())
            stack.enter_context(intercept_checkpoints(self._change_checkpoints))
            stack.enter_context(intercept_custom_functions(self._custom_function))
            stack.enter_context(self)
            # entered last: factory functions then reach the interceptor with device=meta
            stack.enter_context(torch.device("meta"))
            yield

    def finish(self, output: Any) -> Recording:
        self._check_rng()
        recording = self.builder.finish(self.builder.with_nodes(output))
        for node, given in self._given:
            if any(tensor._version != version for tensor, version in given):
                node.once = node.once or "is given a tensor that is later changed in place"
        sized = {id(tensor) for tensor in self._sized_by_values}
        for node in recording.nodes:
            node.sized_by_values = id(node.value) in sized
        return recording

    # --- torch functions -----------------------------------------------------------------------

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call, kwargs = self._call, kwargs or {}
        name = getattr(function, "__name__", "")
        accessed = ""  # attribute read by a getter
        if name == "__get__":
            accessed = getattr(getattr(function, "__self__", None), "__name__", "")
        if call is None or not call.on_cpu:
            if accessed in _DEVICE_PROPERTIES and args[0].is_meta:
                return _DEVICE_PROPERTIES[accessed](self._device)
            args, kwargs = self._on_meta(name, args, kwargs)
        side_effects.check_running_statistics(name, args, kwargs)
        draws = name.startswith(_RANDOM) or "dropout" in name
        off = kwargs.get("training", True) is False or ("dropout" in name and kwargs.get("p") == 0)
        random = draws and not off
        if call is not None:
            call.node.random |= random
            call.node.gradients_inside |= function in _TAKE_GRADIENTS
            if isinstance(kwargs.get("generator"), torch.Generator):
                once = "draws from a torch.Generator of its own, which goes on the second time"
                call.node.once = once
            return self._run_in_unit(call, function, name, args, kwargs)
        if name in _READS_VALUES:
            value = self.builder.constant(args[0], self._buffers)
            if value is not None:  # depends only on sizes and buffers: the same in each step
                return getattr(value, name)(*args[1:], **kwargs)
        if name in _NOT_REPLAYED:
            raise RecordError(
                f"its forward calls {name} between its modules, which stages do not replay",
                "it inside a block",
            )
        recorded = name != "__get__" or accessed in _TENSOR_PROPERTIES
        # read before the call, which may change its arguments in place
        arguments: Any = self.builder.with_nodes((args, kwargs)) if recorded else None
        result = function(*args, **kwargs)
        self._pass_size_on((args, kwargs), result)
        if recorded and (tensors(result) or name == "__setitem__"):
            node = Node("function", function, *arguments)
            node.random = random
            if name == "__get__":  # generated code calls getattr(x, "T") for x.T
                node = Node("function", getattr, (arguments[0][0], accessed))
            self.builder.add_call(node, result)
        return result

    def _run_in_unit(self, call: _Call, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run a torch function that a unit calls, and check which tensors it uses."""
        if call.on_cpu:  # by `run_on_cpu`: tensors that the graph does not know
            return function(*args, **kwargs)
        if torch.is_autocast_enabled(self._device.type) and name != "__get__":  # an attribute
            raise NotImplementedError("meta tensors have no autocast")  # so it runs on the CPU
        used = tensors(*args, *kwargs.values())
        self.builder.check_used(call.name, used)
        if name in _PRODUCTS and len(dtypes := {tensor.dtype for tensor in used}) > 1:
            shown = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise RecordError(  # on meta the call would succeed
                f"its {call.name} calls {name} with {shown} tensors: weights are fp32 here, and "
                "computed with in the dtype of `precision`",
                "a block that casts nothing to a dtype of its own",
            )
        result = function(*args, **kwargs)
        self.builder.add_inside(call.name, name, used, result)
        return result

    def _on_meta(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace the run's device by meta in a call's arguments."""

        def is_device(value: Any) -> bool:
            named = isinstance(value, torch.device) and value.type == self._device.type
            return named or (isinstance(value, str) and value.split(":")[0] == self._device.type)

        if is_device(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if name in ("to", "empty_like", "type") or torch.device in map(type, args):
            args = tuple(torch.device("meta") if is_device(value) else value for value in args)
        return args, kwargs

    def _pass_size_on(self, given: Any, result: Any) -> None:
        """Mark results that have as many rows as an argument whose size depends on values."""
        # only shapes are read here: other methods of a tensor would be recorded
        if not self._sized_by_values:
            return
        sized = {id(tensor) for tensor in self._sized_by_values}
        rows = {tensor.shape[:1] for tensor in tensors(given) if id(tensor) in sized}
        for tensor in tensors(result):
            if tensor.shape and tensor.shape[:1] in rows and id(tensor) not in sized:
                self._sized_by_values.append(tensor)

    def _drew_numbers(self) -> bool:
        """Whether generators of Python or numpy were used since the last call."""
        before, self._rng = self._rng, side_effects.rng_state()
        return before != self._rng

    def _check_rng(self) -> None:
        if self._drew_numbers():
            raise RecordError(
                "its forward draws random numbers of Python or numpy between its modules, which "
                "would be the same in all steps",
                "torch.rand, or draw inside a block",
            )

    # --- units ---------------------------------------------------------------------------------

    def _before_unit(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._call is not None:
            self._call.depth += 1
            return
        self._check_rng()
        node = Node("unit", name, *self.builder.with_nodes((args, kwargs)))
        self._call = _Call(
            *(name, node, args, kwargs),  # its own hooks may replace these later
            # detects whether the unit changes a list among its arguments
            identities=side_effects.argument_identities(args, kwargs),
            versions=[tensor._version for tensor in tensors(args, kwargs)],
            attributes=side_effects.plain_attributes(module),
        )
        self.builder.enter(*tree_flatten((args, kwargs))[0])

    def _after_unit(self, module: nn.Module, _: Any, result: Any) -> None:
        call = self._call
        assert call is not None
        call.depth -= 1
        if call.depth:
            return
        node, given = call.node, tensors(call.args, call.kwargs)
        if side_effects.argument_identities(call.args, call.kwargs) != call.identities:
            raise RecordError(
                f"its {call.name} changes an object, list or dict that it is given, which exists "
                "only while the forward is recorded",
                "a block that returns what it computed",
            )
        self.builder.check_used(call.name, tensors(result))
        self._pass_size_on((call.args, call.kwargs), result)
        node.has_parameters = next(module.parameters(), None) is not None
        node.checkpointed = self._checkpoints > 0
        assert call.attributes is not None
        changed = side_effects.changed_attributes(call.attributes, module)
        if self._drew_numbers():  # allowed in a unit, which runs in each step
            node.once = "draws random numbers of Python or numpy, which differ the second time"
        elif not node.once and call.versions != [tensor._version for tensor in given]:
            node.once = "changes a tensor that it is given in place"
        elif not node.once and changed:
            node.once = f"changes self.{changed[0]}"
        self._given.append((node, [(tensor, tensor._version) for tensor in given]))
        if call.key and not (node.once or node.checkpoints_inside or node.gradients_inside):
            form = result.shape, result.stride(), result.dtype, result.requires_grad
            self._results.setdefault(call.key, (*form, node.random))
        self._call = None
        self.builder.add_call(node, result)

    @contextmanager
    def _shortened(self, module: nn.Module) -> Iterator[None]:
        """A context in which a unit is not run again if an equal one has run, and a unit that fails
        on meta tensors runs on the CPU to find output shapes."""
        forward, saved = module.forward, vars(module).get("forward")

        def restore() -> None:
            vars(module).pop("forward", None)
            if saved is not None:
                module.forward = saved

        def shortened(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            assert call is not None
            key = call_key(module, args, kwargs) if call.depth == 1 else None
            if key in self._results:
                shape, strides, dtype, wants_gradient, random = self._results[key]
                call.node.random |= random
                result = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                return depends_on(result, module, args, kwargs) if wants_gradient else result
            try:
                result = forward(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error).lower():
                    raise
                call.on_cpu, depth = True, call.depth
                restore()  # `run_on_cpu` copies the unit
                result = run_on_cpu(module, args, kwargs, self._sized_by_values)
                module.forward = shortened
                call.depth = depth  # a repeated call that raised has changed it
                return result
            if key and is_new(result, args, kwargs):
                call.key = key
            return result

        module.forward = shortened
        try:
            yield
        finally:
            restore()

    # --- torch.utils.checkpoint and torch.autograd.Function ------------------------------------

    def _change_checkpoints(self, change: int) -> None:
        self._checkpoints += change
        if self._call is not None:
            self._call.node.checkpoints_inside = True

    def _custom_function(self, kind: Any, call: Any, args: tuple[Any, ...]) -> Any:
        """Record a torch.autograd.Function as one call, since it defines its own backward."""
        if self._call is not None:
            return call(*args)

        def apply(*real: Any) -> Any:
            return kind.apply(*real)

        # random: whether it draws is unknown, so no other stage recomputes it
        node = Node("function", apply, self.builder.with_nodes(args), random=True)
        self.builder.enter(*args)
        self._call = _Call(kind.__name__, node)
        try:
            result = call(*args)
        finally:
            self._call = None
        self.builder.add_call(node, result)
        return result
