"""Messages between stages are in memory while they are under way or in use, not for a whole
step."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models import tiny
from support.opened import opened
from support.world import run_world
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.pipeline.order import Order
from titanlike.core.pipeline.order_check import check_order
from titanlike.core.pipeline.schedules import SCHEDULES
from titanlike.core.torch_private import pipeline_runtime, pipeline_stage
from titanlike.core.torch_private.pipeline_runtime import _lower, _received_after
from titanlike.core.torch_private.pipeline_skips import SkipMessage, skip_posts

RELEASES = not hasattr(pipeline_runtime._Kind, "WAIT_SEND_F")  # 2.15 releases by itself
BUFFERS = pipeline_stage._TORCH_KEEPS_BUFFERS


MICROBATCHES = 16


def most_in_memory(config: Config, worker: Worker, as_torch_does: bool) -> tuple[int, int, int]:
    """In a training step, at once: sent tensors, and buffers for received ones, that are in memory;
    and how many of those that it has received are at the last action."""
    if as_torch_does:
        pipeline_stage._free = lambda _: None
        pipeline_runtime.OrderRuntime.done = lambda self, action, received: None
    sent: list[weakref.ref[Any]] = []
    received: list[weakref.ref[Any]] = []
    most = [0, 0, 0]
    post, receive = pipeline_runtime._post, pipeline_stage._Stage.forward_one_chunk

    def send(operations: list[Any]) -> list[Any]:
        sent.extend(weakref.ref(o.tensor) for o in operations if o.op.__name__ == "isend")
        return post(operations)

    def forward(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        result = receive(stage, chunk, *args, **kwargs)
        received.extend(weakref.ref(value) for value in stage.fwd_cache[chunk][1])
        return result

    def count(_: Any) -> None:
        most[0] = max(most[0], alive(sent))
        infos = [
            info
            for stage in next(iter(job.run.pipeline._planned.executors.values()))._stages
            for chunks in (stage.args_recv_info, stage.grad_recv_info)
            for chunk in chunks.values()
            for info in chunk
        ]
        most[1] = max(most[1], sum(getattr(info, "buffer", None) is not None for info in infos))
        most[2] = alive(received)

    pipeline_runtime._post, pipeline_stage._Stage.forward_one_chunk = send, forward
    with opened(config, worker, again=str(as_torch_does)) as job:
        job.run.pipeline.on_action = count
        for _ in range(2):
            sent.clear()
            received.clear()
            most[:] = [0, 0, 0]
            job.train()
    pipeline_runtime._post, pipeline_stage._Stage.forward_one_chunk = post, receive
    return most[0], most[1], most[2]


def alive(tensors: list[weakref.ref[Any]]) -> int:
    return sum(tensor() is not None for tensor in tensors)


def fenced_and_as_torch_does(config: Config, worker: Worker) -> list[tuple[int, int, int]]:
    return [most_in_memory(config, worker, as_torch_does) for as_torch_does in (False, True)]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[int, int, int]]]:
    """Of each rank, with titanlike's fences and without."""
    folder = tmp_path_factory.mktemp("counts")
    return run_world(
        fenced_and_as_torch_does,
        tiny(pp=2, schedule=Schedule("1f1b", MICROBATCHES), layers=4),
        folder,
    )


@pytest.mark.skipif(not RELEASES, reason="torch releases them itself")
def test_a_sent_activation_is_freed_once_received(counts: list) -> None:
    for (sent, buffers, _), _ in counts:
        assert 0 < sent <= 6 and (not BUFFERS or 0 < buffers <= 6), counts


@pytest.mark.skipif(not BUFFERS, reason="other stages cache what they received elsewhere")
def test_an_activation_of_the_last_stage_is_freed_after_its_backward(counts: list) -> None:
    (_, _, received), _ = counts[-1]
    assert received <= 1


@pytest.mark.skipif(not RELEASES, reason="torch releases them itself")
def test_torchs_runtime_keeps_what_it_has_sent_to_the_end_of_a_step(counts: list) -> None:
    """If it does not, `OrderRuntime._send` may go, and with BUFFERS the buffers of `_Stage`."""
    for _, (sent, buffers, _) in counts:
        assert sent >= MICROBATCHES and (not BUFFERS or buffers >= MICROBATCHES), counts


@pytest.mark.skipif(not RELEASES, reason="its stage caches what it received elsewhere")
def test_torchs_losses_keep_what_the_last_stage_received(counts: list) -> None:
    """If they do not, `OrderRuntime._forget_graph` may go."""
    _, (_, _, received) = counts[-1]
    assert received == MICROBATCHES


@settings(max_examples=40)
@given(
    *(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 12)),
    *(st.booleans(), st.lists(st.tuples(st.integers(0, 7), st.integers(2, 9)), max_size=4)),
)
def test_nothing_is_freed_before_it_is_received(
    name: str, pp: int, microbatches: int, forward_only: bool, skips: list[tuple[int, int]]
) -> None:
    """Each release follows from what the rank has waited for, by what other ranks did before."""
    more = {"stages_per_rank": 2} if "inter" in name or "looped" in name else {}
    try:
        order = check_order(SCHEDULES[name](pp=pp, microbatches=microbatches, **more))
    except ValueError:
        return
    order = order.forward_only() if forward_only else order
    ranks = _lower(order, order.stages)
    there = {(a, a + far): True for a, far in skips if a + far < order.stages}
    posts = skip_posts(ranks, order.stage_to_rank, there)
    known = clocks(order, ranks, posts)
    for me in ranks:
        for index, actions in _received_after(ranks, order.stage_to_rank, me, posts).items():
            for action in actions:
                to, at = receipt(order, ranks, action)
                assert known[me][index][to] >= at, (name, me, action)


def receipt(order: Order, ranks: dict[int, list[Any]], action: Any) -> tuple[int, int]:
    """(rank, index of its computation) that waits for a SEND or for a skip's message."""
    if isinstance(action, SkipMessage):
        forward, _, stage, mb = action
    else:
        forward, mb = action.computation_type.name == "SEND_F", action.microbatch_index
        stage = action.stage_index + (1 if forward else -1)
    rank = order.stage_to_rank[stage]
    kinds = "F" if forward else "BI"
    return rank, next(
        index
        for index, other in enumerate(ranks[rank])
        if other.computation_type.value in kinds
        and (other.stage_index, other.microbatch_index) == (stage, mb)
    )


def clocks(
    order: Order, ranks: dict[int, list[Any]], posts: dict[int, dict[int, list[SkipMessage]]]
) -> dict[int, list[dict[int, int]]]:
    """For each rank and action: the index of the last action of every rank that is done by then."""
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, actions in ranks.items():
        for index, action in enumerate(actions):
            if action.computation_type.name.startswith("SEND"):
                waits[receipt(order, ranks, action)].append((rank, index))
        for index, messages in posts[rank].items():
            for message in messages:
                if order.stage_to_rank[message.source] == rank:  # behind the action before
                    waits[receipt(order, ranks, message)].append((rank, index - 1))
    done: dict[int, list[dict[int, int]]] = {rank: [] for rank in ranks}
    while any(len(done[rank]) < len(ranks[rank]) for rank in ranks):
        for rank, actions in ranks.items():
            while (at := len(done[rank])) < len(actions):
                sources = waits[rank, at]
                if any(len(done[other]) <= index for other, index in sources):
                    break
                merged: dict[int, int] = defaultdict(lambda: -1, done[rank][-1] if at else {})
                for other, index in sources:
                    for third, last in done[other][index].items():
                        merged[third] = max(merged[third], last)
                merged[rank] = at
                done[rank].append(merged)
    return done
