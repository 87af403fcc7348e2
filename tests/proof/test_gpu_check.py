"""gpu_check: every cell of its plan is a run that can start; a report is kept whatever fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.cells import GRID, slow
from support.command_lines import examined
from support.commands import command
from titanlike.driver.checks import problems
from titanlike.proof import gpu_cells, gpu_check
from titanlike.proof.gpu_cells import KINDS, Cell, plan, run_cell

DEVICES = torch.cuda.device_count()
ON_GPUS = [cell for cell in plan(DEVICES or 2) if cell.kind != "speed"]
MACHINE = {"versions": {"torch": "2"}, "names": [], "memory": []}


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ON_GPUS, ids=lambda cell: f"{cell.kind} {cell.name}")
def test_on_the_gpus_of_this_machine(cell: Cell, tmp_path: Path) -> None:
    outcome = run_cell(cell, tmp_path)
    assert outcome.status == "ok", f"{outcome.text}\n{outcome.command}\n{outcome.output}"


@pytest.mark.parametrize("devices, cpu", [(1, True), *slow((2, True), (8, False), marks=GRID)])
def test_every_cell_of_the_plan_can_start(devices: int, cpu: bool, tmp_path: Path) -> None:
    cells = plan(devices, cpu=cpu)
    assert {cell.kind for cell in cells} == {*KINDS} - (
        {"hangs", "kills"} if devices == 1 else set()
    )
    for cell in cells:
        sizes = set()
        for overrides in filter(None, (cell.overrides, cell.then)):
            words = [w for w in overrides if not w.startswith(("device=", "tp_async="))]
            checked = examined(*words, "device=cpu", f"run_dir={tmp_path}")
            assert checked.problems == [] and checked.config is not None
            sizes.add(checked.config.world_size)
            assert problems(checked.config) == [], cell.name
        assert max(sizes) == cell.ranks <= devices


def test_the_plan_for_eight_gpus_has_every_schedule_level_and_precision() -> None:
    cells = [cell for cell in plan(8) if cell.kind == "verify" and cell.ranks == 8]
    words = {word for cell in cells for word in cell.overrides}
    schedules = "1f1b gpipe interleaved1f1b loopedbfs interleavedzerobubble zbvzerobubble dualpipev"
    assert {f"schedule={name}" for name in schedules.split()} <= words
    assert {f"fsdp.zero={level}" for level in (1, 2, 3)} <= words
    for both in (("precision=bf16", "compile=true"), ("precision=bf16", "fsdp.zero=3")):
        assert any({*both} <= {*cell.overrides} for cell in cells)
    assert {f"context_parallel={how}" for how in ("ulysses", "ring", "gather")} <= {
        word for cell in plan(2) for word in cell.overrides
    }
    others = "cp=2 ep=2 precision=float8 optimizer=muon data.documents=true fsdp.cpu_offload=true"
    assert {*others.split()} <= {word for cell in plan(2) for word in cell.overrides}
    assert len({cell.name for cell in plan(8)}) == len(plan(8))
    assert {cell.ranks for cell in plan(8)} == {1, 2, 4, 8}


@pytest.mark.slow
def test_what_fails_or_takes_too_long_is_reported_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_cells, "_GRACE", 5.0)
    tiny = "device=cpu model.num_hidden_layers=2 model.hidden_size=32 model.intermediate_size=64 seq_len=16 data=synthetic"
    words = (*tiny.split(), "logger=none", "steps=2")
    cells = [
        Cell("speed", "a misspelt key", (*words, "sede=1"), 1, 60),
        Cell("speed", "one without an end", (*words, "steps=1000000"), 1, 0.5),
        Cell("speed", "a good one", words, 1, 60),
    ]
    assert gpu_check._run(cells, tmp_path, MACHINE) == 1
    text = (tmp_path / "report.md").read_text()
    assert "**1 FAILED, 1 TIMEOUT, 1 ok**" in text and "not run" not in text
    assert "sede=1: unknown key; write seed=1" in text and "not done in 0 s" in text
    assert "| `a good one` | ok | " in text
    assert [path.name for path in sorted(tmp_path.glob("*-speed"))] == ["001-speed", "002-speed"]
    out = capfd.readouterr().out
    assert "[1/3] FAILED" in out and "[3/3] ok" in out


def test_numbers_that_differ_are_named_and_times_are_not_compared() -> None:
    numbers = {"loss": 1.5, "grad_norm": 2.0, "time": 1.0, "step_seconds": 2.0}
    first = [{"step": step} | numbers for step in (1, 2)]
    again = [record | {"time": 5.0, "step_seconds": 3.0} for record in first]
    assert gpu_cells._same(first, again) == ""
    again[1]["grad_norm"] = 2.0000000000000004
    assert gpu_cells._same(first, again) == "grad_norm of step 2: 2.0000000000000004 instead of 2.0"
    assert gpu_cells._same(first, first[:1]) == "steps [1] instead of [1, 2]"
    assert gpu_cells._same(first, [*first, first[1]]) == "steps [1, 2, 2] instead of [1, 2]"


@pytest.mark.parametrize("end, code", [("ok", 0), ("TIMEOUT", 1), ("FAILED", 1), ("", 130)])
def test_the_report_is_whole_after_every_cell(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four, of which the third ends so ("": it is interrupted)."""
    seen: list[str] = []

    def run_cell(cell: Cell, folder: Path) -> gpu_cells.Outcome:
        seen.append((tmp_path / "report.md").read_text())
        if len(seen) == 3 and not end:
            raise KeyboardInterrupt
        status = end if len(seen) == 3 else "ok"
        return gpu_cells.Outcome(status, f"found in {cell.name}")

    monkeypatch.setattr(gpu_check, "run_cell", run_cell)
    cells = [Cell("verify", f"cell {number}", (), 1, 60) for number in range(4)]
    assert gpu_check._run(cells, tmp_path, MACHINE) == code
    assert "**nothing has run yet**, 4 not run" in seen[0] and "still running" in seen[0]
    assert "| `cell 0` | ok | 0 | found in cell 0 |" in seen[1] and "3 not run" in seen[1]
    text = (tmp_path / "report.md").read_text()
    counts = {"ok": "**4 ok**", "": "**2 ok**, 2 not run"}
    assert counts.get(end, f"1 {end}, 3 ok") in text and ("; interrupted." in text) == (not end)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "verfy"], "--only verfy: no such check; checks: verify, determinism"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        *slow((["--gpus", "99"], "there is no GPU" if not DEVICES else f"there are {DEVICES}")),
    ],
)
def test_what_cannot_be_run_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_everything_on_the_cpu(tmp_path: Path) -> None:
    words = ["--device", "cpu", str(tmp_path / "check")]
    done = command(*words, cwd=tmp_path, tool="tools/gpu_check.py", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "check" / "report.md").read_text()
    count = len(plan(2, cpu=True))
    assert f"**{count} ok**\n" in text
    assert "rank 1 named and the run ended" in text
    assert "restarted by itself from step" in text and "no number changed" in text
    assert "twice the same to the last bit" in text
    assert "6 steps, saved and continued: as 12 without a stop" in text
    assert [path.name for path in (tmp_path / "check").iterdir()] == ["report.md"]
