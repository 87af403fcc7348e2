"""Tells when what `core/torch_private/fake_ranks.py` works around is no longer there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import Shard, distribute_tensor

from support.counted_memory import fake_process_group
from titanlike.core.torch_private.fake_ranks import allocate, fake_tensors


def test_to_empty_fails_under_fake_tensors() -> None:
    with fake_tensors() as fake:
        model = nn.Linear(4, 4, device="meta")
        with pytest.raises(RuntimeError, match="Couldn't swap"):
            model.to_empty(device="cpu")
        allocate(model, torch.device("cpu"))
    assert model.weight.device.type == "cpu" and model.weight.fake_mode is fake


def test_torchs_runtime_asks_its_neighbours_first() -> None:
    """In 2.13 alone, by this method."""
    asks = hasattr(schedules._PipelineSchedule, "_warmup_p2p")
    assert asks == torch.__version__.startswith("2.13")


def test_a_tied_parameter_stays_one_and_a_sharded_one_keeps_its_part() -> None:
    with fake_process_group(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        weight = distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)], src_data_rank=None)
        model[0].weight = model[1].weight = nn.Parameter(weight)
        with fake_tensors():
            allocate(model, torch.device("cpu"))
        assert model[0].weight is model[1].weight
        assert model[0].weight.shape == (8, 8) and model[0].weight.to_local().shape == (2, 8)
