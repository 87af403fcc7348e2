"""Collectives that torch.compile sees, and its pass that overlaps them with products."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config
from titanlike.distributed.collectives import GroupInfo, autograd_collective
from titanlike.distributed.mesh import open_mesh
from titanlike.launch.worker import Worker
from titanlike.torch_private.dtensor import traced_collective


def patterns(config: Config, worker: Worker) -> tuple[int, int]:
    """How many products behind an all-gather and before a reduce-scatter torch's pass finds."""
    from torch._inductor.fx_passes import micro_pipeline_tp

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.group.WORLD

    def layer(x: Tensor, into: Tensor, out: Tensor) -> Tensor:
        whole = traced_collective("all_gather", x, 1, group)
        return traced_collective("reduce_scatter", whole @ into @ out, 1, group)

    sizes = torch.empty(2, 8, 16), torch.empty(16, 32), torch.empty(32, 16)
    graph = make_fx(layer, tracing_mode="fake")(*sizes).graph
    found = (
        len(micro_pipeline_tp.find_all_gather_patterns(graph)),
        len(micro_pipeline_tp.find_reduce_scatter_patterns(graph)),
    )
    dist.destroy_process_group()
    return found


def differences(config: Config, worker: Worker) -> tuple[tuple[int, int], dict[str, float]]:
    """What `patterns` returns; operation -> how far its result is from that of other blocks."""
    found = patterns(config, worker)
    open_mesh(config, worker)
    peers, x = GroupInfo(2, worker.rank, dist.group.WORLD), torch.arange(24.0).view(2, 4, 3)
    x = x * (1 + worker.rank)
    differences = {}
    for name, dim in (
        ("all_reduce", 0),
        ("all_gather", 1),
        ("reduce_scatter", 1),
        ("all_to_all", 0),
    ):
        mine = traced_collective(name, x, dim, peers.group)
        right = autograd_collective(x, peers, name, "identity", dim)
        differences[name] = (mine - right).abs().max().item()
    return found, differences


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple]:
    return run_world(differences, tiny(2), tmp_path_factory.mktemp("ranks"))


def test_torchs_pass_recognizes_what_a_divided_layer_exchanges(found: list[tuple]) -> None:
    assert [recognized for recognized, _ in found] == [(1, 1)] * 2


def test_collectives_of_compiled_blocks_are_those_of_others(found: list[tuple]) -> None:
    for _, differences in found:
        assert max(differences.values()) == 0, differences


def test_asynchronous_tensor_parallelism_has_no_public_switch() -> None:
    assert hasattr(inductor, "_micro_pipeline_tp") and not hasattr(inductor, "micro_pipeline_tp")
