"""precision=float8 and mxfp8: which linear layers, in the blocks of a model on meta, use them.

A `Float8Linear` (`float8_linear.py`) keeps its name and its fp32 weight. It scales its input, its
weight and its output's gradient to fill the range of float8 (dynamic scales), and multiplies those;
results are bf16, as between such layers. In bf16 stay layers outside of blocks (embedding, head),
tied weights, sizes that gain nothing, and routers of experts: rounding chooses others.

Idea: https://arxiv.org/abs/2209.05433, and https://github.com/pytorch/ao for training.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch
from torch import nn

from titanlike.core.config.errors import ConfigError, Problem, nearest
from titanlike.core.config.groups.computation import Mxfp8Precision, ScaledPrecision
from titanlike.core.config.imports import quiet_import
from titanlike.core.config.schema import Config
from titanlike.core.device.accelerator import multiplies_float8
from titanlike.core.device.choose import first_device
from titanlike.core.distributed.collectives import GroupInfo
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.placement import PRODUCT, Placement, experts_of, in_float8
from titanlike.core.distributed.transform import Plan, Transform
from titanlike.core.graph.units import find_units
from titanlike.core.torch_private.known_code import own_code

_BF16 = "precision=bf16"
_NAMES = ("torchao", "torchao.float8")


@dataclass(frozen=True)
class Float8Layers:
    """What `use_float8` did, for the opening table."""

    count: int  # linear layers in float8
    of: int  # linear layers of the model
    experts: int  # modules of routed experts in float8
    of_experts: int
    # linear layers, and experts: rounded to float8, and multiplied in fp32
    emulated: bool
    emulated_experts: bool


def use_float8(model: nn.Module, config: Config, device: torch.device) -> Float8Layers | None:
    """Replace linear layers of a model in place, if `precision` is float8 or mxfp8.

    device: where it will compute. Raises ConfigError if torchao is missing, a pattern of
    `precision.skip` matches no layer, or no layer is left.
    """
    settings = config.precision
    if not isinstance(settings, ScaledPrecision):
        return None
    torchao = _import_torchao(settings.name)
    chosen = _choose(model, settings)
    in_blocks = isinstance(settings, Mxfp8Precision)
    emulated = not multiplies_float8(device, in_blocks=in_blocks)
    from titanlike.techniques.low_precision.float8_linear import convert

    name = settings.recipe
    if in_blocks:
        name = "rowwise" if settings.weight_gradients else "rowwise_with_gw_hp"
    recipe = torchao.Float8LinearConfig.from_recipe_name(name)
    if in_blocks:
        from titanlike.techniques.low_precision.mxfp8 import BlockConfig

        recipe = BlockConfig(**vars(recipe))
    recipe = replace(recipe, emulate=emulated)
    experts = experts_of(model)
    for name in chosen - experts.keys():
        convert(model.get_submodule(name), recipe)
    kernels = False
    if in_float8_too := chosen & experts.keys():
        from titanlike.techniques.low_precision.float8_experts import Product

        kernels = multiplies_float8(device, grouped=True)
        for name in in_float8_too:
            multiply = Product(experts[name], settings.weight_gradients, kernels)
            vars(experts[name])[PRODUCT] = multiply
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    counts = len(chosen) - len(in_float8_too), linear, len(in_float8_too), len(experts)
    return Float8Layers(*counts, emulated, bool(in_float8_too) and not kernels)


class Float8(Transform):
    def __init__(self, config: Config, model: nn.Module) -> None:
        """model: on meta, changed in place. Raises ConfigError as `use_float8`."""
        self._config, self._device = config, first_device(config.device)
        self.layers = use_float8(model, config, self._device)

    def describe(self, plan: Any) -> Iterator[tuple[str, str]]:
        layers, precision = self.layers, self._config.precision
        assert layers is not None and isinstance(precision, ScaledPrecision)
        text = f"bf16, and {layers.count} of {layers.of} linear layers"
        if layers.of_experts:
            text += f" and {layers.experts} of {layers.of_experts} modules of experts"
        text += f" in {precision.name} ({precision.recipe})"
        what = precision.name.replace("mxfp8", "MXFP8")
        emulated = "; {}emulated, which is slower: this device has no {} matrix products"
        if layers.emulated:
            text += emulated.format("both " * layers.emulated_experts, what)
            if what == "MXFP8" and multiplies_float8(self._device):
                text += ", but those of precision=float8"
        elif layers.emulated_experts:
            text += emulated.format("experts ", "grouped float8")
        yield "precision", text

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        use_float8(model, self._config, self._device)

    # --- weights are cast once a step, if they are not sharded or FSDP gathers them in float8

    def open(self, mesh: Mesh, plan: Plan) -> None:
        self._shards: GroupInfo | None = None
        self._layers: list[Any] = []
        self._products: list[Any] = []  # of experts
        self._tokens = plan.transforms["cp"].ranks if "cp" in plan.transforms else None
        if self._config.shards > 1:  # only their number is used
            group = mesh.axes.get_group("shard")
            self._shards = GroupInfo(self._config.shards, 0, group)

    def on_weights(self, stage: nn.Module) -> None:
        layers: list[Any] = [module for module in stage.modules() if in_float8(module)]
        for layer in layers:
            layer.tokens = self._tokens
        if self._config.fsdp.cpu_offload:  # shards are on the CPU, and cast on the device
            return
        if self._shards is not None:
            layers = [layer for layer in layers if layer.gather_in_float8()]
        self._layers += layers
        products = [vars(m)[PRODUCT] for m in experts_of(stage).values() if PRODUCT in vars(m)]
        for multiply in products:
            multiply.gather_casts()
        self._products += products

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        try:
            if self._layers:
                from titanlike.techniques.low_precision.float8_linear import cast_weights

                cast_weights(self._layers, self._shards)
            for multiply in self._products:
                multiply.cast_weights()
            yield
        finally:
            for casting in (*self._layers, *self._products):
                casting.drop_casts()

    def in_one_process(self, model: nn.Module) -> None:
        use_float8(model, self._config, self._device)


def _import_torchao(name: str) -> ModuleType:
    """Import torchao.float8. Raises ConfigError."""
    try:
        with quiet_import():
            import torchao.float8

            if name == "mxfp8":
                import titanlike.techniques.low_precision.mxfp8  # noqa: F401
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in _NAMES
        reason = "torchao is not installed" if missing else f"importing torchao failed: {error}"
        fix = f"pip install 'titanlike[float8]', or {_BF16}"
        raise ConfigError([Problem("precision", name, reason, fix)]) from None
    return torchao.float8


def _choose(model: nn.Module, settings: ScaledPrecision) -> set[str]:
    """The names of the layers to compute in float8. Raises ConfigError."""
    units = find_units(model)
    blocks = tuple(f"{unit.name}." for unit in units if unit.block)
    # in a plain chain every layer is a block; the last is the head
    alone = {unit.name for unit in units[:-1] if unit.block}
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    linear = {name: module for name, module in model.named_modules() if _is_plain(module)}
    routers = _routers(model)
    matrices: dict[str, tuple[int, ...]] = {
        name: (module.in_features, module.out_features)
        for name, module in linear.items()
        if names[id(module.weight)] == 1 and name not in routers
    }
    in_blocks = isinstance(settings, Mxfp8Precision)
    for name, experts in experts_of(model).items():
        if hasattr(experts, PRODUCT) and not in_blocks:
            linear[name] = experts
            matrices[name] = tuple(n for p in experts.parameters() for n in p.shape[1:])
    multiple = 32 if in_blocks else 16  # kernels need both sides of a matrix to be multiples of it
    # name -> the shortest side of its matrices
    sizes = {
        name: min(sides)
        for name, sides in matrices.items()
        if (name.startswith(blocks) or name in alone) and not any(n % multiple for n in sides)
    }
    fit = {name for name, size in sizes.items() if size >= settings.min_features}
    chosen = {n for n in fit if not any(fnmatchcase(n, pattern) for pattern in settings.skip)}
    problems = [*_skip_problems(settings.skip, linear)]
    if not sizes:
        what = f"no linear layers (torch.nn.Linear) of sizes divisible by {multiple}"
        reason = f"there are {what} in the model's blocks"
        problems.append(Problem("precision", settings.name, reason, _BF16))
    elif not fit:
        least = max(sizes.values())
        reason = f"no linear layer has so many inputs and outputs; the largest has {least}"
        fix = f"precision.min_features={least}"
        key = "precision.min_features"
        problems.append(Problem(key, settings.min_features, reason, fix))
    elif not chosen:
        reason = "leaves no linear layer for float8"
        problems.append(Problem("precision.skip", settings.skip, reason, "precision.skip=[]"))
    if problems:
        raise ConfigError(problems)
    return chosen


def _routers(model: nn.Module) -> set[str]:
    """Names of the linear layers beside experts, stacked or in a list, with an output for each: in
    the module that has the experts, or the list or stack of them, or one that has this module."""
    routers = set()

    def counts_in(module: nn.Module) -> set[int]:
        if isinstance(module, nn.ModuleList):
            return {len(module)}
        kernels = hasattr(module, "kernel_size")  # a convolution's weight has three dimensions, too
        return {len(p) for p in module.parameters(recurse=False) if p.dim() == 3 and not kernels}

    for path, holder in model.named_modules():
        own = counts_in(holder) if not isinstance(holder, nn.ModuleList) else set[int]()
        for name, child in (("", None), *holder.named_children()):
            counts = (
                own if child is None else counts_in(child).union(*map(counts_in, child.children()))
            )
            for other, layer in holder.named_modules() if counts else ():
                beside = not name or not f"{other}.".startswith(f"{name}.")
                if beside and getattr(layer, "out_features", 0) in counts:
                    routers.add(f"{path}.{other}".lstrip("."))
    return routers


def _skip_problems(skip: Sequence[str], linear: Collection[str]) -> Iterator[Problem]:
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in linear):
            near = nearest(pattern, linear)
            others = [other for other in skip if other != pattern]
            fix = f"precision.skip=[{','.join([*others, *([near] if near else [])])}]"
            reason = "the model has no linear layer of this name"
            yield Problem("precision.skip", pattern, reason, fix)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is an unmodified torch.nn.Linear: a replacement would lose modifications."""
    return type(module) is nn.Linear and not own_code(module, nn.Linear)
