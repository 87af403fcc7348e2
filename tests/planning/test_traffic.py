"""What the ranks of a plan exchange, beside arithmetic by hand: bytes that one of them sends in a
step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from support.cells import cells
from support.families import moe
from support.models import tiny
from support.plans import planned
from support.world import run_world
from titanlike.core.config.groups.computation import Fsdp, Numerics, Precision
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.distributed.placement import in_float8
from titanlike.core.launch.worker import Worker
from titanlike.core.training.build import build
from titanlike.core.training.device_batches import to_device
from titanlike.planning.estimate import make_estimate
from titanlike.planning.estimate_text import as_data
from titanlike.planning.known_hardware import link_of, sharded, shipped

pytestmark = pytest.mark.slow

# 4 microbatches of 2 sequences of 128 tokens a rank, in fp32; 4 heads, 2 of keys and values, of 32
WORDS = "data=synthetic device=cpu hardware=h100_sxm seq_len=128 schedule.microbatches=4"
SIZES = "model.hidden_size=128 model.num_hidden_layers=2 model.num_attention_heads=4 model.num_key_value_heads=2"
MICROBATCHES, ROWS, LAYERS, HEAD, HEADS, KV_HEADS, DIM = 4, 2, 2, 32, 4, 2, 128


def test_context_parallel_traffic_is_that_of_attention() -> None:
    words = f"{WORDS} {SIZES} batch_size=8 cp=4".split()
    plans = {method: planned(*words, f"context_parallel={method}") for method in EXCHANGED}
    for method, each in EXCHANGED.items():
        assert plans[method].traffic(0)["cp"] == MICROBATCHES * LAYERS * each, method
        assert plans[method].times.parts(0)["cp exchanges"] > 0
    # a block that is recomputed exchanges its forward again
    words += ["context_parallel=gather", "activation_checkpoint=full"]
    assert 2 * planned(*words).traffic(0)["cp"] == 3 * plans["gather"].traffic(0)["cp"]


TOKENS = 128 // 4 * ROWS  # of a rank
KEYS_AND_VALUES = 2 * TOKENS * KV_HEADS * HEAD
EXCHANGED = {  # bytes of a layer and a microbatch
    "gather": 4 * 3 * KEYS_AND_VALUES * 2,  # of those of 3 others; and the sums of their gradients
    "ring": 4 * (3 + 3 + 4) * KEYS_AND_VALUES,  # 3 times, 3 times again, and gradients all round
    # 3 of 4 parts of queries, of keys and values (each twice: 4 heads for 4 ranks), of results
    "ulysses": 4 * (HEADS + 2 * KV_HEADS * 2 + HEADS) * HEAD * TOKENS * 3 // 4 * 2,
}


def test_stages_on_the_same_rank_send_nothing() -> None:
    """Activations to the next stage, their gradients back; the turn of a V stays on its rank."""
    words = f"{WORDS} {SIZES} model.num_hidden_layers=4 batch_size=8 pp=2"
    message = 4 * ROWS * 128 * DIM
    for schedule, count in (("1f1b", 1), ("vhalf", 2)):
        estimate = planned(*words.split(), f"schedule={schedule}")
        sent = [estimate.traffic(rank)["messages"] for rank in (0, 1)]
        assert sent == [MICROBATCHES * message * count] * 2, schedule


def test_tokens_go_to_experts_and_experts_are_sharded_over_fewer_ranks() -> None:
    """8 experts of 176, 2 of them a token; ep=2 of 4 ranks."""
    words = f"{WORDS} model=moe_tiny model.num_hidden_layers=2 batch_size=32 dp=4 ep=2 fsdp.zero=1".split()
    estimate = planned(*words)
    # a copy for each rank, of which half are for others: tokens with two weights, and results
    sent = [128 * ROWS * 3 // 2 * row * 4 // 2 for row in (DIM + 2, DIM)]
    # there and back, twice
    assert estimate.traffic(0)["ep"] == MICROBATCHES * LAYERS * 2 * sum(sent)
    words.append("activation_checkpoint=selective")  # which keeps what was exchanged
    kept, again = planned(*words), planned(*words, "activation_checkpoint.save=[aten.*mm]")
    for recomputed, times in ((kept, 4), (again, 6)):
        assert recomputed.traffic(0)["ep"] == MICROBATCHES * LAYERS * sum(sent) * times // 2
    times = [found.times.parts(0)["recomputation"] for found in (again, kept)]
    assert times[0] - times[1] > estimate.times.parts(0)["ep exchanges"] / 2
    words.pop()
    held = LAYERS * 4 * 3 * 176 * DIM  # parameters of 4 experts
    assert estimate.traffic(0)["expert_gathered"] == 4 * held // 2
    assert estimate.traffic(0)["expert_reduced"] == 4 * held // 2
    others = estimate.plan.stage_numel(0) - held
    assert estimate.traffic(0)["gathered"] == 4 * others * 3 // 4
    alone = planned(*words, "ep=1")
    assert alone.traffic(0)["ep"] == alone.traffic(0)["expert_gathered"] == 0
    assert alone.traffic(0)["gathered"] == 4 * (others + 2 * held) * 3 // 4
    assert estimate.fullest < max(alone.memory_bytes)


def test_weights_gathered_in_float8_count_one_byte_each() -> None:
    """Those of linear layers with tensorwise scales, in traffic, time and memory."""
    words = f"{WORDS} {SIZES} batch_size=16 dp=2 fsdp.zero=1".split()
    bf16, rows, tensors = (
        planned(*words, *f"precision={one}".split())
        for one in ("bf16", "float8 precision.recipe=rowwise", "float8")
    )
    layers = [m for m in tensors.plan.model_graph.model.modules() if in_float8(m)]
    float8 = sum(layer.weight.numel() for layer in layers)
    assert len(layers) == 7 * LAYERS
    gathered = [plan.traffic(0)["gathered"] for plan in (bf16, rows, tensors)]
    assert gathered[0] == gathered[1] == gathered[2] + float8 // 2
    seconds = [plan.times.stages[0].gather for plan in (bf16, rows, tensors)]
    assert seconds[0] == seconds[1] > seconds[2]
    held = [plan.memory[0].gathered for plan in (rows, tensors)]
    assert held[0] - held[1] == float8


@pytest.mark.slow
def test_a_plan_reports_the_memory_of_experts() -> None:
    """8 experts of 176 in each of 2 layers, with fp32 weights and two moments: over dp's ranks, of
    which tp's have the same, or over both."""
    words = f"{WORDS} model=moe_tiny model.num_hidden_layers=2 batch_size=32 dp=4 tp=2".split()
    one = LAYERS * 3 * 176 * DIM * 12
    for ep, on_a_rank in ((4, 2), (8, 1), (2, 4 / 2)):
        [rank] = as_data(planned(*words, f"ep={ep}"))["ranks"]
        assert rank["expert_bytes"] == on_a_rank * one, ep


