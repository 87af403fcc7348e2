"""`tools/plan.py`: what a command line will cost, said, drawn and searched for without a device."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.commands import command
from support.models import tiny
from support.plans import plan, planned
from titanlike.core.config.groups.computation import (
    Float8Precision,
    Mxfp8Precision,
    ScaledPrecision,
)
from titanlike.core.config.schema import Config
from titanlike.planning.costs.node_costs import EXPERTS_PRODUCT, Operator
from titanlike.planning.estimate_text import as_data, as_text, chart_of
from titanlike.planning.known_hardware import link_of, shipped
from titanlike.planning.search import CostCache, ScoredLayout, score
from titanlike.planning.stage_times import Roofline
from titanlike.watch.chart import Chart, Span, write_trace
from titanlike.watch.chart_picture import draw

TINY = [
    "data=synthetic",
    "device=cpu",
    "hardware=h100_sxm",
    "model.num_hidden_layers=4",
    "batch_size=16",
]


def test_the_line_that_trains_is_the_line_that_plans(tmp_path: Path) -> None:
    words = [*TINY, "pp=2", "dp=2", "schedule=interleaved1f1b", "seq_len=64", "--json"]
    done = command(*words, cwd=tmp_path, tool="tools/plan.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] and 0 < found["mfu"] < 0.7
    assert len(found["memory_bytes"]) == 2 and max(found["memory_bytes"]) <= 80 * 2**30
    tokens = 16 * 64 / found["step_seconds"] / 4
    assert found["tokens_per_second_per_gpu"] == pytest.approx(tokens)
    assert 0 < found["bubble"] < 0.5 and len(found["ranks"]) == 2 and len(found["stages"]) == 4


def test_a_table_fits_into_a_terminal() -> None:
    words = "pp=2 dp=2 schedule=zbvzerobubble schedule.microbatches=8 activation_checkpoint=full"
    plan = planned(*TINY, *words.split(), "hardware.memory=11MiB")
    assert plan.fits
    for columns in (80, 160):
        text = as_text(plan, "", columns)
        assert "fits" in text and "queued" in text and "reduce-scatters of gradients" in text
        assert max(map(len, text.splitlines())) <= columns
    parts = [parts.total for parts in plan.memory]
    assert parts == plan.memory_bytes and min(min(vars(p).values()) for p in plan.memory) >= 0
    shares = plan.shares(plan.slowest)
    assert sum(shares.values()) == pytest.approx(1, abs=0.01) and min(shares.values()) >= 0


def test_a_plan_says_how_far_published_runs_of_its_kind_were_from_theirs() -> None:
    known, unknown = planned(*TINY, "precision=bf16"), planned(*TINY)
    found = as_data(known)["interval"]
    assert found["kind"] == "dense bf16" and found["rows"] > 0
    assert found["speed"][0] < known.speed < found["speed"][1]
    low, high = found["step_seconds"]
    assert low < known.step_seconds < high
    assert "range   unknown" in as_text(unknown) and "(dense fp32)" in as_text(unknown)
    other = planned(*TINY, "precision=bf16", "hardware=mi300x")
    assert as_data(other)["interval"]["kind"] == "dense bf16 on mi300x" and other.spread is None


def test_a_layout_that_does_not_fit_is_reported_with_one_that_does(capsys) -> None:
    words = ["experiment=llama3_8b", "hardware=a100_40g", "activation_checkpoint=none"]
    code, text, _ = plan(capsys, *words)
    assert code == 1 and "DOES NOT FIT" in text
    assert "activation_checkpoint=fit it would take" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "hardware=none: a plan is made for a device; write hardware=h100_sxm"),
        (["hardware=h100"], "no such choice; choices: a100_40g, a100_80g, b200"),
        (["hardware=cpu", "gpus=4"], "gpus=4: is for a search"),
        (
            ["hardware=cpu", "--picture", "pp=2"],
            "must end in .svg or .png; write --picture plan.svg",
        ),
        (
            ["hardware=cpu", "hardware.memory_efficiency=1.5"],
            "must be at most 1; write hardware.memory_efficiency=0.6",
        ),
        (["search", "hardware=cpu", "gpus=many"], "must be a number of devices; write gpus=64"),
        (
            ["search", *TINY, "gpus=2", "pp=2", "split=balance", "split.balance=[2,3]"],
            "is valid for batch_size=16 (split.balance",
        ),
        (["hardware=cpu", "pp=3", "dp=3"], "does not divide among dp=3"),
    ],
)
def test_mistakes_are_answered_like_those_of_training(capsys, words, said) -> None:
    code, _, errors = plan(capsys, *words)
    assert code == 2 and said in errors, errors


def test_every_choice_that_costs_is_known() -> None:
    """A change of the command line changes the plan in the direction that is known."""
    words = [*TINY, "pp=2", "precision=bf16", "schedule.microbatches=4", "seq_len=1024"]
    base = planned(*words)
    full = planned(*words, "activation_checkpoint=full")
    assert full.step_seconds > base.step_seconds
    assert max(full.memory_bytes) < max(base.memory_bytes)
    assert planned(*words, "compile=true").step_seconds < base.step_seconds
    fewer = planned(*words, "schedule.microbatches=2")
    assert fewer.simulation.bubble > base.simulation.bubble
    resident, offloaded = (
        planned(*words, "dp=2", "batch_size=32", f"fsdp.cpu_offload={off}")
        for off in ("false", "true")
    )
    assert max(offloaded.memory_bytes) < max(resident.memory_bytes)
    assert offloaded.simulation.step > resident.simulation.step
    divided = planned(*words, "tp=2")
    assert divided.traffic(0)["tp"] > 0 and max(divided.memory_bytes) < max(base.memory_bytes)
    assert divided.times.parts(0)["tp exchanges"] > 0
    wide = [*words, "model.hidden_size=512"]  # in narrow layers bf16's casts take longer
    assert planned(*wide, "precision=fp32").step_seconds > planned(*wide).step_seconds
    muon = planned(*words, "optimizer=muon")
    assert muon.times.stages[0].update > base.times.stages[0].update
    # too small microbatches cost more than they fill
    tiny = [
        *TINY,
        "pp=2",
        "batch_size=256",
        "seq_len=16",
        "model.hidden_size=32",
        "model.num_attention_heads=4",
    ]
    few, many = (planned(*tiny, f"schedule.microbatches={count}") for count in (8, 256))
    assert few.step_seconds < many.step_seconds


def test_mxfp8_is_as_fast_as_float8_where_a_device_has_it_and_elsewhere_emulated() -> None:
    """It leaves experts in bf16; float8 casts the tokens of each of them."""
    product = {Operator("aten.mm", 2 * 8192**3, 6 * 8192**2, 2, (8192, 8192, 8192)): 1}

    def seconds(choice: str, scaled: ScaledPrecision | None) -> float:
        return Roofline(shipped(choice), scaled=scaled).seconds(product, True).device

    float8, mxfp8 = Float8Precision(), Mxfp8Precision()
    for choice in ("b200", "gb200"):
        assert seconds(choice, mxfp8) == seconds(choice, float8) < seconds(choice, None)
    assert seconds("h100_sxm", mxfp8) > 5 * seconds("h100_sxm", None)
    experts = {
        Operator(EXPERTS_PRODUCT, 2 * n * 4096**3, 0, 2, (4096, 4096, 4096), n): 1 for n in (1, 8)
    }
    b200, h100 = (
        Roofline(shipped("b200"), scaled=mxfp8),
        Roofline(shipped("h100_sxm"), scaled=float8),
    )
    assert b200.seconds(experts, True) == Roofline(shipped("b200")).seconds(experts, True)
    one, eight = (h100.seconds({operator: 1}, True).casts for operator in experts)
    assert eight == pytest.approx(8 * one) and one > 0
    rack, node = (link_of(tiny(dp=16), "shard", shipped(one)) for one in ("gb200", "b200"))
    assert rack.inside and not node.inside, "NVLink joins 72"


def test_zero_trades_traffic_for_memory() -> None:
    words = [*TINY, "pp=2", "dp=2", "schedule.microbatches=8", "model.num_hidden_layers=8"]
    words += ["model.hidden_size=512", "model.num_attention_heads=8", "activation_checkpoint=full"]
    one, two, three = (planned(*words, f"fsdp.zero={level}") for level in (1, 2, 3))
    assert max(one.memory_bytes) > max(two.memory_bytes) > max(three.memory_bytes)
    assert one.traffic(0)["gathered"] == two.traffic(0)["gathered"] < three.traffic(0)["gathered"]
    assert 8 * one.traffic(0)["reduced"] == two.traffic(0)["reduced"] == three.traffic(0)["reduced"]
    assert planned(*words).plan.zero == 1, "auto, where whole gradients fit"


def test_equal_blocks_are_costed_once_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the largest models are planned in seconds."""
    calls: Counter[int] = Counter()
    seconds = Roofline.seconds

    def counted(self: Roofline, *args: object, **more: object) -> object:
        calls[layers] += 1
        return seconds(self, *args, **more)

    monkeypatch.setattr(Roofline, "seconds", counted)
    for layers in (2, 8):
        planned(*TINY, f"model.num_hidden_layers={layers}", "pp=2", "seq_len=64")
    assert calls[2] == calls[8] > 0


