"""What a rank of 1,024 sends in a step, counted: none of it grows with the number of ranks, and
nothing waits for a device (a value that is read of a tensor without memory raises).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from support.cells import cells
from support.counted_memory import build_fake, fake_process_group, zeros
from support.families import llama
from support.models import tiny
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import Config
from titanlike.core.torch_private.fake_ranks import fake_tensors
from titanlike.core.training.step import forward_backward, optimizer_step

NAMES = {
    "_allgather_base_": "gathers",
    "_reduce_scatter_base_": "reductions",
    "allreduce_": "all-reduces",
    "alltoall_base_": "all-to-alls",
    "send": "messages",
}


def counted(config: Config) -> dict[str, int]:
    """Of the first rank in its second step; and the process groups that it is in."""
    fake = fake_tensors()
    with fake_process_group(0, config.world_size):
        run = build_fake(config, torch.device("cpu"), fake)
        batch = zeros(config)
        found = Counter({"groups": len(dist.distributed_c10d._world.pg_map)})
        with fake:
            run.pipeline.train(batch)
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                gradients = forward_backward(run, config, 2, iter([batch]))
                optimizer_step(run, config, 2, gradients.norm)
    for event in profiler.events():
        kind = NAMES.get(event.name.removeprefix("c10d::"))
        inner = event.cpu_parent is not None and event.cpu_parent.name == "PythonDispatchMode"
        if kind is not None and not inner:
            found[kind] += 1
    return dict(found)


def layout(pp: int, dp: int, schedule: Schedule | None = None, **changes: Any) -> Config:
    sizes = {"model": llama(num_hidden_layers=4), "seq_len": 32, "batch_size": 8 * dp}
    return tiny(pp, dp, *([schedule] if schedule else []), **{**sizes, **changes})


def counts(*numbers: int) -> dict[str, int]:
    kinds = ("groups", "all-reduces", "gathers", "reductions", "messages", "all-to-alls")
    return {kind: number for kind, number in zip(kinds, numbers, strict=False) if number}


# Six units of FSDP (embedding, four blocks, head), one of them a rank's in a pipeline of four, with
# the embedding; eight microbatches. In all: tokens, and the norm with the loss of all ranks.
ONE_BY_ONE = Schedule("1f1b", 8)
LAYOUTS: dict[str, tuple[Config, dict[str, int]]] = {
    # the inputs of attention and of the MLP are gathered again in each backward
    "pp=4 dp=64 tp=4": (layout(4, 64, ONE_BY_ONE, tp=4), counts(6, 4, 42 + 2 * 8, 42, 8)),
    "dp=256 cp=4, ring": (
        # a layer sends keys and values three times, and again, and their gradients four times
        layout(1, 256, cp=4, context_parallel="ring"),
        counts(3, 2, 12, 6, 4 * 10),
    ),
}
MORE_LAYOUTS: dict[str, tuple[Config, dict[str, int]]] = {
    "dp=4, ZeRO 1": (layout(1, 4, fsdp=Fsdp(1)), counts(2, 2, 6, 6)),
    "dp=1024, ZeRO 1": (layout(1, 1024, fsdp=Fsdp(1)), counts(2, 2, 6, 6)),
    "dp=1024, ZeRO 2": (layout(1, 1024, fsdp=Fsdp(2)), counts(2, 2, 6, 6)),
    "dp=1024, ZeRO 3": (layout(1, 1024, fsdp=Fsdp(3)), counts(2, 2, 12, 6)),
    "dp=1024 replicate=8": (layout(1, 1024, replicate=8), counts(4, 2 + 6, 12, 6)),
    "pp=4 dp=256": (layout(4, 256, ONE_BY_ONE, fsdp=Fsdp(1)), counts(4, 2, 2, 2, 8)),
    "dp=256 cp=4, ulysses": (
        layout(1, 256, cp=4, context_parallel="ulysses"),
        counts(3, 2, 12, 6, 0, 4 * 4),
    ),
    "dp=256 cp=4, gather": (
        layout(1, 256, cp=4, context_parallel="gather"),
        counts(3, 2, 12 + 4, 6 + 4),
    ),
}


@pytest.mark.parametrize("row", cells(LAYOUTS, MORE_LAYOUTS, most=1))
def test_what_a_rank_sends_in_a_step(row: tuple[Config, dict[str, int]]) -> None:
    config, expected = row
    assert counted(config) == expected