@pytest.mark.slow
def test_measured_collectives_count_inside_a_node_alone() -> None:
    """A measured profile knows what collectives and FSDP reach, which messages do not."""
    estimate = planned(*f"{WORDS} {SIZES} batch_size=64 dp=2 tp=2".split())
    config = estimate.config
    slow = replace(estimate.hardware, collective_bandwidth=1e9, gather_bandwidth=1e8)
    for nodes, hardware in ((1, slow), (2, replace(slow, devices_per_node=2))):
        tp, shard = (link_of(config, axis, hardware) for axis in ("tp", "shard"))
        assert (tp.nodes, shard.nodes) == (1, nodes)
        assert tp.bandwidth == pytest.approx(hardware.link_efficiency * 1e9)
        gathers = sharded(shard, hardware.gather_bandwidth)
        assert (gathers.bandwidth == 1e8) == (nodes == 1)
    # each of two ranks sends its half of what it gathers
    numel = estimate.plan.stage_numel(0)
    other = make_estimate(config, slow).times.stages[0]
    assert other.gather == pytest.approx(numel * 4 / 2 / 1e8)
    whole = make_estimate(config, replace(slow, gather_bandwidth=None)).times.stages[0]
    assert other.reduce == whole.reduce > estimate.times.stages[0].reduce


def test_a_core_that_computes_sends_too() -> None:
    """Of a device that does not work by itself: ZeRO 3's gathers are not hidden."""
    hardware = replace(shipped("cpu"), gather_bandwidth=1e8, reduce_bandwidth=1e8)
    config = tiny(dp=2, schedule=Schedule("1f1b", 2), fsdp=Fsdp(3), layers=2)
    estimate = make_estimate(config, hardware)
    free = make_estimate(config, replace(hardware, gather_bandwidth=1e15, reduce_bandwidth=1e15))
    one = estimate.plan.stage_numel(0) * 4 / 2 / 1e8
    for kind, count in (("F", 1), ("B", 2)):
        both = [each.times.stages[0].of(kind).device for each in (estimate, free)]
        assert both[0] - both[1] == pytest.approx(count * one)


