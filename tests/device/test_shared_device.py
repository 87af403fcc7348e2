"""`launch.ranks_per_device`: several ranks on one GPU, to check a layout with NCCL."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.speed.bench import bench
from support.models import tiny
from support.stand_in_gpus import driver, gpus
from support.world import run_world
from titanlike.core.config.errors import ConfigError, Refused
from titanlike.core.config.groups.jobs import Launch
from titanlike.core.config.groups.watching import Timeline
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator
from titanlike.core.device.choose import choose_device
from titanlike.core.distributed import mesh as mesh_module
from titanlike.core.distributed.mesh import join_group
from titanlike.core.launch.failures import describe
from titanlike.core.launch.worker import Worker
from titanlike.core.training.loop import train
from titanlike.core.training.step import step_record
from titanlike.core.training.train_plan import memory_for_training
from titanlike.planning.estimate import make_estimate
from titanlike.planning.estimate_text import as_data, as_text
from titanlike.planning.known_hardware import likely_hardware, planned_hardware, shipped
from titanlike.planning.timeline_report import as_text as timeline_text
from titanlike.planning.timeline_report import report_of
from titanlike.proof.verify import verify
from titanlike.watch.stragglers import Stragglers

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def shared(ranks: int, pp: int = 2, dp: int = 1, **changes: Any) -> Config:
    return tiny(pp, dp, layers=2, launch=Launch(ranks_per_device=ranks), **changes)


@pytest.mark.parametrize(
    ("count", "each", "ranks", "index", "said"),
    [
        (1, 8, 8, [0] * 8, "8 ranks share cuda:0: for correctness, not for speed"),
        (2, 4, 8, [0] * 4 + [1] * 4, "8 ranks share 2 GPUs (4 each): for correctness, not for"),
        (8, 2, 4, [0, 0, 1, 1], "4 ranks share 2 GPUs (2 each): for correctness"),
        (2, 2, 3, [0, 0, 1], "3 ranks share 2 GPUs"),
        (1, 8, 2, [0, 0], "2 ranks share cuda:0"),
        (1, 8, 1, [0], "1 GPU found"),
    ],
)
def test_neighbouring_ranks_share_a_gpu_and_the_log_says_so(
    count: int, each: int, ranks: int, index: list[int], said: str, monkeypatch: Patch
) -> None:
    gpus(monkeypatch, count)
    config = shared(each, device="auto")
    chosen = [choose_device(config, rank, ranks, one_each=False) for rank in range(ranks)]
    assert [device.index for device, _ in chosen] == index
    assert all(why.startswith(said) for _, why in chosen)


def test_only_what_nccl_connects_is_shared(monkeypatch: Patch) -> None:
    gpus(monkeypatch, 1, "xpu")
    with pytest.raises(ConfigError, match="write launch.ranks_per_device=1"):
        choose_device(shared(2, device="auto"), 0, 2)
    assert choose_device(shared(2), 1, 2) == (CPU, "asked for")


def joined(config: Config, worker: Worker, local_ranks: int) -> tuple[dict[str, str], float]:
    """The variables of a rank that has joined, as if the CPU were a GPU, and the share that it has
    of its memory."""
    names = ("NCCL_HOSTID", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NET")
    names += ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_MNNVL_ENABLE")
    for name in names:
        os.environ.pop(name, None)
    os.environ["NCCL_NET"] = "own"
    shares = [1.0]
    with (
        mock.patch.object(accelerator, "is_accelerator", lambda _: True),
        mock.patch.object(accelerator, "synchronize", lambda _: None),
        mock.patch.object(accelerator, "limit_memory", lambda _, share: shares.append(share)),
    ):
        join_group(config.launch, CPU, worker.rank, worker.world_size, local_ranks, worker.store)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == worker.world_size
    return {name: os.environ[name] for name in names if name in os.environ}, shares[-1]


def test_each_rank_sets_what_nccl_needs_and_takes_its_share_of_the_memory(tmp_path: Path) -> None:
    needed = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "own"}
    needed["NCCL_MNNVL_ENABLE"] = "0"
    loopback = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
    found = run_world(joined, shared(2), tmp_path / "one machine", 2)
    hosts = [environment.pop("NCCL_HOSTID") for environment, _ in found]
    assert len({*hosts}) == 2, "each rank is a host of its own for NCCL"
    assert [*found] == [(needed | loopback, 0.5)] * 2
    found = run_world(joined, shared(8, 2, 2), tmp_path / "two machines", 2)
    assert [share for _, share in found] == [0.5] * 4
    assert len({environment["NCCL_HOSTID"] for environment, _ in found}) == 4, "on all machines"
    assert not any(loopback.keys() & environment.keys() for environment, _ in found)
    found = run_world(joined, shared(1), tmp_path / "a GPU each", 2)
    assert found == [({"NCCL_NET": "own"}, 1.0)] * 2, "nothing is changed"


def test_the_share_is_of_the_allocator_of_cuda(monkeypatch: Patch) -> None:
    calls: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *a: calls.append(a))
    for device in (CPU, GPU):
        accelerator.limit_memory(device, 0.25)
    assert calls == [(0.25, GPU)]


DUPLICATE = """NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"""


@pytest.mark.parametrize(
    ("raised", "own", "said"),
    [
        (DUPLICATE, "node1", "here: Duplicate GPU .* device 1b000; unset NCCL_HOSTID$"),
        (
            "NCCL error: unhandled cuda error",
            "",
            "here: NCCL error: unhandled cuda error; write device=cpu, or",
        ),
    ],
)
def test_an_nccl_connection_error_quotes_nccl(
    raised: str, own: str, said: str, monkeypatch: Patch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise dist.DistBackendError(raised)

    monkeypatch.setattr(os, "environ", os.environ.copy() | ({"NCCL_HOSTID": own} if own else {}))
    monkeypatch.setattr(mesh_module.dist, "init_process_group", fails)
    monkeypatch.setattr(accelerator, "limit_memory", lambda *_: None)
    with pytest.raises(ConfigError, match=f"^launch.ranks_per_device=2: NCCL .* {said}") as error:
        join_group(shared(2).launch, GPU, 0, 2, 2)
    assert describe(0, error.value).invalid and "\n" not in str(error.value)
    raised = "ncclRemoteError: remote process exited or there was a network error"
    with pytest.raises(dist.DistBackendError):  # of a peer, whose own error counts
        join_group(shared(2).launch, GPU, 0, 2, 2)


def test_plans_and_checks_divide_memory_among_ranks_of_a_gpu(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    gpus(monkeypatch, 1)
    driver(monkeypatch, tmp_path, 1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    h100, config = shipped("h100_sxm"), shared(8, 2, 2, device="auto")
    assert memory_for_training(config) == int(0.92 * (80 << 30) / 4)
    assert memory_for_training(replace(config, device="cpu")) != memory_for_training(config)
    named = replace(config, hardware=h100)
    assert memory_for_training(named) == likely_hardware(named).usable
    for hardware in (likely_hardware(named), planned_hardware(named)):
        assert hardware.memory == h100.memory // 4 and hardware.title == f"1/4 of {h100.title}"
    assert planned_hardware(named, 64).memory == h100.memory // 8, "of a search's ranks"
    assert likely_hardware(replace(named, hardware=shipped("cpu"))) == shipped("cpu")
    estimate = make_estimate(named)
    assert as_data(estimate)["ranks_per_device"] == 4
    assert as_data(estimate)["device_memory_bytes"] == h100.of_each(4).usable
    assert "4 ranks take turns on a device, for correctness, not for speed" in as_text(estimate)


def test_no_speed_or_straggler_is_reported_on_a_shared_gpu(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    gpus(monkeypatch, 1)
    worker = Worker(0, 2, 0, 2, tmp_path, None, [])
    with pytest.raises(Refused, match="launch.ranks_per_device=2: 2 ranks .* take turns"):
        bench(shared(2, device="auto"), worker)
    mesh = mock.Mock(device=GPU, pp=1, world_size=2, stage_ranks=lambda _: [0, 1])
    run = mock.Mock(mesh=mesh, transforms={}, plan=mock.Mock(flops_per_token=1.0))
    pending = mock.Mock(step=1, more={}, end=1.0)
    pending.gradients.begin = 0.0
    monkeypatch.setattr("titanlike.core.training.step.peak_flops", lambda *_: 1e12)
    for ranks, alone in ((1, True), (2, False)):
        config = shared(ranks)
        assert Stragglers(config, mesh, worker, mock.Mock())._on is alone
        numbers = dict.fromkeys(("loss", "grad_norm", "allocated", "data"), 1.0)
        assert ("mfu" in step_record(run, config, pending, numbers)) is alone


def test_on_the_cpu_it_changes_nothing(tmp_path: Path) -> None:
    config = shared(2, steps=3, timeline=Timeline(enabled=True))
    found = run_world(verify, config, tmp_path / "verify")
    assert found[0]["exit_code"] == 0
    run_world(train, config, tmp_path / "train")
    report = report_of(tmp_path / "train")
    assert "take turns" not in timeline_text([("run", report)])
    report.timeline.ranks = [place._replace(device="a GPU") for place in report.timeline.ranks]
    assert "take turns" in timeline_text([("run", report)])


@pytest.mark.gpu
def test_four_ranks_on_one_gpu_match_one_process(tmp_path: Path) -> None:
    found = run_world(verify, shared(4, 2, 2, device="cuda"), tmp_path, timeout=300)
    assert found[0]["exit_code"] == 0
