"""gpu_check: every cell of its plan is a run that can start; the queue runs what fits, in its order,
and keeps what was found whatever fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_check import cells as gpu_cells
from benchmarks.gpu_check import check as gpu_check
from benchmarks.gpu_check.cells import Cell, Outcome, plan, run_cell
from benchmarks.gpu_check.check import Places, visible_gpus
from benchmarks.gpu_check.stacks import STACKS, where_ranks_stand
from benchmarks.speed.host_waits import waits_by_place
from support.cells import GRID, slow
from support.command_lines import examined
from support.paths import ROOT
from support.waiting import until
from titanlike.run.checks import problems

pytestmark = pytest.mark.slow

DEVICES = torch.cuda.device_count()
ON_GPUS = [cell for cell in plan(max(8, DEVICES), gpus=DEVICES or 2) if cell.kind != "speed"]
MACHINE = {"versions": {"torch": "2"}, "names": [], "memory": []}


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ON_GPUS, ids=lambda cell: f"{cell.kind} {cell.name}")
def test_on_the_gpus_of_this_machine(cell: Cell, tmp_path: Path) -> None:
    outcome = run_cell(cell, tmp_path)
    assert outcome.status == "ok", f"{outcome.text}\n{outcome.command}\n{outcome.output}"


@pytest.mark.parametrize(
    "ranks, cpu, gpus",
    [(1, True, 1), *slow((8, True, 8), (8, False, 8), (8, False, 1), marks=GRID)],
)
def test_every_cell_of_the_plan_can_start(ranks: int, cpu: bool, gpus: int, tmp_path: Path) -> None:
    for cell in plan(ranks, cpu=cpu, gpus=gpus):
        sizes = set()
        for overrides in filter(None, (cell.overrides, cell.then)):
            away = ("device=", "tp_async=", "launch.ranks_per_device=")
            words = [w for w in overrides if not w.startswith(away)]
            checked = examined(*words, "device=cpu", f"run_dir={tmp_path}")
            assert checked.problems == [] and checked.config is not None
            sizes.add(checked.config.world_size)
            assert problems(checked.config) == [], cell.name
        assert max(sizes) == cell.ranks <= ranks


def test_one_gpu_runs_every_axis_and_begins_with_what_was_never_run() -> None:
    cells = plan(8, gpus=1)
    assert [cell.name for cell in cells[:3]] == [
        "cp=2 context_parallel=gather DOCUMENTS compile=true precision=bf16",
        "MIXTURE pp=2 dp=2 ep=2 schedule=zbh1 activation_checkpoint=selective",
        "pp=4 schedule=dualpipev",
    ]
    assert {cell.ranks for cell in cells} == {1, 2, 4, 8}
    shared = {
        cell.ranks: [w for w in cell.overrides if "ranks_per_device" in w]
        for cell in cells
        if not cell.then
    }
    assert shared == {1: [], **{n: [f"launch.ranks_per_device={n}"] for n in (2, 4, 8)}}
    assert {cell.ranks for cell in cells if cell.kind == "speed"} == {1}
    assert len({(cell.kind, cell.name) for cell in cells}) == len(cells)
    phases = {cell.phase for cell in cells if cell.kind == "hangs"}
    assert phases == {"data", "build", "validation", "save", "compile"}


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
    assert {cell.ranks for cell in plan(8) if cell.kind == "speed"} == {1, 8}


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
    assert gpu_check._run(cells, tmp_path, MACHINE, {}, 1) == 1
    text = (tmp_path / "report.md").read_text()
    assert "**1 FAILED, 1 TIMEOUT, 1 ok**" in text and "not run" not in text
    assert "sede=1: unknown key; write seed=1" in text and "not done in 0 s" in text
    assert "| `a good one` | ok | " in text
    assert [path.name for path in sorted(tmp_path.glob("*-speed"))] == ["001-speed", "002-speed"]
    out = capfd.readouterr().out
    assert "[1/3] FAILED" in out and "[3/3] ok" in out


def test_different_results_are_named_and_times_are_not_compared() -> None:
    numbers = {"loss": 1.5, "grad_norm": 2.0, "time": 1.0, "step_seconds": 2.0}
    first = [{"step": step} | numbers for step in (1, 2)]
    again = [record | {"time": 5.0, "step_seconds": 3.0} for record in first]
    assert gpu_cells._same(first, again) == ""
    again[1]["grad_norm"] = 2.0000000000000004
    assert gpu_cells._same(first, again) == "grad_norm of step 2: 2.0000000000000004 instead of 2.0"
    assert gpu_cells._same(first, first[:1]) == "steps [1] instead of [1, 2]"
    assert gpu_cells._same(first, [*first, first[1]]) == "steps [1, 2, 2] instead of [1, 2]"


def queue(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stand_in: Callable[[Cell], Outcome]
) -> Callable[..., int]:
    """gpu_check's queue; what a cell's process does is `stand_in`. Lines of folder/log: what began and
    ended."""

    def run_cell(cell: Cell, _: Path) -> Outcome:
        with open(folder / "log", "a", buffering=1) as file:
            print(f"{cell.name} begins", file=file)
            outcome = stand_in(cell)
            print(f"{cell.name} ends", file=file)
        return outcome

    monkeypatch.setattr(gpu_check, "run_cell", run_cell)
    return lambda cells, outcomes=None, at_once=1, end=1e12: gpu_check._run(
        cells, folder, MACHINE, {} if outcomes is None else outcomes, at_once, end
    )


@pytest.mark.parametrize("end, code", [("ok", 0), ("TIMEOUT", 1), ("FAILED", 1), ("", 130)])
def test_the_report_is_complete_after_every_cell(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four, of which the third ends so ("": it is interrupted)."""

    def stand_in(cell: Cell) -> Outcome:
        (tmp_path / f"seen {cell.name}").write_text((tmp_path / "report.md").read_text())
        if cell.name == "cell 2" and not end:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        return Outcome(end if cell.name == "cell 2" else "ok", f"found in {cell.name}")

    cells = [Cell("verify", f"cell {number}", (), 1, 60) for number in range(4)]
    assert queue(monkeypatch, tmp_path, stand_in)(cells) == code
    seen = [(tmp_path / f"seen cell {number}").read_text() for number in range(2)]
    assert "**nothing has run yet**, 4 not run" in seen[0] and "still running" in seen[0]
    assert "| `cell 0` | ok | 0 | found in cell 0 |" in seen[1] and "3 not run" in seen[1]
    text = (tmp_path / "report.md").read_text()
    counts = {"ok": "**4 ok**", "": "**2 ok**, 2 not run"}
    assert counts.get(end, f"1 {end}, 3 ok") in text and ("; interrupted." in text) == (not end)
    assert "| no GPU | 2 | none | verify | " in text
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["cells"]) == (4 if end else 2)
    assert sorted(results["left"]) == ([] if end else ["verify cell 2", "verify cell 3"])


