"""Collectives that torch.compile sees, and its pass that overlaps them with products."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.models import tiny
from support.world import run_world
from titanlike.core.config.schema import Config
from titanlike.core.distributed.collectives import GroupInfo, autograd_collective
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.dtensor import traced_collective
from titanlike.core.torch_private.process_groups import fill_later, filled
from titanlike.core.training.train_plan import make_plan
from titanlike.core.training.transforms import compiled_blocks


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
    return run_world(differences, tiny(pp=2), tmp_path_factory.mktemp("ranks"))


def test_torchs_pass_recognizes_what_a_divided_layer_exchanges(found: list[tuple]) -> None:
    assert [recognized for recognized, _ in found] == [(1, 1)] * 2


def test_collectives_of_compiled_blocks_match_eager_ones(found: list[tuple]) -> None:
    for _, differences in found:
        assert max(differences.values()) == 0, differences


def test_asynchronous_tensor_parallelism_has_no_public_switch() -> None:
    assert hasattr(inductor, "_micro_pipeline_tp") and not hasattr(inductor, "micro_pipeline_tp")


def test_a_run_does_not_inherit_the_overlap_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a job of a sweep, in the same process: only a run with tp_async asks for it."""
    monkeypatch.setattr(inductor, "_micro_pipeline_tp", False)
    monkeypatch.setattr(symmetric_memory, "enable_symm_mem_for_group", lambda name: None)
    config = tiny(tp=2, compile=True)
    for overlaps in (True, False):
        own = replace(config, tp_async=overlaps)
        made: dict[str, Any] = {"tp": SimpleNamespace(ranks=SimpleNamespace(group=Mock()))}
        compiled_blocks(own, make_plan(config), made)
        assert inductor._micro_pipeline_tp == overlaps


def test_what_fills_a_tensor_is_waited_for_by_its_memory() -> None:
    """By any tensor that has it, and once."""
    waited = []

    class Late(dist.Work):
        def wait(self, *_: Any) -> bool:
            waited.append(tensor.fill_(1))
            return True

    tensor, other = torch.zeros(2), torch.zeros(2)
    fill_later(tensor, work := Late())
    assert filled(other) is other and not waited
    assert filled(tensor.detach()).tolist() == [1, 1] and filled(tensor) is tensor
    assert len(waited) == 1 and work
