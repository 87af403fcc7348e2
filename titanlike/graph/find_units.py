"""A model's units: the modules that are never cut, found by how they are nested.

The entries of the lists of modules (ModuleList, ModuleDict, Sequential) are the blocks, wherever
in the model the lists are; what is beside and above the lists is taken apart until only modules
without a list are left: embedding, layers.0, layers.1, ..., norm, head. A block is one unit even
where it has lists inside, unless a split point names something in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from titanlike.graph.unit import Unit

MOST_AROUND = 6  # modules around the blocks; with more (and more than blocks) each counts as one
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(model: nn.Module, points: Sequence[str] = ()) -> list[Unit]:
    """The model's units in the order of registration (the order in which they run may differ).

    points: modules where a stage is to begin, which must not be inside of a unit.
    """
    found = list(_inside(model, "", tuple(points)))
    weighing = [
        u for u in found if next(model.get_submodule(u.name).parameters(), None) is not None
    ]
    inside = sum(unit.block for unit in weighing)
    if len(weighing) - inside > max(MOST_AROUND, inside):
        return [unit._replace(block=True) for unit in found]
    return found


def _inside(module: nn.Module, path: str, points: tuple[str, ...]) -> Iterator[Unit]:
    listed = isinstance(module, _LISTS)
    for name, child in module.named_children():
        name = f"{path}{name}"
        if _open(child, name, listed, points):
            yield from _inside(child, f"{name}.", points)
        else:
            yield Unit(name, block=listed)


def _open(module: nn.Module, name: str, listed: bool, points: tuple[str, ...]) -> bool:
    """Whether a module is no unit, but has some."""
    if any(point.startswith(f"{name}.") for point in points):
        return True
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True  # has no forward of its own
    if listed:
        return False  # a block
    return any(isinstance(part, _LISTS) for part in module.modules())