def test_several_run_at_a_time_by_their_ranks_and_speed_is_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_in(cell: Cell) -> Outcome:
        if cell.name in "ab":  # each sees the other
            until(lambda: {"a begins", "b begins"} <= {*(tmp_path / "log").read_text().split("\n")})
        return Outcome("ok", "")

    cells = [Cell(kind, name, (), ranks, 60) for kind, name, ranks in (
        ("verify", "a", 2), ("hangs", "b", 2), ("verify", "c", 8), ("speed", "d", 1), ("waits", "e", 1),
    )]  # fmt: skip
    assert queue(monkeypatch, tmp_path, stand_in)(cells, at_once=4) == 0
    log = (tmp_path / "log").read_text().splitlines()
    assert {*log[:2]} == {"a begins", "b begins"}
    alone = [f"{name} {word}" for name in "cde" for word in ("begins", "ends")]
    assert log[4:] == alone


@pytest.mark.parametrize("count", [8, 4, 1])
def test_cells_fill_all_gpus_of_a_node_and_none_has_more_ranks_than_room(count: int) -> None:
    """Those that stop or kill ranks, and speed, have theirs alone."""
    cells = dict(enumerate(gpu_cells.plan(8, gpus=count)))
    places = Places(visible_gpus(count), [80 << 30] * count)
    room, loads = (80 << 30) // gpu_check._RANK_MEMORY, Counter[str]()
    waiting, running = [*cells], list[int]()
    while waiting or running:
        for number in [*waiting]:
            before = places.loads
            if (gpus := places.take(number, cells[number])) is None:
                continue
            assert len(gpus) == min(cells[number].ranks, count) == len({*gpus})
            if cells[number].kind in Places.ALONE:
                assert not any(before[gpu] for gpu in gpus)
            elif len(waiting) > len(cells) / 2:  # later, some GPUs are taken alone
                free = [before[gpu] for gpu in before if gpu not in gpus]
                assert max(before[gpu] for gpu in gpus) <= min(free, default=room), "least loaded"
            waiting.remove(number)
            running.append(number)
            loads.update(gpus)
        assert max(places.loads.values()) <= room
        assert len(waiting) < len(cells) / 2 or all(places.loads.values())
        places.free(running.pop(0))
    assert max(loads.values()) < 1.5 * min(loads.values()), "cells on the fullest and emptiest GPU"


