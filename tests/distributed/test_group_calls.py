"""On GPUs no layout waits for itself: what ranks ask of their groups can end in the strictest order
that NCCL may impose, and ranks agree on operations, sizes and dtypes.

There a call may block its rank until all ranks of its group have come to it: in a communicator that
opens, in a stream that several share, in a device's one queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
Messages of a pair, both ways, are in one order. gloo, on which tests run, forgives other orders.
`record_training` runs on each rank; `mistakes` reads what all have recorded. Not recorded: calls of
other threads (saves in the background) and of compiled code.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.cells import slow
from support.families import moe
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    Fsdp,
    Numerics,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.optimization import Ema
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.training.loop import train

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


RUN = {
    "steps": 3,
    "validation": Validation(every=2, batches=1),
    "checkpoint": Checkpoint(every=2, last=True),
}
MIXTURE = {"model": moe(), "ep": 2}


def layout(pp: int, dp: int, schedule: Any = "1f1b", **more: Any) -> Config:
    return tiny(pp=pp, dp=dp, schedule=schedule, **{"layers": 4, "batch_size": 8} | RUN | more)


LAYOUTS = {
    "pp=4, zero bubbles in a V, tied": layout(4, 1, "zbvzerobubble", layers=8, tied=True),
    "pp=2 cp=2, interleaved, ZeRO 2, average": layout(
        2, 1, "interleaved1f1b", cp=2, fsdp=Fsdp(2), ema=Ema(decay=0.9)
    ),
    "pp=2 dp=2, experts, recomputed": layout(
        2, 2, activation_checkpoint=ActivationCheckpoint("full"), **MIXTURE
    ),
    "dp=4, experts, ZeRO 3, replicas": layout(
        1,
        4,
        Schedule("1f1b", 2),
        replicate=2,
        fsdp=Fsdp(3),
        activation_checkpoint=SelectiveActivationCheckpoint(),
        **MIXTURE,
    ),
    "pp=2 tp=2, Muon": layout(2, 1, tp=2, optimizer=Muon()),
    "pp=2 dp=2, exact": layout(2, 2, numerics=Numerics("exact")),
}


def recordings(config: Config, folder: Path) -> list[Recording]:
    return run_world(record_training, config, folder, timeout=120)


def programs_of(found: list[Recording]) -> list[Program]:
    assert all(recording.program for recording in found)
    return [recording.program for recording in found]


@pytest.mark.parametrize("name", slow(*LAYOUTS))
def test_collectives_of_a_layout_complete_in_a_strict_order(name: str, tmp_path: Path) -> None:
    found = recordings(LAYOUTS[name], tmp_path)
    assert mistakes(programs_of(found)) == []
    assert group_mistakes([recording.groups for recording in found]) == []


def test_expert_weights_are_prefetched(tmp_path: Path) -> None:
    """The host waits for the routes of each layer, and so asks for nothing ahead by itself."""
    config = layout(1, 2, Schedule("1f1b", 2), fsdp=Fsdp(3), **MIXTURE)
    found = recordings(config, tmp_path)
    assert mistakes(programs_of(found)) == []
    assert group_mistakes([recording.groups for recording in found]) == []
    for recording in found:
        experts = {k: n for k, n in recording.gathers.items() if k[1] == "experts"}
        # of two layers, in two microbatches of three steps; forwards also in two
        # validations
        assert experts == {("forward", "experts", True): 20, ("backward", "experts", True): 12}


# --- the check itself -----------------------------------------------------------------------------

AB, BC, OTHER = (
    Call("allreduce", group, ranks, ((4, "torch.float32"),))
    for group, ranks in (("ab", (0, 1)), ("bc", (1, 2)), ("other", (0, 1)))
)
TO_B, FROM_A = (
    Call(operation, "all", (0, 1), ((4, "torch.float32"),)) for operation in ("send", "recv")
)
TO_A, FROM_B = (
    Call(operation, "all", (1, 0), ((4, "torch.float32"),)) for operation in ("send", "recv")
)


def exchange(received: tuple[int, ...], sent: tuple[int, ...]) -> Call:
    tensors = (sum(received), "torch.float32"), (sum(sent), "torch.float32")
    return Call("alltoall_base", "ab", (0, 1), tensors, (received, sent))


WIDE = replace(exchange((1, 1), (1, 1)), tensors=((4, "torch.float32"),) * 2)


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ([[[AB]], [[AB], [BC]], [[BC]]], ""),
        ([[[AB], [OTHER]], [[OTHER], [AB]]], "deadlock"),
        ([[[AB]], [[BC], [AB]], []], "deadlock"),
        ([[[AB]], [[AB], [AB]]], "deadlock"),
        ([[[TO_B], [FROM_B]], [[FROM_A], [TO_A]]], ""),
        ([[[TO_B], [FROM_B]], [[TO_A], [FROM_A]]], "deadlock"),
        ([[[TO_B, FROM_B]], [[TO_A, FROM_A]]], ""),
        ([[[TO_B]], [[replace(FROM_A, tensors=((5, "torch.float32"),))]]], "other tensors"),
        ([[[AB]], [[replace(AB, tensors=((4, "torch.bfloat16"),))]]], "other tensors"),
        ([[[AB]], [[replace(AB, operation="broadcast")]]], "other operations"),
        ([[[exchange((1, 2), (1, 0))]], [[exchange((0, 3), (2, 3))]]], ""),
        ([[[exchange((1, 2), (1, 0))]], [[exchange((1, 3), (2, 3))]]], "other rows"),
        ([[[WIDE]], [[exchange((1, 1), (1, 1))]]], "other rows"),
        ([[[exchange((1, 1), (1, 1))]], [[replace(AB, operation="alltoall_base")]]], "other rows"),
    ],
)
def test_deadlocks_and_mismatched_collectives_are_detected(
    programs: list[Program], said: str
) -> None:
    found = mistakes(programs)
    assert all(text.startswith(said) for text in found) and bool(found) == bool(said), found


def test_groups_created_in_different_orders_are_detected() -> None:
    both, halves = (0, 1), ([(0,), (1,)])
    assert group_mistakes([[both, halves[0]], [both, halves[1]]]) == []
    assert group_mistakes([[both], [both, both]]) == ["ranks make [1, 2] groups"]
    assert group_mistakes([[both, (0,)], [(1,), both]])


@pytest.mark.slow
def test_swapped_collectives_of_a_run_are_detected(tmp_path: Path) -> None:
    programs = programs_of(recordings(LAYOUTS["dp=4, experts, ZeRO 3, replicas"], tmp_path))
    assert not waits_for_itself(programs)
    chosen, deadlocks = random.Random(1), 0
    seen = Counter[str]()
    while min(seen["one group"], seen["two groups"]) < 20:
        rank = chosen.randrange(len(programs))
        at = chosen.randrange(len(programs[rank]) - 1)
        (one,), (other,) = programs[rank][at : at + 2]
        if one == other:
            continue
        kind = "one group" if one.group == other.group else "two groups"
        seen[kind] += 1
        changed = [[*program] for program in programs]
        changed[rank][at : at + 2] = [other], [one]
        found = mistakes(changed)
        assert found or kind == "two groups", f"rank {rank} swaps {one} and {other}"
        stuck = bool(found) and found[-1].startswith("deadlock")
        deadlocks += stuck
        if kind == "two groups":
            assert stuck == waits_for_itself(changed)
    assert deadlocks


def waits_for_itself(programs: list[Program]) -> bool:
    """The same by another way: calls that belong together are one node of a graph, which comes
    after what its ranks have begun before; a cycle is a deadlock."""
    after: dict[Any, set[Any]] = defaultdict(set)
    for program in programs:
        count, before = Counter[Any](), set[Any]()
        for calls in program:
            nodes = set()
            for call in calls:
                node = call.key, count[call.key]
                count[call.key] += 1
                after[node] |= before
                nodes.add(node)
            before = nodes
    while ready := [node for node, needs in after.items() if not needs]:
        for node in ready:
            del after[node]
        for needs in after.values():
            needs.difference_update(ready)
    return bool(after)
