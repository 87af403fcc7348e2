"""`tools/plan.py`: what a command line will cost, said, drawn and searched for without a device."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest

from support.cells import slow
from support.commands import command
from support.plans import planned
from titanlike.command import plan as plan_command
from titanlike.metrics.chart_picture import draw
from titanlike.metrics.chart_trace import write_trace
from titanlike.planning.advice import advise
from titanlike.planning.known_hardware import shipped
from titanlike.planning.plan_chart import chart_of
from titanlike.planning.plan_text import as_text

SMALL = ["data=synthetic", "device=cpu", "model.layers=8", "batch_size=16", "hardware=h100_sxm"]


def run(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    code = plan_command.main([*words])
    return code, *capsys.readouterr()


def test_the_line_that_trains_is_the_line_that_plans(tmp_path: Path) -> None:
    words = ["experiment=llama3_8b", "hardware=h100_sxm", "--json"]
    done = command(*words, cwd=tmp_path, tool="tools/plan.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] and 3 < found["step_seconds"] < 30 and 0.1 < found["mfu"] < 0.7
    assert len(found["memory_bytes"]) == 4 and max(found["memory_bytes"]) <= 80 * 2**30
    tokens = 512 * 8192 / found["step_seconds"] / 64
    assert found["tokens_per_second_per_gpu"] == pytest.approx(tokens)
    assert 0 < found["bubble"] < 0.5 and len(found["ranks"]) == 4 and len(found["stages"]) == 8


def test_a_table_fits_into_a_terminal() -> None:
    words = [*SMALL, "pp=4", "dp=2", "schedule=zbvzerobubble", "schedule.microbatches=8"]
    plan = planned(*words)
    for columns in (80, 160):
        text = as_text(plan, advise(plan, 0.5), "", columns)
        assert "fits" in text and "queued" in text and "reduce-scatters of gradients" in text
        assert max(map(len, text.splitlines())) <= columns


def test_what_does_not_fit_is_said_with_what_would(capsys) -> None:
    words = ["experiment=llama3_8b", "hardware=a100_40g", "activation_checkpoint=none"]
    code, text, _ = run(capsys, *words)
    assert code == 1 and "DOES NOT FIT" in text
    assert "activation_checkpoint=fit it would take" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "hardware=none: a plan is made for a device; write hardware=h100_sxm"),
        (["hardware=h100"], "no such choice; choices: a100_40g, a100_80g, b200"),
        (["hardware=cpu", "gpus=4"], "gpus=4: is for a search"),
        (["hardware=cpu", "--picture", "a.jpg"], "must end in .svg or .png"),
        (["hardware=cpu", "hardware.memory_efficiency=1.5"], "is a share: above 0, at most 1"),
        (["search", "hardware=cpu", "gpus=many"], "must be a number of devices; write gpus=64"),
        (["hardware=cpu", "pp=3", "dp=3"], "does not divide among dp=3"),
    ],
)
def test_mistakes_are_answered_like_those_of_training(capsys, words, said) -> None:
    code, _, errors = run(capsys, *words)
    assert code == 2 and said in errors, errors


def test_every_choice_that_costs_is_known() -> None:
    """A change of the command line changes the plan in the direction that is known."""
    base = planned(*SMALL, "pp=2", "precision=bf16", "schedule.microbatches=4", "seq_len=1024")
    words = [*SMALL, "pp=2", "precision=bf16", "schedule.microbatches=4", "seq_len=1024"]
    full = planned(*words, "activation_checkpoint=full")
    assert full.step_seconds > base.step_seconds
    assert max(full.memory_bytes) < max(base.memory_bytes)
    fused = planned(*words, "compile=true")
    assert fused.step_seconds < base.step_seconds
    more = planned(*words[:-2], "schedule.microbatches=16", "seq_len=1024")
    assert more.simulation.bubble < base.simulation.bubble
    offloaded = planned(*words, "dp=2", "batch_size=32", "fsdp.cpu_offload=true")
    resident = planned(*words, "dp=2", "batch_size=32")
    assert max(offloaded.memory_bytes) < max(resident.memory_bytes)
    assert offloaded.simulation.step > resident.simulation.step
    divided = planned(*words, "tp=2")
    assert divided.traffic(0).tp > 0 and max(divided.memory_bytes) < max(base.memory_bytes)
    fp32 = planned(*SMALL, "pp=2", "schedule.microbatches=4", "seq_len=1024")
    assert fp32.step_seconds > base.step_seconds
    again = planned(*words, "optimizer=muon")
    assert again.times.stages[0].update > base.times.stages[0].update


def test_zero_trades_traffic_for_memory() -> None:
    words = [*SMALL, "pp=2", "dp=2", "batch_size=64", "schedule.microbatches=32"]
    words += ["model.dim=512", "model.heads=8", "activation_checkpoint=full"]
    one, two, three = (planned(*words, f"fsdp.zero={level}") for level in (1, 2, 3))
    assert max(one.memory_bytes) > max(two.memory_bytes) > max(three.memory_bytes)
    assert one.traffic(0).gathered == two.traffic(0).gathered < three.traffic(0).gathered
    assert 32 * one.traffic(0).reduced == two.traffic(0).reduced == three.traffic(0).reduced


def test_parts_of_the_memory_are_the_whole() -> None:
    words = [*SMALL, "pp=2", "dp=2", "precision=bf16"]
    for schedule in ("1f1b", "zbvzerobubble", "interleavedzerobubble"):
        plan = planned(*words, f"schedule={schedule}", "schedule.microbatches=8")
        assert [parts.total for parts in plan.memory] == plan.memory_bytes
        assert all(min(vars(parts).values()) >= 0 for parts in plan.memory)
        shares = plan.shares(plan.slowest)
        assert sum(shares.values()) == pytest.approx(1, abs=0.01) and min(shares.values()) >= 0


@pytest.mark.parametrize("words", ["pp=16 dp=1024 batch_size=8192", *slow("pp=16 dp=64")])
def test_the_largest_model_is_planned_in_seconds(words: str) -> None:
    begin = time.process_time()
    plan = planned("experiment=llama3_405b", "hardware=h100_sxm", *words.split())
    assert plan.step_seconds > 1 and time.process_time() - begin < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # KiB, of all tests


def test_pictures_and_traces_show_every_action(tmp_path: Path) -> None:
    words = [*SMALL, "pp=2", "schedule=interleaved1f1b", "schedule.microbatches=4"]
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
    assert {e["ph"] for e in events} == {"M", "X", "s", "f", "C"}


@pytest.mark.parametrize("gpus", [2, *slow(4)])
def test_a_search_finds_what_planning_each_layout_finds(gpus: int, capsys) -> None:
    """Of a small space, by planning every layout in full."""
    words = [*SMALL, "precision=bf16", "fsdp.zero=1", "activation_checkpoint=none", "seq_len=1024"]
    code, text, _ = run(capsys, "search", *words, f"gpus={gpus}", "tp=1", "schedule=1f1b", "--json")
    assert code == 0
    found = json.loads(text)
    first = found["ranked"][0]
    times = {}
    for pp in (pp for pp in (1, 2, 4) if pp <= gpus):
        for microbatches in (1, 2, 8, 16):
            if 16 // (gpus // pp) % microbatches == 0:
                line = [f"pp={pp}", f"dp={gpus // pp}", f"schedule.microbatches={microbatches}"]
                plan = planned(*words, *line, "tp=1", "schedule=1f1b")
                times[" ".join(line)] = plan.step_seconds
    assert first["step_seconds"] <= 1.01 * min(times.values())
    assert "pp=" in first["command"] and "hardware" not in first["command"]
    replayed = [word for word in first["command"].split() if "=" in word]
    again = planned(*replayed, "hardware=h100_sxm")
    assert again.step_seconds == pytest.approx(first["step_seconds"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "choices"),
    [
        (["model=moe_tiny"], ["ep=1", "ep=4"]),
        (["seq_len=16384"], ["cp=1 dp=4", "cp=2 dp=2"]),
        (["fsdp.zero=3", "hardware.devices_per_node=2"], ["replicate=1", "replicate=2"]),
    ],
    ids=["ep", "cp", "replicate"],
)
def test_a_search_tries_every_axis(capsys, words: list[str], choices: list[str]) -> None:
    """Its first choice is that of planning each."""
    line = ["data=synthetic", "device=cpu", "batch_size=16", "hardware=h100_sxm", "precision=bf16"]
    line += [*words, "pp=1", "tp=1", "schedule=1f1b", "schedule.microbatches=2"]
    line += ["activation_checkpoint=none"]
    code, text, _ = run(capsys, "search", *line, "gpus=4", "--json")
    assert code == 0
    found = json.loads(text)
    seconds = []
    for choice in choices:
        for zero in (1, 2, 3) if "fsdp.zero=3" not in words else (3,):
            each = [f"fsdp.zero={zero}", *(choice.split() if "dp=" in choice else [choice, "dp=4"])]
            seconds.append(planned(*line, *each).step_seconds)
    assert len(found["ranked"]) == len(seconds)
    assert found["ranked"][0]["step_seconds"] == pytest.approx(min(seconds))


@pytest.mark.slow
@pytest.mark.grid  # for a machine that does nothing else
def test_a_search_over_512_devices_takes_less_than_a_minute(capsys) -> None:
    begin = time.process_time()
    words = ["experiment=llama3_70b", "hardware=h100_sxm", "gpus=512", "batch_size=1024"]
    code, text, _ = run(capsys, "search", *words)
    assert code == 0 and "why others lose" in text
    assert time.process_time() - begin < 60


def test_shipped_hardware_agrees_with_the_peaks_that_mfu_uses() -> None:
    from titanlike.device.peaks import bf16_peak

    names = {"a100_80g": "A100", "h100_sxm": "H100", "h100_pcie": "H100 PCIe", "h200": "H200"}
    for choice, name in {**names, "b200": "B200", "mi300x": "MI300X"}.items():
        assert shipped(choice).bf16_flops == bf16_peak(name)