def test_a_cell_that_is_to_be_alone_keeps_others_from_its_gpu() -> None:
    places = Places(["3", "5"], [80 << 30] * 2)
    assert places.take(0, Cell("hangs", "", (), 1, 60)) == ("3",)
    assert places.take(1, Cell("verify", "", (), 1, 60)) == ("5",)
    assert places.take(2, Cell("verify", "", (), 2, 60)) is None
    assert places.take(3, Cell("kills", "", (), 1, 60)) is None
    places.free(0)
    assert places.take(3, Cell("kills", "", (), 1, 60)) == ("3",)


def test_the_plan_of_a_node_is_shown_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--gpus", "8", "--device", "cuda", "--list"]) == 0
    assert "verify        " in capsys.readouterr().out
    assert gpu_check.main(["--list"]) == 2


def test_cells_beyond_the_time_budget_are_left_to_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stand_in(cell: Cell) -> Outcome:
        status = {"bad": "FAILED", "slow": "TIMEOUT"}.get(cell.name, "ok")
        return Outcome(status, f"limit {cell.timeout:.0f}", 90.0 if cell.name == "slow" else 2.0)

    run = queue(monkeypatch, tmp_path, stand_in)
    cells = [
        Cell("verify", name, (), 1, 600, seconds=seconds)
        for name, seconds in (("good", 20), ("bad", 20), ("slow", 20), ("long", 500))
    ]
    still = SimpleNamespace(monotonic=lambda: 0.0, strftime=time.strftime)
    monkeypatch.setattr(gpu_check, "time", still)
    assert run(cells, end=112) == 1
    out = capsys.readouterr().out
    assert "left: verify: long" in out and "limit 100" in out  # it ends before the minutes do
    assert f"1 not run; --continue {tmp_path / 'results.json'} runs what has not passed" in out
    again, passed = gpu_check._passed_before(tmp_path / "results.json", cells, MACHINE)
    assert {number: outcome.text for number, outcome in passed.items()} == {0: "limit 100"}
    assert [cell.seconds for cell in again] == [2, 2, 90, 500]  # what they took
    (tmp_path / "log").unlink()
    assert run(again, passed) == 1
    began = [line for line in (tmp_path / "log").read_text().splitlines() if "begins" in line]
    assert began == ["bad begins", "slow begins", "long begins"]
    assert len(json.loads((tmp_path / "results.json").read_text())["cells"]) == 4
    other = MACHINE | {"versions": {"torch": "3"}}
    with pytest.raises(ValueError, match="torch was 2, is 3; leave it out"):
        gpu_check._passed_before(tmp_path / "results.json", cells, other)


@pytest.mark.parametrize("cells", [3, [{"kind": "verify"}], [3]])
def test_a_file_without_results_is_refused(
    cells: object, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(gpu_check, "_describe_machine", lambda: MACHINE)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(gpu_check._place(MACHINE) | {"cells": cells}))
    assert gpu_check.main(["--device", "cpu", "--list", "--continue", str(path)]) == 2
    assert "no results.json of gpu_check; leave it out" in capsys.readouterr().err


RANK = """
import signal, sys, time
from pathlib import Path
from titanlike.core.launch.worker import _logged
def stands(): time.sleep(100)
steps = {}
for number in range(500):  # 10 s until it is in the same one again
    exec(f"def step{number}(): time.sleep(0.02)", globals(), steps)
with _logged(Path(sys.argv[1]), int(sys.argv[2])):
    if sys.argv[3] == "moves":
        while True:
            for step in steps.values(): step()
    stands()
"""


