"""On GPUs no layout waits for itself: what ranks ask of their groups can end in the strictest order
that NCCL may impose, and ranks agree on operations, sizes and dtypes."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.cells import slow
from support.families import moe
from support.group_calls import Call, Program, Recording, group_mistakes, mistakes, record_training
from support.models import tiny
from support.world import run_world
from titanlike.config.optimizers.muon import Muon
from titanlike.config.schema import (
    ActivationCheckpoint,
    Checkpoint,
    Config,
    Ema,
    Fsdp,
    Numerics,
    Schedule,
    SelectiveActivationCheckpoint,
    Validation,
)

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
