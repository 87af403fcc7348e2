"""Plans of published runs beside what was measured of them: `pytest -m grid -s` prints all.

Fitted to the whole table were five numbers that all rows share, whatever the device or program:
which share of the peaks of matrix products, attention (FlashAttention 2), memory and links is
reached (the defaults of `config.hardware.Hardware`), and what compiling leaves of the bytes of
operators that are no products. All else is of data sheets, or counted; the share of cuDNN's
attention on Hopper, which later rows have, was measured.

Attention without a fused kernel, which no config declares, is added to the plan (`_unfused`). float8
is a property of the roofline: the rows are older than float8 with tp.

- Megatron-LM: arXiv 2104.04473, table 1, on A100 of 80 GB in DGX A100s; microbatch sizes and stages
  per rank from its repository, examples/sc21/run_table_1.sh. FLOPs are those of its section 5.1, with
  the recomputation.
- torchtitan: benchmarks/llama3_h100_202412_torchtitan.md and
  asyncTP_llama3_h100_2025-06_torchtitan.md in its repository, and arXiv 2410.06511; tokens/s per GPU,
  on H100 of 96 GB and 2.4 TB/s at 500 W. The 405B has as many microbatches as pipeline ranks,
  torchtitan's default then. Its selective recomputation runs every second product again, and all
  in float8, which it does not save.
- `LATER`, to which nothing was fitted: torchtitan on H200,
  benchmarks/llama3_8b_h200_2025-06_torchtitan.md; Llama 3 405B, arXiv 2407.21783, table 4, teraFLOP/s
  per GPU. What the latter does not say (stages per rank, FLOPs of attention) is guessed: 7 of a block
  or two, and all of attention's.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from support.command_lines import examined, problems_of
from titanlike.core.config.groups.computation import Float8Precision
from titanlike.core.config.groups.hardware import Hardware
from titanlike.core.training.train_plan import TrainPlan, make_plan
from titanlike.planning.costs.node_costs import Operator
from titanlike.planning.estimate import Estimate, make_estimate
from titanlike.planning.known_hardware import planned_hardware
from titanlike.planning.stage_times import LayoutTimes, Roofline, Seconds, UnitTimes, unit_times


@dataclass(frozen=True)
class Row:
    name: str
    words: str  # overrides
    measured: float  # tokens/s a GPU, or teraFLOP/s a GPU
    float8: bool = False
    megatron: tuple[int, ...] = ()  # layers, dim
    scores: int = 0  # bytes of the attention scores of a microbatch, where they are in memory
    teraflops: bool = False  # `measured` is of model FLOPs


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


_FLASH_2 = " hardware.attention_efficiency=0.36 "  # FlashAttention 2, on Hopper
_GRAND_TETON = (
    "hardware=h100_sxm hardware.memory=103079215104 hardware.memory_bandwidth=2.4e12"
    " hardware.matmul_efficiency=0.56 precision=bf16 seq_len=8192"  # at 500 W, not 700
) + _FLASH_2


def _titan(name: str, words: str, measured: float, float8: bool = False) -> Row:
    return Row(f"torchtitan {name}", f"{words} {_GRAND_TETON}", measured, float8)


_8B = "model=llama3_8b activation_checkpoint=selective schedule.microbatches=1 fsdp.zero=3 "
_8B_TP = "model=llama3_8b activation_checkpoint=selective fsdp.zero=3 dp=8 tp=8 batch_size=96 "
_8B_TP += "schedule.microbatches=1 compile=true "
_70B = "model=llama3_70b activation_checkpoint=full fsdp.zero=3 dp=32 tp=8 batch_size=512 "
_70B += "schedule.microbatches=1 compile=true "
_405B = "model=llama3_405b activation_checkpoint=full fsdp.zero=1 dp=8 tp=8 pp=8 batch_size=256 "
_405B += "schedule.microbatches=8 compile=true tp_async=true "

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
    _titan("8B, 8", _8B + "dp=8 batch_size=16", 5762),
    _titan("8B, 8, compile", _8B + "dp=8 batch_size=16 compile=true", 6667),
    _titan("8B, 8, compile, float8", _8B + "dp=8 batch_size=16 compile=true", 8532, True),
    _titan("8B, 128", _8B + "dp=128 batch_size=256", 5605),
    _titan("8B, 128, compile", _8B + "dp=128 batch_size=256 compile=true", 6514),
    _titan("8B, 128, compile, float8", _8B + "dp=128 batch_size=256 compile=true", 8380, True),
    _titan("8B, 64, tp", _8B_TP, 4378),
    _titan("8B, 64, async tp", _8B_TP + "tp_async=true", 4809.4),
    _titan("8B, 64, tp, float8", _8B_TP, 5078.1, True),
    _titan("70B, 256, tp", _70B, 597.3),
    _titan("70B, 256, async tp", _70B + "tp_async=true", 652.4),
    _titan("70B, 256, tp, float8", _70B, 809.8, True),
    _titan("405B, 512, 1f1b, float8", _405B + "schedule=1f1b", 100, True),
    _titan("405B, 512, interleaved, float8", _405B + "schedule=interleaved1f1b", 128, True),
]


_H200 = "model=llama3_8b hardware=h200 precision=bf16 seq_len=8192 activation_checkpoint=selective "
_H200 += "schedule.microbatches=1 fsdp.zero=3 compile=true " + _FLASH_2
_META = "model=llama3_405b hardware=h100_sxm precision=bf16 tp=8 pp=16 schedule=interleaved1f1b "
_META += "schedule.stages_per_rank=7 fsdp.zero=1 " + _FLASH_2


def _meta(name: str, words: str, measured: float) -> Row:
    return Row(f"Llama 3 405B, {name}", _META + words, measured, teraflops=True)


LATER = [
    Row("torchtitan H200 8B, 32, float8", _H200 + "dp=32 batch_size=64", 10938, True),
    Row("torchtitan H200 8B, 64, float8", _H200 + "dp=64 batch_size=128", 10753, True),
    _meta("8192", "dp=64 batch_size=2048 seq_len=8192 schedule.microbatches=32", 430),
    _meta("16384", "dp=128 batch_size=2048 seq_len=8192 schedule.microbatches=16", 400),
    _meta(
        "16384, cp",
        "dp=8 cp=16 context_parallel=gather batch_size=128 seq_len=131072 schedule.microbatches=16",
        380,
    ),
]

_LOOPS = "schedule=interleaved1f1b schedule.stages_per_rank="
# Megatron Bridge on H100, docs/performance-summary-archive.md in its repository: containers 26.02,
# of DeepSeek-V3 25.09. It does not say what is recomputed, nor how layers are dealt to stages.
BRIDGE = {
    "Llama 3.1 405B, 1024": "model=llama3_405b seq_len=8192 tp=8 pp=8 cp=2 dp=8 batch_size=1536 "
    f"schedule.microbatches=192 {_LOOPS}8",
    "Qwen3 235B, 256": "model=qwen3_235b_a22b seq_len=4096 tp=2 pp=8 dp=16 ep=32 batch_size=8192 "
    f"schedule.microbatches=512 {_LOOPS}4",
    "DeepSeek-V3, 1024": "model=deepseek_v3 seq_len=4096 tp=2 pp=8 dp=64 ep=64 batch_size=8192 "
    f"schedule.microbatches=128 {_LOOPS}4",
    "GPT-OSS 120B, 64": "model=gpt_oss_120b seq_len=4096 pp=4 dp=16 ep=8 batch_size=1280 "
    "schedule.microbatches=80 precision=bf16",
    "Qwen3 30B, 16": "model=qwen3_30b_a3b seq_len=4096 pp=2 dp=8 ep=8 batch_size=1024 "
    f"schedule.microbatches=128 {_LOOPS}12",
}


def planned(row: Row, **hardware: float) -> Estimate:
    """hardware: numbers to change."""
    checked = examined(*row.words.split())
    assert checked.config is not None and not checked.problems, checked.problems
    device = replace(planned_hardware(checked.config), **hardware)
    config = replace(checked.config, hardware=device)
    estimate = make_plan(config)
    return make_estimate(config, device, estimate, times=times_of(row, config, estimate, device))


def times_of(row: Row, config, estimate, device: Hardware) -> LayoutTimes:
    scaled = Float8Precision() if row.float8 else None
    roofline = replace(Roofline.of(config, device), scaled=scaled)
    units = unit_times(config, estimate, roofline)
    if row.scores:
        more = row.scores / (device.memory_bandwidth * device.memory_efficiency)
        blocks = {unit.name for unit in estimate.model_graph.units if unit.block}
        units = {n: _unfused(u, more) if n in blocks else u for n, u in units.items()}
    if row.name.startswith("torchtitan") and "activation_checkpoint=selective" in row.words:
        share = 1.0 if row.float8 else 0.5
        for name, operators in products(estimate).items():
            again = Seconds(share * roofline.seconds(operators, True).device)
            units[name] = replace(units[name], recompute=units[name].recompute + again)
    layout = replace(estimate.memory().layout, recomputed=estimate.recomputed.blocks)
    return LayoutTimes(config, layout, device, units)


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
    once, back = Seconds(6 * seconds), Seconds(10 * seconds)
    return replace(
        times,
        forward=times.forward + once,
        recompute=times.recompute + once,
        input_gradient=times.input_gradient + back,
    )


def predicted(row: Row, estimate: Estimate) -> float:
    """In the units of what was measured."""
    if row.teraflops:
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


@pytest.mark.slow
@pytest.mark.grid
def test_all_published_runs_are_predicted() -> None:
    """Those that nothing was fitted to, too; and what a schedule gains the 405B: 100 tokens/s a GPU
    with 1F1B, 128 interleaved."""
    for rows, most in (ROWS, 0.05), (LATER, 0.05):
        median, largest = table(rows)
        assert median < most and largest < 0.12
    one, loops = row("1f1b, float8"), row("interleaved, float8")
    gain = predicted(loops, planned(loops)) / predicted(one, planned(one))
    assert gain == pytest.approx(1.28, rel=0.05)
    fast = row("torchtitan 8B, 8")
    slower = replace(fast, words=fast.words.replace("h100_sxm", "h100_pcie"))
    assert planned(slower).step_seconds > 1.2 * planned(fast).step_seconds


@pytest.mark.parametrize("name", BRIDGE)
def test_the_largest_published_runs_are_a_command_line_each(name: str) -> None:
    more = "fsdp.zero=1 compile=true hardware=h100_sxm data=synthetic activation_checkpoint=full"
    precision = [] if "precision=" in BRIDGE[name] else ["precision=float8"]
    assert problems_of([*BRIDGE[name].split(), *more.split(), *precision]) == []


def table(rows: list[Row]) -> tuple[float, float]:
    """(the median of the errors' sizes, the largest); printed."""
    print(f"\n{'run':<42}{'published':>10}{'predicted':>11}{'error':>8}")
    errors = []
    for row in rows:
        value = predicted(row, planned(row))
        errors.append(value / row.measured - 1)
        print(f"{row.name:<42}{row.measured:>10.1f}{value:>11.1f}{errors[-1]:>8.1%}")
    sizes = [abs(error) for error in errors]
    print(f"median of the errors' sizes: {statistics.median(sizes):.1%}")
    return statistics.median(sizes), max(sizes)
