"""Under NCCL a message waits in the stream of its communicator: no schedule may deadlock there, and
none may be slowed down by messages to other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.message_streams import Deadlock, a_pair, compute, makespan, one_stream, order_of
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.pipeline import LoopedSchedule
from titanlike.core.config.schema import Config
from titanlike.core.distributed import mesh as mesh_module
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.pipeline.schedules import SCHEDULES
from titanlike.core.torch_private.pipeline_runtime import _lower
from titanlike.core.torch_private.pipeline_skips import skip_posts

MESSAGE = 0.1  # of a microbatch's forward on one rank


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_schedule_deadlocks_or_waits_for_messages_to_others(name: str) -> None:
    for pp, microbatches, chunks in ((2, 4, 2), (3, 12, 2), (4, 9, 3)):
        order = order_of(name, pp, microbatches, chunks)
        for evaluated in (order, order.forward_only()) if order else ():
            ranks, place = _lower(evaluated, evaluated.stages), evaluated.stage_to_rank
            # where a message holds up its ranks, as the first one of a pair does; and in one stream
            makespan(ranks, place, compute, MESSAGE)
            makespan(ranks, place, one_stream, MESSAGE)
            for message in (MESSAGE, 0.25):
                best = makespan(ranks, place, a_pair, message, False)
                assert makespan(ranks, place, a_pair, message) <= 1.02 * best


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_skip_connections_deadlock_under_no_schedule(name: str) -> None:
    """From every stage to every later one but the next, with and without gradients."""
    for pp, microbatches, chunks in ((2, 4, 2), (3, 7, 2), (4, 9, 3)):
        order = order_of(name, pp, microbatches, chunks)
        for run in (order, order.forward_only()) if order else ():
            ranks, place, stages = _lower(run, run.stages), run.stage_to_rank, range(run.stages)
            skips = {(a, b): (a + b) % 3 > 0 for a in stages for b in stages[a + 2 :]}
            posts = skip_posts(ranks, place, skips)
            started = [skip for of_rank in posts.values() for at in of_rank.values() for skip in at]
            ways = 1 + (run is order)
            over = [back for (a, b), back in skips.items() if place[a] != place[b]]
            assert len(started) == 2 * microbatches * (len(over) + (ways - 1) * sum(over))
            for stream in (compute, one_stream, a_pair):
                makespan(ranks, place, stream, MESSAGE, posts=posts)


@pytest.mark.parametrize("pp", [4, 8])
def test_skip_connections_do_not_delay_other_p2p_messages(pp: int) -> None:
    """As they would if they were started later than what they carry is there."""
    for name in ("gpipe", "1f1b", "zbh1", "zbh2", "vhalf"):
        order = order_of(name, pp, 4 * pp)
        ranks, last = _lower(order, order.stages), order.stages - 1
        skips = {(stage, last - stage): True for stage in range(last // 2)}
        posts = skip_posts(ranks, order.stage_to_rank, skips)
        alone = makespan(ranks, order.stage_to_rank, a_pair, MESSAGE)
        assert makespan(ranks, order.stage_to_rank, a_pair, MESSAGE, posts=posts) <= 1.001 * alone


def test_one_stream_for_all_messages_would_cost_interleaved_schedules() -> None:
    for pp, least in ((4, 1.13), (8, 1.25)):
        order = order_of("interleaved1f1b", pp, 4 * pp)
        ranks = _lower(order, order.stages)
        one, each = (makespan(ranks, order.stage_to_rank, s, MESSAGE) for s in (one_stream, a_pair))
        assert one > least * each


def test_crossed_p2p_messages_are_a_deadlock() -> None:
    """Rank 0 waits for the gradient of microbatch 0 before it sends that microbatch."""
    order = order_of("gpipe", 2, 2)
    ranks = _lower(order, 1)
    makespan(ranks, order.stage_to_rank, a_pair, MESSAGE)
    sends = next(i for i, a in enumerate(ranks[0]) if str(a) == "0SEND_F0")
    receive = next(i for i, a in enumerate(ranks[0]) if str(a) == "0RECV_B0")
    ranks[0].insert(sends, ranks[0].pop(receive))
    with pytest.raises(Deadlock, match="Message"):
        makespan(ranks, order.stage_to_rank, a_pair, MESSAGE)


def batches_of_messages(config: Config, worker: Worker) -> tuple[int, int]:
    """In a step and an evaluation after a first: messages started by themselves, and in batches."""
    from titanlike.core.data.loader import batches
    from titanlike.core.data.registry import open_data
    from titanlike.core.training.build import build
    from titanlike.core.training.device_batches import to_device

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


def test_every_p2p_message_is_launched_separately(tmp_path: Path) -> None:
    """NCCL puts the messages of batches into one stream, whoever they are for."""
    config = tiny(pp=2, schedule=LoopedSchedule("interleaved1f1b", 4, stages_per_rank=2), layers=4)
    for alone, batched in run_world(batches_of_messages, config, tmp_path, timeout=40):
        assert (alone, batched) == (4 * (3 + 3) + 4 * 3, 0)


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
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for own in ("1", None):  # the user's own setting stays
        os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
        os.environ |= {} if own is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": own}
        with pytest.raises(Opened):
            open_mesh(tiny(), Worker(0, 1, 0, 1, tmp_path, None, []))
        assert asked["backend"] == "cpu:gloo,cuda:nccl" and asked.get("device_id") is None
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == (own or "3")
