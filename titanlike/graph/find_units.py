"""Find a model's units: the modules that are never cut, by how modules are nested.

The entries of containers (ModuleList, ModuleDict, Sequential) are the blocks, wherever in the
model the containers are. A module that contains a container is expanded into its children, until
only modules without one are left: embedding, layers.0, layers.1, ..., norm, head. A block is one
unit even if it has containers inside, unless a split point names a module in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from titanlike.graph.unit import Unit

# If more modules than this (and more than there are blocks) are in no container, all are blocks.
MAX_MODULES_BESIDE_BLOCKS = 6
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(model: nn.Module, points: Sequence[str] = ()) -> list[Unit]:
    """The model's units in registration order, which may differ from execution order.

    points: modules where a stage begins, which must therefore not be inside a unit.
    """
    found = list(_expand(model, "", tuple(points)))
    with_weights = [unit for unit in found if [*model.get_submodule(unit.name).parameters()]]
    blocks = sum(unit.block for unit in with_weights)
    if len(with_weights) - blocks > max(MAX_MODULES_BESIDE_BLOCKS, blocks):
        return [unit._replace(block=True) for unit in found]
    return found


def _expand(module: nn.Module, path: str, points: tuple[str, ...]) -> Iterator[Unit]:
    in_container = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        name = f"{path}{name}"
        if _is_expanded(child, name, in_container, points):
            yield from _expand(child, f"{name}.", points)
        else:
            yield Unit(name, block=in_container)


def _is_expanded(module: nn.Module, name: str, in_container: bool, points: tuple[str, ...]) -> bool:
    """Whether a module is not a unit itself but its children are looked at."""
    if any(point.startswith(f"{name}.") for point in points):
        return True
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True  # has no forward
    if in_container:
        return False  # a block
    return any(isinstance(part, _CONTAINERS) for part in module.modules())
