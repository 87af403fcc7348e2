"""Plans of published runs beside what was measured of them: `pytest -m grid -s` prints all.

Fitted to `ROWS` were five numbers that all of them share, whatever the device or program:
which share of the peaks of matrix products, attention (FlashAttention 2), memory and links is
reached (the defaults of `config.hardware.Hardware`), and what compiling leaves of the bytes of
operators that are no products. All else is of data sheets, counted, or of measured kernels (notes
in `conf/hardware` and `stage_times.py`). To `LATER`, published.yaml, nothing was fitted.

Attention without a fused kernel, which no config declares, is added to the plan (`_unfused`). float8
is a property of the roofline: the rows are older than float8 with tp.

- Megatron-LM: arXiv 2104.04473, table 1, on A100 of 80 GB in DGX A100s; microbatch sizes and stages
  per rank from its repository, examples/sc21/run_table_1.sh. FLOPs are those of its section 5.1, with
  the recomputation.
- torchtitan: benchmarks/llama3_h100_202412_torchtitan.md and
  asyncTP_llama3_h100_2025-06_torchtitan.md in its repository, and arXiv 2410.06511; tokens/s per GPU,
  on H100 of 96 GB and 2.4 TB/s at 500 W. The 405B has as many microbatches as pipeline ranks,
  torchtitan's default then. Its selective recomputation runs every second product again, and all
  in float8, which it does not save. Its float8 gathers tp's activations in one byte an element.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cells import cells
from support.command_lines import examined, problems_of
from titanlike.core.config.groups.computation import Float8Precision
from titanlike.core.config.groups.hardware import Hardware
from titanlike.core.config.schema import Config
from titanlike.core.training.train_plan import TrainPlan, make_plan
from titanlike.planning.costs.node_costs import EXPERTS_PRODUCT, Operator
from titanlike.planning.estimate import Estimate, make_estimate
from titanlike.planning.known_hardware import planned_hardware, shipped
from titanlike.planning.stage_times import LayoutTimes, Roofline, Seconds, UnitTimes, unit_times
from titanlike.planning.uncertainty import SPREADS
from titanlike.techniques.mixture.expert_exchange import copies


@dataclass(frozen=True)
class Row:
    name: str
    words: str  # overrides
    measured: float  # tokens/s a GPU, or teraFLOP/s a GPU
    float8: bool = False
    megatron: tuple[int, ...] = ()  # layers, dim
    scores: int = 0  # bytes of the attention scores of a microbatch, where they are in memory
    flops: str = ""  # `measured` is of model FLOPs: as `model` has them
    otherwise: Mapping[str, Any] = field(default_factory=dict)  # published.yaml


def _megatron(
    name: str,
    sizes: tuple[int, int, int],
    mesh: tuple[int, int, int],
    batch: tuple[int, int],
    measured: float,
    stages: int = 1,
) -> Row:
    """sizes: layers, dim, heads; mesh: tp, pp, GPUs; batch: global, of a microbatch."""
    (layers, dim, heads), (tp, pp, gpus), (size, microbatch) = sizes, mesh, batch
    dp = gpus // (tp * pp)
    model = f"model=gpt2 model.n_layer={layers} model.n_embd={dim} model.n_head={heads}"
    model += " model.vocab_size=51200 model.n_positions=2048 model.tie_word_embeddings=false seq_len=2048"
    schedule = "schedule=1f1b"
    if stages > 1:
        schedule = f"schedule=interleaved1f1b schedule.stages_per_rank={stages}"
    layout = f"pp={pp} tp={tp} dp={dp} batch_size={size} fsdp.zero=1 replicate={dp}"
    layout += f" schedule.microbatches={size // dp // microbatch} tp_sequence=false"
    each = ",".join([str(layers // (pp * stages))] * pp * stages)
    layout += f" split=balance split.balance=[{each}]" if pp > 1 else ""
    more = "precision=bf16 activation_checkpoint=full hardware=a100_80g compile=true"
    scores = 2 * heads // tp * microbatch * 2048**2
    words = f"{model} {schedule} {layout} {more}"
    return Row(f"Megatron-LM {name}", words, measured, False, (layers, dim), scores)


LATER: list[Row] = []
ROWS = [
    _megatron("1.7B", (24, 2304, 24), (1, 1, 32), (512, 16), 137),
    _megatron("3.6B", (30, 3072, 32), (2, 1, 64), (512, 16), 138),
    _megatron("7.5B", (36, 4096, 32), (4, 1, 128), (512, 16), 142),
    _megatron("18.4B", (40, 6144, 48), (8, 1, 256), (1024, 8), 135),
    _megatron("39.1B", (48, 8192, 64), (8, 2, 512), (1536, 4), 138),
    _megatron("76.1B", (60, 10240, 80), (8, 4, 1024), (1792, 2), 140, 3),
    _megatron("145.6B", (80, 12288, 96), (8, 8, 1536), (2304, 2), 148, 2),
    _megatron("310.1B", (96, 16384, 128), (8, 16, 1920), (2160, 1), 155, 2),
    _megatron("529.6B", (105, 20480, 128), (8, 35, 2520), (2520, 1), 163, 3),
    _megatron("1008B", (128, 25600, 160), (8, 64, 3072), (3072, 1), 163),
]


for _row in yaml.safe_load(Path(__file__).with_name("published.yaml").read_text("utf-8")):
    _row["words"] = f"compile=true data=synthetic {_row['words']}"
    (ROWS if _row.pop("fitted", False) else LATER).append(Row(**_row))


def planned(row: Row) -> Estimate:
    checked = examined(*row.words.split())
    assert checked.config is not None and not checked.problems, checked.problems
    config, device = checked.config, planned_hardware(checked.config)
    plan = make_plan(config)
    return make_estimate(config, device, plan, times=times_of(row, config, plan, device))


def times_of(row: Row, config, plan, device: Hardware) -> LayoutTimes:
    as_float8 = replace(config, precision=Float8Precision()) if row.float8 else config
    roofline = Roofline.of(as_float8, device)
    units = unit_times(config, plan, roofline)
    blocks = {unit.name for unit in plan.model_graph.units if unit.block}
    if row.scores:
        more = row.scores / (device.memory_bandwidth * device.memory_efficiency)
        units = {n: _unfused(u, more) if n in blocks else u for n, u in units.items()}
    if row.name.startswith("torchtitan") and "activation_checkpoint=selective" in row.words:
        share = 1.0 if roofline.scaled else 0.5
        for name, operators in products(plan).items():
            again = roofline.seconds(operators, True)
            units[name] = replace(units[name], recompute=units[name].recompute.plus(again, share))
    if row.otherwise:
        units |= {name: _otherwise(row, units[name], config, plan, device) for name in blocks}
    layout = replace(plan.memory().layout, recomputed=plan.recomputed.blocks)
    times = LayoutTimes(config, layout, device, units)
    if hidden := row.otherwise.get("hidden", {}).get("dp"):
        times.stages = [
            replace(stage, gather=(1 - hidden) * stage.gather, reduce=(1 - hidden) * stage.reduce)
            for stage in times.stages
        ]
    return times


def _otherwise(
    row: Row, unit: UnitTimes, config: Config, plan: TrainPlan, device: Hardware
) -> UnitTimes:
    """A block as `Row.otherwise` says."""
    hidden, sent = row.otherwise.get("hidden", {}), {}
    if by := row.otherwise.get("copies"):
        mixture = next(m for m in plan.model_graph.model.modules() if hasattr(m, "routing"))
        routing, nodes = mixture.routing, config.ep // device.devices_per_node
        top_k = routing.num_experts_per_tok
        # a token's experts are in some of the groups, which are spread over nodes in order
        by_node = copies(nodes * routing.topk_group // routing.n_group, top_k)
        number = {"node": by_node, "expert": top_k, "one": 1}[by]
        sent["ep"] = number / copies(config.ep, top_k)
    parts = (unit.forward,), (unit.recompute,), (unit.input_gradient, unit.weight_gradient)
    waits = [{axis: s * sent.get(axis, 1.0) for axis, s in way.items()} for way in unit.waits]
    waits = [
        {
            axis: seconds - min(hidden.get(axis, 0.0) * seconds, sum(part.device for part in way))
            for axis, seconds in of_way.items()
        }
        for of_way, way in zip(waits, parts, strict=True)
    ]
    host = row.otherwise.get("host", 0.0) / device.host_seconds if unit.experts else 0.0
    forward, back = unit.forward, unit.input_gradient
    forward = forward._replace(launches=forward.launches + host / 3)
    back = back._replace(launches=back.launches + host * 2 / 3)
    return replace(unit, waits=waits, forward=forward, input_gradient=back)


def products(plan: TrainPlan) -> dict[str, Counter[Operator]]:
    """Matrix products of the forward of each block."""
    found: dict[str, Counter[Operator]] = {}
    costs = plan.memory().unit_costs
    assert costs is not None
    for unit, calls in zip(plan.model_graph.units, costs.operators(), strict=True):
        if unit.block:
            found[unit.name] = Counter()
            for call in calls:
                found[unit.name].update(
                    {o: n for o, n in call.forward.items() if o.name == "aten.mm"}
                )
    return found


def _unfused(times: UnitTimes, seconds: float) -> UnitTimes:
    """Where scores go to memory and back; seconds: for their bytes once.

    Written, scaled and masked (read, written), dropped out (read, written), read; in the backward
    their gradients, too.
    """
    each = Seconds(memory=seconds)
    return replace(
        times,
        forward=times.forward.plus(each, 6),
        recompute=times.recompute.plus(each, 6),
        input_gradient=times.input_gradient.plus(each, 10),
    )


def predicted(row: Row, estimate: Estimate) -> float:
    """In the units of what was measured."""
    if row.flops:
        assert estimate.plan.flops_per_token is not None
        return estimate.tokens_per_second_per_gpu * estimate.plan.flops_per_token / 1e12
    if not row.megatron:
        return estimate.tokens_per_second_per_gpu
    layers, dim = row.megatron
    flops = 96 * estimate.tokens * layers * dim**2
    flops *= 1 + estimate.config.seq_len / (6 * dim) + 51200 / (16 * layers * dim)
    return flops / estimate.step_seconds / estimate.config.world_size / 1e12


def row(name: str) -> Row:
    return next(row for row in ROWS if row.name.endswith(name))


@pytest.mark.grid
def test_all_published_runs_are_predicted() -> None:
    """What a schedule gains the 405B, too: 100 tokens/s a GPU with 1F1B, 128 interleaved."""
    sizes = [abs(error) for _, error in table(ROWS)]
    assert statistics.median(sizes) < 0.05 and max(sizes) < 0.12
    one, loops = row("1f1b, float8"), row("interleaved, float8")
    gain = predicted(loops, planned(loops)) / predicted(one, planned(one))
    assert gain == pytest.approx(1.28, rel=0.05)
    fast = row("torchtitan 8B, 8")
    slower = replace(fast, words=fast.words.replace("h100_sxm", "h100_pcie"))
    assert planned(slower).step_seconds > 1.2 * planned(fast).step_seconds


@pytest.mark.grid
def test_four_of_five_runs_that_nothing_was_fitted_to_are_within_the_range_of_their_plans() -> None:
    found = table(LATER)
    assert Counter(kind for kind, _ in found) == {k: each.rows for k, each in SPREADS.items()}
    inside = [SPREADS[k].low <= 1 / (1 + error) <= SPREADS[k].high for k, error in found]
    assert sum(inside) >= 0.8 * len(inside)
    sizes = [abs(error) for _, error in found]
    assert statistics.median(sizes) < 0.06 and sum(size < 0.15 for size in sizes) >= 24


@pytest.mark.parametrize("later", cells({row.name: row for row in LATER}, {}, most=6))
def test_the_largest_published_runs_are_a_command_line_each(later: Row) -> None:
    assert problems_of(later.words.split()) == []


@pytest.mark.parametrize("float8", [True, False])
def test_published_speeds_of_matmuls_are_predicted(float8: bool) -> None:
    """Groups, rows, columns, inner dimension: TFLOP/s. In float8 on H800, DeepGEMM's README of
    February 2025; in bf16 of experts on H100, CUTLASS in Transformer Engine's pull request 2045."""
    published = {(8, 4096, 768, 2048): 650, (16, 2048, 768, 2048): 637}
    if float8:
        published = {(1, 4096, 24576, 1536): 990, (1, 4096, 32768, 512): 590}
        published |= {(1, 4096, 7168, 16384): 1358, (1, 4096, 4096, 7168): 1304}
        published |= {(1, 4096, 7168, 2048): 1025, (4, 8192, 4096, 7168): 1297}
        published |= {(4, 8192, 7168, 2048): 1099, (8, 4096, 7168, 2048): 1093}
    roofline = Roofline(shipped("h100_sxm"), True, True, Float8Precision() if float8 else None)
    for (groups, *sizes), teraflops in published.items():
        flops = 2 * groups * math.prod(sizes)
        name = EXPERTS_PRODUCT if groups > 1 else "aten.mm"
        operator = Operator(name, flops, 0, 2, tuple(sizes), groups)
        found = roofline.seconds({operator: 1}, True)
        assert flops / (found.matmuls + found.experts) == pytest.approx(teraflops * 1e12, rel=0.14)


def table(rows: list[Row]) -> list[tuple[str, float]]:
    """Kinds of run and errors; printed, with shares of the step of the slowest pipeline rank."""
    print(f"\n{'run':<54}{'published':>10}{'predicted':>11}{'error':>8}")
    found = []
    for row in rows:
        estimate = planned(row)
        value = predicted(row, estimate)
        error = value / row.measured - 1
        print(f"{row.name:<54}{row.measured:>10.1f}{value:>11.1f}{error:>8.1%}")
        shares = {**estimate.shares(estimate.slowest), "bubble": estimate.simulation.bubble}
        print("    " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
        found.append((estimate.kind, error))
    median = statistics.median(abs(error) for _, error in found)
    print(f"median of the errors' sizes: {median:.1%}")
    return found