def test_the_chart_and_trace_show_every_action(tmp_path: Path) -> None:
    words = [*TINY, "pp=2", "schedule=interleaved1f1b", "schedule.microbatches=4"]
    plan = planned(*words)
    svg, png, trace = (tmp_path / f"a.{ending}" for ending in ("svg", "png", "json"))
    draw(chart_of(plan), png)
    draw(chart_of(plan), svg)
    write_trace(chart_of(plan), trace)
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    text = svg.read_text()
    assert "rank 1" in text and "forward" in text and "interleaved1f1b" in text
    draw(chart_of(plan), svg)
    assert svg.read_text() == text
    events = json.loads(trace.read_text())["traceEvents"]
    computed = [e for e in events if e["ph"] == "X" and e["cat"] in "FB"]
    assert len(computed) == 4 * 4 * 2
    assert {e["ph"] for e in events} == {"M", "X"}


def test_a_long_step_goes_on_in_further_lines_of_a_picture(tmp_path: Path) -> None:
    """Of one rank in a few: its gathers cut a step into very many actions."""
    sizes = []
    for count in (10, 400, 4_000):
        spans = [Span("F", 0, mb, mb, mb + 1) for mb in range(count)]
        draw(Chart("t", [spans], [0], count), tmp_path / "a.png")
        sizes.append(struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24]))
    (width, height), (long, high), (_, highest) = sizes
    assert width == long < 2_000 and height + 100 < high < highest < 800


