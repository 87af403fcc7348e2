"""A model as a chain of units, and stages cut out of it.

The chain is the model's children in the order of their registration, containers (ModuleDict,
ModuleList, Sequential) expanded by one level: embedding, layers.0, layers.1, ..., norm, head. Units
that come out of containers are the blocks. Names stay as they are in the whole model, so a
parameter is called the same whatever the split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from titanlike.pipeline.partition import Unit

_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


def chain(model: nn.Module) -> list[Unit]:
    """The model's units in the order in which they run."""
    units = []
    for name, child in model.named_children():
        if isinstance(child, _CONTAINERS):
            units += [Unit(f"{name}.{part}", block=True) for part, _ in child.named_children()]
        else:
            units.append(Unit(name, block=False))
    return units


def carve(model: nn.Module, keep: Sequence[str]) -> nn.Module:
    """Remove from `model`, in place, every unit that is not named in `keep`.

    A child becomes None, an entry of a ModuleDict disappears; the model's forward skips both.
    """
    keep = set(keep)
    for unit in chain(model):
        if unit.name in keep:
            continue
        parent, _, name = unit.name.rpartition(".")
        if not parent:
            setattr(model, name, None)
            continue
        container = model.get_submodule(parent)
        if not isinstance(container, nn.ModuleDict):
            raise ValueError(
                f"model: {parent} is a {type(container).__name__}, whose entries are renumbered "
                "when a stage drops some; write a ModuleDict with the keys '0', '1', ..."
            )
        del container[name]
    return model


def boundaries(model: nn.Module, starts: Sequence[str], example: Tensor) -> list[Tensor]:
    """What flows into each stage and out of the last one: meta tensors, one more than stages.

    model: the whole model on the meta device, in the dtype in which it computes; starts: the first
    unit of each stage; example: a microbatch of the model's input on the meta device. Costs one
    forward without data.
    """
    seen: list[Tensor] = [example]

    def record(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(torch.empty_like(args[0], memory_format=torch.contiguous_format))

    hooks = [model.get_submodule(name).register_forward_pre_hook(record) for name in starts[1:]]
    try:
        with torch.no_grad():
            output = model(example)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == len(starts), "every stage begins with a unit that runs once, in order"
    between = [tensor.requires_grad_() for tensor in seen[1:]]
    return [example, *between, torch.empty_like(output).requires_grad_()]


def gather_groups(units: Sequence[Unit]) -> list[list[str]]:
    """Names of what is gathered together: each block by itself, neighbours that are none (norm and
    head) as one."""
    groups: list[list[str]] = []
    for before, unit in zip([None, *units], units, strict=False):
        if before is not None and not unit.block and not before.block:
            groups[-1].append(unit.name)
        else:
            groups.append([unit.name])
    return groups