def test_links_are_those_of_neighbours_first() -> None:
    """Of 64 GPUs in nodes of 8: those of tp are together, of cp and ep next to them."""
    config, hardware = tiny(dp=16, cp=4, tp=4), shipped("h100_sxm")
    tp, cp, shard = (link_of(config, axis, hardware) for axis in ("tp", "cp", "shard"))
    assert (tp.nodes, cp.nodes, shard.nodes) == (1, 2, 32)
    reached = hardware.link_efficiency
    assert tp.bandwidth == pytest.approx(reached * hardware.node_bandwidth)
    # a ring of 2 nodes leaves each over the links of two ranks; its slowest step is one of them
    assert cp.bandwidth == pytest.approx(reached * 2 * hardware.network_bandwidth)
    assert cp.to_next == pytest.approx(reached * hardware.network_bandwidth)
    # of what goes to three others, two are elsewhere
    assert cp.to_all == pytest.approx(reached * hardware.network_bandwidth * 3 / 2)


# --- numerics=exact -------------------------------------------------------------------------------


def exact(pp: int = 1, dp: int = 1, zero: Any = 1, grain: int = 1, **changes: Any) -> Config:
    more = {"fsdp": Fsdp(zero), "layers": 2, "numerics": Numerics("exact", grain)} | changes
    return tiny(pp=pp, dp=dp, **more)


def sums_sent(config: Config, worker: Worker) -> Counter[str]:
    """Bytes that a rank sends of gradients in a step, as the kinds of a plan's traffic."""
    sent: Counter[str] = Counter()
    mesh = open_mesh(config, worker)
    kinds = {mesh.axes.get_group("shard"): "reduced"}
    if mesh.expert_axes is not None:
        kinds[mesh.expert_axes["expert_shard"].get_group()] = "reduced"
    if config.replicate > 1:
        kinds[replicas := mesh.axes.get_group("replicate")] = "replicated"
    exchange, gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def exchanging(out: Tensor, x: Tensor, *sizes: Any, group: Any, **more: Any) -> Any:
        if group in kinds:
            others = (n for at, n in enumerate(sizes[1]) if at != dist.get_rank(group))
            sent[kinds[group]] += sum(others) * x.itemsize
        return exchange(out, x, *sizes, group=group, **more)

    def gathering(out: Tensor, x: Tensor, group: Any, *more: Any, **options: Any) -> Any:
        if config.replicate > 1 and group is replicas:
            sent["replicated"] += (config.replicate - 1) * x.nbytes
        return gather(out, x, group, *more, **options)

    with (
        patch.object(dist, "all_to_all_single", exchanging),
        patch.object(dist, "all_gather_into_tensor", gathering),
    ):
        run = build(config, mesh)
        stream = batches(open_data(config).train, config, dp_rank=mesh.dp_rank)
        run.pipeline.train(to_device(next(stream), mesh, config))
    close_mesh()
    return sent


LAYOUTS = {"dp=2, ZeRO 2": exact(dp=2, zero=2), "replicas": exact(dp=4, replicate=2, grain=2)}
MORE_LAYOUTS = {
    "pp=2 dp=2": exact(2, 2),
    "dp=2, ZeRO 3, bf16": exact(dp=2, zero=3, precision=Precision("bf16")),
    "replicas, ZeRO 3": exact(dp=4, zero=3, replicate=2, grain=2),
    "dp=3": exact(dp=3, batch_size=18),
    "replicas alone": exact(dp=2, replicate=2),
    "experts": exact(dp=4, ep=2, model=moe(num_hidden_layers=2)),
    "experts, ZeRO 2": exact(dp=4, zero=2, ep=2, model=moe(num_hidden_layers=2)),
    "experts, one microbatch": exact(dp=2, ep=2, grain=8, model=moe(num_hidden_layers=2)),
    "tied": exact(dp=2, family="gpt2", tied=True),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS, most=1))
def test_traffic_of_exact_reductions_is_as_planned(config: Config, tmp_path: Path) -> None:
    sent = run_world(sums_sent, config, tmp_path)
    estimate = make_estimate(config, shipped("cpu"))
    each = config.world_size // config.pp
    for rank in range(config.pp):
        planned = estimate.traffic(rank)
        planned["reduced"] += planned["expert_reduced"]
        for kind in ("reduced", "replicated"):
            most = max(real[kind] for real in sent[rank * each :][:each])
            # rows of a parameter are filled up to a multiple of the ranks
            assert planned[kind] == pytest.approx(most, rel=0.05 if config.dp == 3 else 0)
            wanted = config.shards > 1 if kind == "reduced" else config.replicate > 1
            assert bool(planned[kind]) == wanted, kind
