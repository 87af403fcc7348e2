"""One save on all ranks: planned by DCP once, then written by each rank and committed by rank 0.

DCP's plan of a save goes from all ranks to rank 0 and back, which takes rank 0 a third of a minute
for 1,024 ranks with a few hundred tensors each. The plan depends on names, shapes and layout alone:
as long as these are the same on every rank, each goes on with its own part of the last plan, and
rank 0 with the `.metadata` that it has written.

torch's planner can remember plans, too (`enable_plan_caching`), but in attributes of the class: two
runs in one process, as in a sweep, would write by each other's plans.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
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

from titanlike.checkpoint.integrity import (
    CHUNKS,
    METADATA,
    ChunkChecksums,
    DamagedCheckpoint,
    Manifest,
    check_sizes,
    checksum,
    commit,
    delete_checkpoint,
)
from titanlike.checkpoint.reader import error_line
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_file import WrittenFile, write_tensors
from titanlike.device.accelerator import set_device, started
from titanlike.torch_private.distributed_checkpoint import Blocks, describe_files
from titanlike.torch_private.dtensor import local

Tensors = Mapping[str, Tensor | Blocks]
WriteFile = Callable[[Storage, str, Iterable[Tensor]], WrittenFile]


@dataclass
class CachedSavePlan:
    """What a save that succeeded leaves to the next ones."""

    signature: list[Any]  # of this rank's tensors: what the plan depends on
    items: list[MetadataIndex] = field(default_factory=list)  # what this rank writes, in this order
    ends: list[int] = field(default_factory=list)  # of the chunks in this rank's file
    metadata: bytes = b""  # on rank 0: the file


@dataclass
class PreparedSave:
    """What this rank may write."""

    plan: CachedSavePlan  # to be kept when the save has succeeded
    tensors: dict[MetadataIndex, Tensor]  # copies may take their place before they are written
    local_plan: SavePlan | None  # None: every rank writes by its cached plan
    device: Any  # of this rank: a new thread has device 0


def prepare_save(
    tensors: Tensors, last: CachedSavePlan | None, group: dist.ProcessGroup | None
) -> PreparedSave:
    """Plan what this rank may write. Collective.

    last: the plan of the save before, None where it is not to be used again.
    """
    signature = _signature(tensors)
    unchanged = torch.tensor(int(last is not None and last.signature == signature))
    if group is not None:
        dist.all_reduce(unchanged, dist.ReduceOp.MIN, group=group)
    if unchanged and last is not None:
        plan, local_plan, items = last, None, last.items
    else:
        plan = CachedSavePlan(signature)
        local_plan = create_default_local_save_plan(dict(tensors), _rank(group) == 0)
        items = [item.index for item in local_plan.items]
    chunks = {item: _chunk(tensors[item.fqn], item) for item in items}
    return PreparedSave(plan, chunks, local_plan, started())


def write_checkpoint(
    folder: Storage,
    state: dict[str, Any],
    save: PreparedSave,
    group: dist.ProcessGroup | None,
    write_file: WriteFile = write_tensors,
) -> Manifest | None:
    """Write a checkpoint and commit it; on rank 0 its files. Collective.

    state: for state.json. A save that fails on any rank fails on all: raises OSError.
    """
    if save.device is not None:
        set_device(save.device)
    rank, plan = _rank(group), save.plan
    cached = save.local_plan is None
    # 1. rank 0 makes the folder, and of all plans one
    local_plans = None if cached else _gather(save.local_plan, group)
    plans: list[SavePlan] = []
    metadata, failure, files = None, "", None
    if rank == 0:
        try:
            # of a killed save, or of a run that restarted from an earlier step
            delete_checkpoint(folder)
            folder.make()
            if local_plans is not None:
                plans, metadata = global_plan(local_plans)
        except BaseException as error:
            failure = error_line(error)
    failure = _broadcast(failure, group)
    if failure:
        raise OSError(failure)
    # 2. each rank writes its file
    if not cached:
        plan.items = _scatter([[item.index for item in part.items] for part in plans], group)
    written = None
    try:
        name = f"__{rank}_0.distcp"
        written = write_file(folder, name, (save.tensors[item] for item in plan.items))
        if cached and plan.ends != written.ends:
            raise RuntimeError(f"{name} has other places than in the save before")
        plan.ends = written.ends
    except BaseException as error:
        failure = error_line(error)
    results = _gather((failure, written), group)
    # 3. rank 0 describes and commits what has been written
    if results is not None:
        failure = next((reason for reason, _ in results if reason), "")
        try:
            if not failure:
                if metadata is not None:
                    plan.metadata = describe(metadata, plans, [file for _, file in results])
                files = _commit(folder, state, plan.metadata, [file for _, file in results])
        except BaseException as error:
            failure = error_line(error)
    if failure := _broadcast(failure, group):
        raise OSError(failure)
    return files


def global_plan(local_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """What each rank writes, and the description of all tensors."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, metadata = planner.create_global_plan(local_plans)
    # as torch's planner writes it for a state dict without nesting: its converters need it
    metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
    return plans, metadata


def describe(metadata: Metadata, plans: list[SavePlan], written: list[WrittenFile]) -> bytes:
    """The content of `.metadata`: the same in each save of a plan."""
    places = [
        (item.index, file.name, begin, end - begin)
        for plan, file in zip(plans, written, strict=True)
        for item, begin, end in zip(plan.items, [0, *file.ends[:-1]], file.ends, strict=True)
    ]
    return pickle.dumps(describe_files(metadata, places))


def dump_checksums(folder: Storage, written: list[WrittenFile]) -> bytes:
    """The content of `pieces.json`."""
    return ChunkChecksums(folder, {file.name: (file.ends, file.sums) for file in written}).dump()


def _commit(
    folder: Storage, state: dict[str, Any], metadata: bytes, written: list[WrittenFile]
) -> Manifest:
    files: Manifest = {file.name: (file.size, file.checksum) for file in written}
    for name, data in ((METADATA, metadata), (CHUNKS, dump_checksums(folder, written))):
        folder.write(name, data)
        files[name] = (len(data), checksum(data))
    try:
        check_sizes(folder, files)
    except DamagedCheckpoint as damage:  # written by another rank, not visible here
        raise OSError(
            f"{damage.file} {damage.reason}; is {folder.parent} on a file system that "
            "all machines share?"
        ) from None
    commit(folder, files, state)
    return files


def _chunk(tensor: Tensor | Blocks, index: MetadataIndex) -> Tensor:
    if isinstance(tensor, Blocks):
        assert index.offset is not None
        return tensor.blocks[index.offset]
    return local(tensor)


def _signature(tensors: Tensors) -> list[Any]:
    """What a plan depends on."""
    signature: list[Any] = []
    for name, tensor in tensors.items():
        layout: Any = None
        if isinstance(tensor, DTensor):
            layout = tensor.device_mesh, tensor.placements
        elif isinstance(tensor, Blocks):
            layout = [(offsets, block.shape) for offsets, block in tensor.blocks.items()]
        signature.append((name, tensor.shape, tensor.dtype, layout))
    return signature


# --- collectives: without a group this process is alone ------------------------------------------


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """The values of all ranks, on rank 0."""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group) if _rank(group) == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


def _broadcast(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's value."""
    values = [value]
    if group is not None:
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def _scatter(values: list[Any], group: dist.ProcessGroup | None) -> Any:
    """This rank's of rank 0's values."""
    if group is None:
        return values[0]
    received: list[Any] = [None]
    dist.scatter_object_list(
        received, values if _rank(group) == 0 else None, group=group, group_src=0
    )
    return received[0]
