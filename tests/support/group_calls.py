"""What ranks ask of their process groups in a training run, and whether that can end where NCCL is
strictest.

There a call may hold up its rank until all ranks of its group have come to it: in a communicator
that opens, in a stream that several share, in a device's one queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
Messages of a pair, both ways, are in one order. gloo, on which tests run, forgives other orders.

`record_training` runs on each rank; `mistakes` reads what all have recorded. Not recorded: what
other threads ask (saves in the background), and what compiled code does.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from titanlike.config.schema import Config
from titanlike.launch.worker import Worker
from titanlike.training.loop import train

# methods of a process group, by the names that torch 2.11 to 2.15 have for them
_OPERATIONS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("send", "recv"),
)
_MESSAGES = ("send", "recv")
# of these one rank has lists of tensors: the last one is what each has
_LISTS = ("gather", "scatter", "allgather", "alltoall")


@dataclass(frozen=True)
class Call:
    """Of one rank."""

    operation: str
    group: str
    ranks: tuple[int, ...]  # of the group; of a message: who sends it, who receives it
    tensors: tuple[tuple[int, str], ...] = ()  # elements and dtype of each
    tables: tuple[tuple[int, ...], ...] = ()  # of an all-to-all: rows from each rank, and to each

    @property
    def key(self) -> tuple[bool, str, tuple[int, ...]]:
        """What calls of several ranks have in common that belong to each other."""
        return self.operation in _MESSAGES, self.group, self.ranks


Program = list[list[Call]]  # of one rank: calls that it begins together, one set after another


@dataclass
class Recording:
    """Of one rank."""

    program: Program = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)  # that it made, in this order
    # of gathers of FSDP: ("forward" or "backward", "experts" or "block", whether it was under way
    # when the forward or backward of that part began)
    gathers: Counter[tuple[str, str, bool]] = field(default_factory=Counter)


def record_training(config: Config, worker: Worker) -> Recording:
    """Train in a process that ends with it: nothing is put back."""
    recording = Recording()
    _record_calls(recording)
    _record_gathers(recording)
    train(config, worker)
    return recording


def _record_calls(recording: Recording) -> None:
    inside, batch = [0], list[list[Call]]()

    def noted(method: Any, name: str) -> Any:
        def call(group: Any, *args: Any, **more: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            here = threading.current_thread() is threading.main_thread() and not inside[0]
            if here and len(ranks) > 1:
                made = _call(name, group.group_name, ranks, [*args, *more.values()])
                (batch[-1] if batch else recording.program).append(made if batch else [made])
            inside[0] += here
            try:
                return method(group, *args, **more)
            finally:
                inside[0] -= here

        return call

    for name in _OPERATIONS:
        if (method := getattr(dist.ProcessGroup, name, None)) is not None:
            setattr(dist.ProcessGroup, name, noted(method, name))
    together: Any = dist.batch_isend_irecv  # of gloo one by one; of NCCL one call

    def begun_together(operations: Any) -> Any:
        batch.append([])
        try:
            return together(operations)
        finally:
            recording.program.append(batch.pop())

    dist.batch_isend_irecv = begun_together
    new_group: Any = dist.distributed_c10d._new_group_with_tag

    def made(ranks: Any = None, *args: Any, **more: Any) -> Any:
        recording.groups.append(tuple(ranks or range(dist.get_world_size())))
        return new_group(ranks, *args, **more)

    dist.distributed_c10d._new_group_with_tag = made


def _call(name: str, group: str, ranks: tuple[int, ...], args: list[Any]) -> Call:
    found = tuple((t.numel(), str(t.dtype)) for t in _tensors(args))
    if name in _MESSAGES:
        here, peer = dist.get_rank(), ranks[args[1]]
        return Call(name, group, (here, peer) if name == "send" else (peer, here), found)
    if name in ("alltoall_base", "all_to_all_single") and any(args[2:4]):
        return Call(name, group, tuple(sorted(ranks)), found, tuple(map(tuple, args[2:4])))
    found = found[-1:] if name in _LISTS else found
    return Call(name, group, tuple(sorted(ranks)), found)


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from _tensors(part)


def _record_gathers(recording: Recording) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def noted(method: Any, way: str, state: str) -> Any:
        def call(group: Any, *args: Any) -> Any:
            if group._training_state.name not in ("PRE_BACKWARD", state):
                path = group._module_fqn or ""
                kind = "experts" if "experts" in path else "block" if "layers" in path else "other"
                under_way = group.is_unsharded or group._all_gather_result is not None
                recording.gathers[way, kind, under_way] += 1
            return method(group, *args)

        return call

    for way in ("forward", "backward"):
        name, method = f"pre_{way}", getattr(FSDPParamGroup, f"pre_{way}")
        setattr(FSDPParamGroup, name, noted(method, way, name.upper()))


def mistakes(programs: Sequence[Program]) -> list[str]:
    """Calls that do not agree, and, last, ranks that wait for each other."""
    left = [[*program] for program in programs]
    begun: list[list[Call]] = [[] for _ in programs]
    found: list[str] = []
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(left):
            while program and not begun[rank]:
                begun[rank] = [*program.pop(0)]
        for rank, calls in enumerate(begun):
            for call in [*calls]:
                if rank != min(call.ranks):
                    continue
                every = [next((c for c in begun[r] if c.key == call.key), None) for r in call.ranks]
                if all(every):
                    found += _differences(every)
                    for member, one in zip(call.ranks, every, strict=True):
                        begun[member].remove(one)
                    moved = True
    waiting = {rank: calls[0] for rank, calls in enumerate(begun) if calls}
    return found + ([f"deadlock: {waiting}"] if waiting else [])


def _differences(calls: Sequence[Any]) -> Iterator[str]:
    first, *others = calls
    if first.tables or any(call.tables for call in others):
        dtypes = {tuple(dtype for _, dtype in call.tensors) for call in calls}
        widths = {  # elements of a row
            size / sum(rows)
            for call in calls
            for (size, _), rows in zip(call.tensors, call.tables, strict=False)
            if sum(rows)
        }
        same = len(dtypes) == 1 and len(widths) <= 1 and all(call.tables for call in calls)
        pairs = [(a, b) for a in range(len(calls)) for b in range(len(calls))]
        if not same or any(calls[a].tables[1][b] != calls[b].tables[0][a] for a, b in pairs):
            yield f"other rows are sent than received: {calls}"
    elif any(call.tensors != first.tensors for call in others):
        yield f"other tensors: {calls}"
    if first.operation not in _MESSAGES and len({call.operation for call in calls}) > 1:
        yield f"other operations: {calls}"


def group_mistakes(groups: Sequence[list[tuple[int, ...]]]) -> list[str]:
    """Groups that are not made by all of their ranks, each as the same one of those that it makes:
    a communicator that is split off that of all ranks (torch 2.15) is one call of all of them."""
    counts = [len(made) for made in groups]
    if len({*counts}) > 1:
        return [f"ranks make {counts} groups"]
    return [
        f"group {at}: rank {rank} makes {made[at]}, rank {other} {groups[other][at]}"
        for rank, made in enumerate(groups)
        for at in range(len(made))
        for other in made[at]
        if groups[other][at] != made[at]
    ]
