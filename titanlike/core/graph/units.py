"""Find a model's units, the modules that are never cut, and what they return on meta."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlike.core.graph.recording import tensors, tree_flatten, tree_map
from titanlike.core.torch_private import tensors as torch_tree
from titanlike.core.torch_private.tensors import storage_id

# With more modules than this (and than blocks) outside of containers, all modules are blocks.
MAX_MODULES_BESIDE_BLOCKS = 6
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Unit(NamedTuple):
    """A module that is never cut, by its name in the model, such as "layers.3"."""

    name: str
    block: bool  # one of the repeated layers, which split=even and split.balance count


def find_units(model: nn.Module, points: Sequence[str] = ()) -> list[Unit]:
    """The model's units in registration order, which may differ from execution order.

    The entries of containers (ModuleList, ModuleDict, Sequential) are the blocks, wherever in the
    model the containers are. A module that contains a container is expanded into its children,
    until only modules without one are left: embedding, layers.0, layers.1, ..., norm, head. A block
    is one unit even if it has containers inside, unless a split point names a module in it.

    points: modules where a stage begins, which must therefore not be inside a unit.
    """
    units = list(_expand(model, "", tuple(points)))
    with_weights = [unit for unit in units if [*model.get_submodule(unit.name).parameters()]]
    blocks = sum(unit.block for unit in with_weights)
    if len(with_weights) - blocks > max(MAX_MODULES_BESIDE_BLOCKS, blocks):
        return [unit._replace(block=True) for unit in units]
    return units


def _expand(module: nn.Module, path: str, points: tuple[str, ...]) -> Iterator[Unit]:
    is_block = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        name = f"{path}{name}"
        expanded = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # containers without a forward
        if not expanded and not is_block:
            expanded = any(isinstance(part, _CONTAINERS) for part in child.modules())
        if expanded or any(point.startswith(f"{name}.") for point in points):
            yield from _expand(child, f"{name}.", points)
        else:
            yield Unit(name, is_block)


# --- equal units -------------------------------------------------------------------------------

# packages of the models that titanlike has
MODELS = ("titanlike.core.models.", "titanlike.techniques.mixture.", "titanlike.hf.")
_TORCHS = "torch.nn.modules."
# attributes that do not distinguish modules: how tp divides one is in its style, too
_AROUND = ("forward", "tp_gathers", "tp_divided")
_PLAIN = (bool, int, float, str, type(None))


def call_key(module: nn.Module, args: Any, kwargs: Any) -> Hashable | None:
    """A key that is equal for calls with equal results on meta; None if unknown.

    With it equal blocks of a model are recorded once: planning a 405B model (126 equal blocks)
    takes half the time. Only built-in blocks made of torch's modules qualify: their only state is
    parameters, while a custom block may count its calls or cache a tensor.
    """
    if not type(module).__module__.startswith(MODELS):
        return None
    parts: list[Hashable] = [torch.is_grad_enabled()]
    for path, part in module.named_modules():
        styled = is_divided(part)  # its style is among its attributes, so equal ones are equal
        hooks = (part._forward_hooks or part._forward_pre_hooks) and not styled
        if not type(part).__module__.startswith((*MODELS, _TORCHS)) or (path and hooks):
            return None
        settings = [
            item for item in vars(part).items() if item[0][0] != "_" and item[0] not in _AROUND
        ]
        forward = vars(part).get("forward")
        plain = styled or forward is None or getattr(forward, "changes_nothing", False)
        values = (value if isinstance(value, tuple) else (value,) for _, value in settings)
        known = all(isinstance(part, _PLAIN) for value in values for part in value)
        if (path and not plain) or not known:
            return None
        # a buffer may carry state to the next call; those of a routed layer change once a step
        if part._buffers and not getattr(type(part), "token_wise", False):
            return None
        held = (*part._parameters.items(), *part._buffers.items())
        weights = [(name, None if tensor is None else _form(tensor)) for name, tensor in held]
        parts.append((path, type(part), tuple(settings), tuple(weights)))
    leaves, structure = torch_tree.tree_flatten((args, kwargs))
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    forms = [_form(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return (*parts, str(structure), tuple(forms))


def is_divided(module: nn.Module) -> bool:
    """Whether tensor parallelism has sharded a module, with hooks that are part of it."""
    return "tp_style" in vars(module)


def is_new(result: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result is a single tensor and not a view of an argument."""
    arguments = set(map(storage_id, tensors(args, kwargs)))
    return isinstance(result, Tensor) and storage_id(result) not in arguments


def _form(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


# --- units whose forward meta tensors cannot run -----------------------------------------------


def run_on_cpu(module: nn.Module, args: Any, kwargs: Any, sized_by_values: list[Tensor]) -> Any:
    """Call a copy of a meta module on the CPU: meta arguments in, meta results out.

    A mixture of experts, for example, branches on which tokens an expert gets. One unit at a time
    fits in memory; its weights are random, and only shapes and dtypes are used. Raises what the
    module raises. Results whose shape depends on values are added to `sized_by_values`.
    """
    real = copy.deepcopy(module).to_empty(device="cpu")

    def call(std: float) -> Any:
        """Call the module with random values of standard deviation `std`."""

        def to_cpu(leaf: Any) -> Any:
            if isinstance(leaf, torch.device) and leaf.type == "meta":
                return torch.device("cpu")
            if not isinstance(leaf, Tensor):
                return leaf
            tensor = _filled(torch.empty_like(leaf, device="cpu"), std)
            return tensor.requires_grad_(leaf.requires_grad)

        with torch.no_grad():
            for tensor in [*real.parameters(), *real.buffers()]:
                _filled(tensor, std)
            real_args, real_kwargs = tree_map((args, kwargs), to_cpu)
        return real(*real_args, **real_kwargs)

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        result = torch.empty_like(leaf, device="meta")
        return depends_on(result, module, args, kwargs) if leaf.requires_grad else result

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)  # only the CPU's: equal on all ranks
        result = tree_map(call(0.02), to_meta)
        uncertain = {id(tensor) for tensor in sized_by_values}
        arguments = tensors(args, kwargs)
        known_shapes = {tensor.shape for tensor in arguments if id(tensor) not in uncertain}
        unknown_shapes = {tensor.shape for tensor in arguments} - known_shapes
        results = tensors(result)
        if any(tensor.shape not in known_shapes for tensor in results):  # rarely: it runs again
            repeated = []
            for std in (1.0, 3.0):
                try:
                    repeated.append(tensors(call(std)))
                except (
                    Exception
                ):  # whatever a forward raises: of large numbers an index may be made
                    continue
            for tensor, *others in zip(results, *filter(None, repeated), strict=False):
                if tensor.shape in unknown_shapes or any(tensor.shape != x.shape for x in others):
                    sized_by_values.append(tensor)
    return result


def depends_on(tensor: Tensor, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """Return the tensor with an autograd history of a call's arguments and parameters."""
    arguments = tensors(*tree_flatten((args, kwargs))[0])
    sources = [other for other in [*arguments, *module.parameters()] if other.requires_grad]
    return DependsOn.apply(tensor, *sources)


class DependsOn(torch.autograd.Function):
    """The identity of `tensor`, with an autograd history of `others`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("a recorded forward has no backward")


def _filled(tensor: Tensor, std: float) -> Tensor:
    """Fill a tensor with values that most modules accept: random floats, index 0, True."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.normal_(0, std)
    return tensor.fill_(tensor.dtype == torch.bool)
