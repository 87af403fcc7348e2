"""Under NCCL a message waits in the stream of its communicator: no schedule may deadlock there, and
none may be slowed down by messages to other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from support.message_streams import Deadlock, Stream, a_pair, compute, makespan, one_stream
from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config, LoopedSchedule, Schedule
from titanlike.launch.worker import Worker
from titanlike.parallel import mesh as mesh_module
from titanlike.parallel.mesh import open_mesh
from titanlike.pipeline.from_config import build_order, microbatch_problem
from titanlike.pipeline.order import Order
from titanlike.pipeline.schedules import LOOPED, SCHEDULES
from titanlike.torch_private.pipeline_runtime import _lower

MESSAGE = 0.1  # of a microbatch's forward on one rank


def order_of(name: str, pp: int, microbatches: int, stages_per_rank: int = 2) -> Order:
    looped = name in LOOPED
    schedule = LoopedSchedule(name, stages_per_rank=stages_per_rank) if looped else Schedule(name)
    if microbatch_problem(schedule, pp, microbatches):
        reject()
    return build_order(schedule, pp, microbatches)


def seconds(order: Order, stream: Stream, message: float = MESSAGE, waits: bool = True) -> float:
    return makespan(_lower(order, order.stages), order.place, stream, message, waits)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 24),
    st.integers(2, 3),
)
def test_no_schedule_deadlocks_or_waits_for_messages_to_others(
    name: str, pp: int, microbatches: int, stages_per_rank: int
) -> None:
    order = order_of(name, pp, microbatches, stages_per_rank)
    for evaluated in (order, order.forward_only()):
        # where a message holds up its ranks, as the first one of a pair does; and in one stream
        seconds(evaluated, compute)
        seconds(evaluated, one_stream)
        best = seconds(evaluated, a_pair, waits=False)
        assert seconds(evaluated, a_pair) <= 1.02 * best


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_every_schedule_runs_in_one_stream_a_pair(name: str, pp: int) -> None:
    order = order_of(name, pp, 4 * pp)
    ranks = _lower(order, order.stages)
    for message in (0.02, 0.25):
        best = makespan(ranks, order.place, a_pair, message, False)
        assert makespan(ranks, order.place, a_pair, message) <= 1.02 * best


@pytest.mark.parametrize(("pp", "least"), [(4, 1.13), (8, 1.25)])
def test_one_stream_for_all_messages_would_cost_interleaved_schedules(
    pp: int, least: float
) -> None:
    order = order_of("interleaved1f1b", pp, 4 * pp)
    assert seconds(order, one_stream) > least * seconds(order, a_pair)


def test_messages_in_a_crossed_order_are_a_deadlock() -> None:
    """Rank 0 waits for the gradient of microbatch 0 before it sends that microbatch."""
    order = order_of("gpipe", 2, 2)
    ranks = _lower(order, 1)
    makespan(ranks, order.place, a_pair, MESSAGE)
    sends = next(i for i, a in enumerate(ranks[0]) if str(a) == "0SEND_F0")
    receive = next(i for i, a in enumerate(ranks[0]) if str(a) == "0RECV_B0")
    ranks[0].insert(sends, ranks[0].pop(receive))
    with pytest.raises(Deadlock, match="Message"):
        makespan(ranks, order.place, a_pair, MESSAGE)


def batches_of_messages(config: Config, worker: Worker) -> tuple[int, int]:
    """In a step and an evaluation after a first: messages started by themselves, and in batches."""
    from titanlike.data.loader import batches, open_data
    from titanlike.training.build import build
    from titanlike.training.feed import to_device

    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    batch = to_device(next(batches(open_data(config).train, config, dp_rank=0)), mesh, config)
    run.pipeline.train(batch)
    run.pipeline.evaluate(batch)
    alone, batched = [], []

    def counted(start: Callable) -> Callable:
        return lambda *args, **kwargs: alone.append(start) or start(*args, **kwargs)

    for name in ("send", "recv"):
        setattr(dist.ProcessGroup, name, counted(getattr(dist.ProcessGroup, name)))
    in_batches = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: batched.extend(ops) or in_batches(ops)
    run.pipeline.train(batch)
    run.pipeline.evaluate(batch)
    return len(alone), len(batched)


def test_every_message_is_started_by_itself(tmp_path: Path) -> None:
    """NCCL puts the messages of batches into one stream, whoever they are for."""
    config = tiny(2, 1, LoopedSchedule("interleaved1f1b", 8, stages_per_rank=2), layers=4)
    for alone, batched in run_world(batches_of_messages, config, tmp_path, timeout=40):
        assert (alone, batched) == (8 * (3 + 3) + 8 * 3, 0)


class Opened(Exception):
    """The process group would be opened now."""


def test_the_process_group_is_not_bound_to_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """With a device_id NCCL has one communicator, and one stream, for all messages of a rank."""
    asked: dict = {}

    def opened(*args, **kwargs):
        asked.update(kwargs, backend=args[0])
        raise Opened

    gpu = torch.device("cuda", 0), "1 x GPU found"
    monkeypatch.setattr(mesh_module, "choose_device", lambda *_: gpu)
    for started in ("prepare_allocator", "start_device", "claim_device", "count_anew"):
        monkeypatch.setattr(mesh_module, started, lambda *_: None)
    monkeypatch.setattr(mesh_module.accelerator, "name", lambda _: "a GPU")
    monkeypatch.setattr(mesh_module.dist, "init_process_group", opened)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # the user's own
    worker = Worker(0, 1, 0, 1, tmp_path, None, [])
    with pytest.raises(Opened):
        open_mesh(tiny(), worker)
    assert asked["backend"] == "cpu:gloo,cuda:nccl" and asked.get("device_id") is None
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    with pytest.raises(Opened):
        open_mesh(tiny(), worker)
    assert os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "3"