@pytest.mark.slow
def test_a_search_finds_what_planning_each_layout_finds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small space, by planning each layout in full, near what all are judged by first."""
    judged = []

    def judge(*args: Any) -> ScoredLayout:
        judged.append(score(*args))
        return judged[-1]

    monkeypatch.setattr("titanlike.planning.search.score", judge)
    words = [*TINY, "precision=bf16", "fsdp.zero=1", "activation_checkpoint=none", "seq_len=512"]
    words += ["tp=1", "schedule=1f1b"]
    monkeypatch.setattr("titanlike.planning.search._PROGRESS", -1.0)
    code, text, said = plan(capsys, "search", *words, "gpus=2", "--json", "--top", "2")
    assert code == 0 and "2 layouts estimated, now " in said
    first = json.loads(text)["ranked"][0]
    times = {}
    for pp in (1, 2):
        for microbatches in (1, 2, 8):
            if 16 // (2 // pp) % microbatches == 0:
                line = [f"pp={pp}", f"dp={2 // pp}", f"schedule.microbatches={microbatches}"]
                times[pp, microbatches] = planned(*words, *line).step_seconds
    assert first["step_seconds"] <= 1.01 * min(times.values())
    assert "pp=" in first["command"] and "hardware" not in first["command"]
    replayed = [word for word in first["command"].split() if "=" in word]
    again = planned(*replayed, "hardware=h100_sxm")
    assert again.step_seconds == pytest.approx(first["step_seconds"])
    near = {(one.config.pp, one.layout.microbatches): one.seconds for one in judged}
    for layout, seconds in times.items():
        assert 0.95 < near[layout] / seconds < 1.02, layout


def test_a_search_recomputes_the_blocks_that_a_plan_does() -> None:
    words = [*TINY, "pp=2", "schedule=interleaved1f1b", "schedule.microbatches=8", "batch_size=8"]
    words += ["model.num_hidden_layers=8", "hardware=cpu"]
    most = planned(*words).fullest
    words += ["activation_checkpoint=fit", f"hardware.memory={int(0.93 * most / 0.92)}"]
    estimate = planned(*words)
    config, hardware = estimate.config, estimate.hardware
    table = CostCache(config, hardware)(config, 1)
    found = score(words, config, table, hardware, {}, 8)
    blocks = [
        [*filter(recomputed.__contains__, names)]
        for names, recomputed in zip(found.layout.stages, found.layout.recomputed, strict=True)
    ]
    assert blocks == estimate.plan.recomputed.blocks
    assert 0 < estimate.plan.recomputed.count < 8 and found.most <= hardware.usable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "choices"),
    [
        (["model=moe_tiny", "fsdp.zero=1"], ["ep=1 dp=4", "ep=4 dp=4"]),
        (["seq_len=16384", "fsdp.zero=1"], ["cp=1 dp=4", "cp=2 dp=2"]),
        (["fsdp.zero=3", "hardware.devices_per_node=2"], ["replicate=1 dp=4", "replicate=2 dp=4"]),
    ],
    ids=["ep", "cp", "replicate"],
)
def test_a_search_tries_every_axis(capsys, words: list[str], choices: list[str]) -> None:
    """Its first choice is that of planning each."""
    line = [*TINY, "precision=bf16", *words, "pp=1", "tp=1", "schedule=1f1b"]
    line += ["schedule.microbatches=2", "activation_checkpoint=none"]
    code, text, _ = plan(capsys, "search", *line, "gpus=4", "--json")
    seconds = [planned(*line, *choice.split()).step_seconds for choice in choices]
    ranked = json.loads(text)["ranked"]
    assert code == 0 and len(ranked) == len(seconds)
    assert ranked[0]["step_seconds"] == pytest.approx(min(seconds))


def test_shipped_hardware_agrees_with_the_peaks_that_mfu_uses() -> None:
    from titanlike.core.device.accelerator import bf16_peak

    names = {"a100_80g": "A100", "h100_sxm": "H100", "h100_pcie": "H100 PCIe", "h200": "H200"}
    for choice, name in {**names, "b200": "B200", "gb200": "GB200", "mi300x": "MI300X"}.items():
        assert shipped(choice).bf16_flops == bf16_peak(name)


@pytest.mark.parametrize("words", ["tp=72", "tp=8 dp=9 ep=9", "dp=72 ep=72", "dp=144 ep=72"])
def test_layers_communicate_by_nvlink_among_all_72_gpus_of_a_gb200_domain(words: str) -> None:
    """130 TB/s both ways for 72: 900 GB/s that each sends, of which 0.8 are reached."""
    mesh = {name: int(size) for name, _, size in (word.partition("=") for word in words.split())}
    axis = "ep" if "ep" in mesh else "tp"
    rack, node = (link_of(Config(**mesh), axis, shipped(name)) for name in ("gb200", "b200"))
    assert rack.inside and rack.bandwidth == rack.to_all == pytest.approx(
        0.8 * 130e12 / 72 / 2, rel=0.01
    )
    assert not node.inside
    assert not link_of(Config(dp=144, ep=144), "ep", shipped("gb200")).inside


@pytest.mark.parametrize(
    "words", [["schedule.microbatches=4"], ["numerics=exact", "numerics.grain=4"]]
)
def test_a_search_keeps_what_is_typed_of_a_schedule_and_of_grains(words: list[str], capsys) -> None:
    fixed = [*TINY, "pp=2", "fsdp.zero=1", "activation_checkpoint=none"]
    code, text, errors = plan(
        capsys, "search", "hardware=cpu", "gpus=2", *fixed, *words, "--json", "--top", "2"
    )
    assert code == 0, errors
    found = json.loads(text)["ranked"]
    assert found and {layout["microbatches"] for layout in found} == {4}
