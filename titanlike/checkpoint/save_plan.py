"""Which rank writes which piece of which tensor: planned by DCP once, and remembered for later saves.

DCP's plan of a save goes from all ranks to rank 0 and back, which takes rank 0 a third of a minute
for 1,024 ranks with a few hundred tensors each. The plan depends on names, shapes and layout alone:
as long as these are the same on every rank, each goes on with its own part of the last plan, and
rank 0 with the `.metadata` that it has written.

torch's planner can remember plans, too (`enable_plan_caching`), but in attributes of the class: two
runs in one process, as in a sweep, would write by each other's plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from titanlike.torch_private.distributed_checkpoint import Blocks
from titanlike.torch_private.dtensor import local

Tensors = Mapping[str, Tensor | Blocks]


@dataclass
class Plan:
    """The plan of a save that succeeded."""

    signature: list[Any]  # of this rank's tensors: what the plan depends on
    own: SavePlan = field(default_factory=lambda: SavePlan([]))  # what this rank writes
    ends: list[int] = field(default_factory=list)  # of the pieces in this rank's file
    metadata: bytes = b""  # on rank 0: the file


class SavePlanner(DefaultSavePlanner):
    """Plans one save; collective. `plan` is to be remembered when the save has succeeded."""

    def __init__(
        self, tensors: Tensors, last: Plan | None, group: dist.ProcessGroup | None
    ) -> None:
        """last: the plan of the save before, None where it is not to be used again."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        signature = _signature(tensors)
        unchanged = last is not None and last.signature == signature
        self.known = _all_agree(unchanged, group)
        if self.known:
            assert last is not None
            self.kept, items = last, last.own.items
        else:
            coordinator = group is None or dist.get_rank(group) == 0
            self._local = create_default_local_save_plan(dict(tensors), coordinator)
            self.kept, items = Plan(signature), self._local.items
        # what this rank may write: a copy may take their place before it does
        self.pieces = {item.index: _piece(tensors[item.index.fqn], item.index) for item in items}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """The tensors are known already."""

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([]) if self.known else self._local
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.known:
            return all_plans, Metadata({})  # rank 0 writes the file that it has
        plans, metadata = super().create_global_plan(all_plans)
        # as torch's planner writes it for a state dict without nesting: its converters need it
        metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self.known:
            self.kept.own = new_plan
        self.plan = self.kept.own
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index]


def _piece(tensor: Tensor | Blocks, index: MetadataIndex) -> Tensor:
    if isinstance(tensor, Blocks):
        assert index.offset is not None
        return tensor.blocks[index.offset]
    return local(tensor)


def _signature(tensors: Tensors) -> list[Any]:
    """What a plan depends on."""
    found: list[Any] = []
    for name, tensor in tensors.items():
        layout: Any = None
        if isinstance(tensor, DTensor):
            layout = tensor.device_mesh, tensor.placements
        elif isinstance(tensor, Blocks):
            layout = [(offsets, block.shape) for offsets, block in tensor.blocks.items()]
        found.append((name, tensor.shape, tensor.dtype, layout))
    return found


def _all_agree(vote: bool, group: dist.ProcessGroup | None) -> bool:
    votes = torch.tensor(int(vote))
    if group is not None:
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
    return bool(votes)