@pytest.mark.parametrize(
    "does, said",
    [
        (["stands"], "stuck, or in one long call: its ranks used 0.0 s of CPU in 1 s"),
        (["stands", "moves"], "slow: rank 1 moved on"),
        *slow((["stopped", "stands"], "stuck, or in one long call")),
    ],
)
def test_hung_ranks_are_told_from_slow_ones(does: list[str], said: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", RANK, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ranks = [subprocess.Popen([*words, str(n), what], env=env) for n, what in enumerate(does)]
    try:
        for rank in ranks:
            status = Path(f"/proc/{rank.pid}/status")
            until(
                lambda s=status: (
                    int(s.read_text().split("SigCgt:")[1].split()[0], 16) >> (STACKS - 1) & 1
                )
            )
        if does[0] == "stopped":
            ranks[0].send_signal(signal.SIGSTOP)
        text, stacks = where_ranks_stand(os.getpid(), tmp_path, between=1.0)
        for _ in range(5):  # it may have stood at the same line twice
            if text.startswith(said):
                break
            text, stacks = where_ranks_stand(os.getpid(), tmp_path, between=1.0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert text.startswith(said)
    for number, what in enumerate(does):
        if what == "stopped":
            assert f"a process (pid {ranks[number].pid}) is stopped" in stacks
        elif what == "stands":
            assert f"rank {number} (pid {ranks[number].pid}) stands still" in stacks
            assert 'File "<string>", line 5 in stands' in stacks


def test_waits_of_the_host_are_counted_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of each; here a stand-in does, once its mode is on."""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with waits_by_place(torch.device("cuda")) as places:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert modes == [0, "warn", 0] and places is not None
    assert [(place.split(":")[0], count) for place, count in places.items()] == [
        ("proof/test_gpu_check.py", 3)
    ]
    with waits_by_place(torch.device("cpu")) as places:
        assert places is None


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "verfy"], "--only verfy: no such check; checks: verify, determinism"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        *slow((["--device", "cpu", "--minutes", "0"], "--minutes 0: must be more than 0")),
        *slow((["--device", "cpu", "--continue", "none"], "none")),
        *slow((["--gpus", "99"], "there is no GPU" if not DEVICES else f"there are {DEVICES}")),
    ],
)
def test_cells_that_cannot_run_are_reported(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.grid
def test_a_cell_of_each_kind_on_the_cpu(tmp_path: Path) -> None:
    names = {"pp=2 schedule=vhalf", "dp=2 @build", "pp=2 @build", "pp=2 schedule=interleaved1f1b"}
    kinds: set[str] = set()
    for cell in plan(2, cpu=True):
        if cell.name in names or cell.kind not in {"verify", "hangs", "kills", "waits", *kinds}:
            kinds.add(cell.kind)
            outcome = run_cell(cell, tmp_path / cell.kind)
            assert outcome.status == "ok", f"{outcome.text}\n{outcome.command}\n{outcome.output}"
            said = {
                "hangs": "rank 1 named and the run ended",
                "kills": "restarted by itself from step 0, no number changed",
                "determinism": "twice the same to the last bit",
                "resumes": "6 steps, saved and continued: as 12 without a stop",
                "waits": "a CPU has none to count; the steps ran",
                "speed": "of the plain loop's time",
            }
            assert said.get(cell.kind, "agree") in outcome.text
    assert len(kinds) == 7


@pytest.mark.slow
def test_the_command_runs_what_fits_and_goes_on(tmp_path: Path) -> None:
    def check(*words: str) -> tuple[int, str]:
        tool = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--device", "cpu"]
        line = [*tool, "--only", "verify", "--at-once", "2", *words]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=150)
        return done.returncode, done.stdout

    code, out = check("--minutes", "0.1", "a")
    assert code == 2 and "left: verify: pp=2 schedule=vhalf" in out
    code, out = check("--gpus", "1", "--minutes", "1.2", "--continue", "a/results.json", "b")
    assert code == 0 and "1 ok; report: b/report.md" in out
    assert "left: verify: DOCUMENTS compile=true precision=bf16" in out


STUCK = """
import torch
class Net(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, 8)
        self.head = torch.nn.Linear(8, vocab_size)
    def forward(self, input_ids):
        import time, torch.distributed as dist
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(1000)
        return self.head(self.embed(input_ids))
"""


@pytest.mark.grid
def test_a_verify_that_is_stuck_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = "model=own model.name=stuck.Net seq_len=16 data=synthetic logger=none device=cpu dp=2"
    outcome = run_cell(Cell("verify", "stuck", tuple(words.split()), 2, 25), tmp_path / "run")
    assert outcome.status == "TIMEOUT" and "stuck, or in one long call" in outcome.text
    assert "rank 1 (pid" in outcome.output and 'stuck.py", line 11 in forward' in outcome.output
