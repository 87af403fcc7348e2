"""report.html: a run as one page that needs nothing else, however the run went."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commands import TINY, command
from titanlike.core.config import files
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.planning.run_charts import run_charts
from titanlike.run.tools import report as main
from titanlike.watch import report
from titanlike.watch.chart import Chart, Span
from titanlike.watch.report import page, read_history, write_reports


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(the document after its scripts, lines of the console). Skips where there is no browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [program, *flags, page.resolve().as_uri()], capture_output=True, text=True, timeout=90
    )
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


SCRIPT = "</script><script>console.error('ran')</script><!--"


def record(step: int, **more: Any) -> dict[str, Any]:
    numbers = {"loss": 10 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 512 * step}
    numbers |= {
        "tokens_per_second": 1e4 + step / 100,
        "memory_bytes": 400 << 20,
        "time": 1.7e9 + step,
    }
    return {"step": step, **numbers, **more}


def written(folder: Path, steps: int = 40, **changes: Any) -> Path:
    """A run that was rolled back, stopped and resumed with another learning rate."""
    folder.mkdir()
    config = {"pp": 2, "optimizer": {"lr": 1e-3}, "run_dir": str(folder), **changes}
    stages = [
        {"stage": at, "ranks": f"rank {at}", "modules": f"layers.{at}", "parameters": 1000 + at}
        for at in range(2)
    ]
    layout = {"mesh": "pp=2, schedule=1f1b", "stages": stages, "model": "llama, 1.5M parameters"}
    layout |= {"schedule": "gpipe", "place": [0, 1]}
    layout["order"] = [[f"{rank}{kind}{mb}" for kind in "FB" for mb in (0, 1)] for rank in (0, 1)]
    first = {"step": 0, "time": 1.7e9, "overrides": ["pp=2"], "config": config, "layout": layout}
    first["versions"] = {"torch": "2.13.0", "git": "0123456789abcdef", "git_dirty": True}
    again = first | {"step": 20, "config": config | {"optimizer": {"lr": 5e-4}}}
    events = [
        {"step": 10, "event": "saved", "path": "step-10"},
        {"step": 15, "event": "rollback", "text": f"back to step 10 {SCRIPT}"},
        {"step": 20, "event": "stop", "by": "SIGTERM"},
        {"step": 20, "event": "resume", "path": "step-20"},
    ]
    records = [record(s, **({"val_loss": 11 / s} if s % 10 == 0 else {})) for s in range(1, steps)]
    samples = [{"step": 20, "prompt": "def main", "text": f"(): {SCRIPT}"}]
    rows_of = {"metrics": records, "events": events, "samples": samples}
    for name, rows in {**rows_of, "starts": [first, again]}.items():
        lines = "".join(files.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data".*?>(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(found[1])


def test_the_page_of_a_run_has_its_curves_events_starts_layout_and_samples(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    [run] = data_of(write_reports(folder / report.FILE, [folder], quick=True))["runs"]
    assert run["curves"]["loss"] == [[s, 512 * s, float(f"{10 / s:.6g}")] for s in range(1, 40)]
    assert [point[0] for point in run["curves"]["val_loss"]] == [10, 20, 30]
    events = [(event["step"], event["event"]) for event in run["events"]]
    assert events == [(10, "saved"), (15, "rollback"), (20, "stop"), (20, "resume")]
    assert run["starts"][1]["changed"] == ["optimizer.lr 0.001 -> 0.0005"]
    assert [stage["modules"] for stage in run["layout"]["stages"]] == ["layers.0", "layers.1"]
    assert run["samples"][0]["text"] == f"(): {SCRIPT}"
    text = (tmp_path / "run" / "report.html").read_text()
    loaded = re.sub(r"http://www.w3.org/2000/svg", "", text)
    assert "://" not in loaded, "a page without a network"


def test_a_damaged_run_still_has_a_report(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(files.dumps(record(40, loss=float("nan"), lr="no")) + "\n[1]\n\x00\xff\n")
        file.write('{"step": 41, "loss": 1')  # the rest was not written
    (folder / "result.json").write_text("{")
    (folder / "starts.jsonl").write_text('{"step": 0, "config": 3}\n{"step": 5, "config": {}}\n{')
    (folder / "samples.jsonl").write_text('{"step": 1}\nnull\n')
    (folder / "events.jsonl").unlink()
    [run] = data_of(write_reports(folder / report.FILE, [folder], quick=True))["runs"]
    assert run["curves"]["loss"][-1] == [40, 512 * 40, None], "a gap"
    assert run["curves"]["lr"][-1][0] == 39
    assert (run["result"], run["layout"], run["events"]) == ({}, {}, [])


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link out of it": lambda path: path.symlink_to("/dev/zero"),
    "a line without an end": lambda path: (path.write_bytes(b"{"), os.truncate(path, 1 << 40)),
    "depth": lambda path: path.write_text("[" * 100_000),
    "another form": lambda path: path.write_text('{"step": {}, "steps": [[]], "ranks": 1}\n'),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_files_of_a_run_are_passed_over(odd: str, tmp_path: Path) -> None:
    """Links, which lead to what is not the run's, are refused."""
    for name in ("metrics.jsonl", "events.jsonl", "starts.jsonl", "samples.jsonl", "timeline.json"):
        (written(run := tmp_path / name) / name).unlink(missing_ok=True)
        ODD[odd](run / name)
        assert main([str(run)]) == (2 if odd == "a link out of it" else 0)


def test_a_tool_prints_no_control_character_of_a_name(tmp_path: Path) -> None:
    run = written(tmp_path / "a\x1b[2Jrun")
    done = command(str(run), tool="tools/report.py", cwd=tmp_path)
    assert r"a\x1b[2Jrun" in done.stdout and "\x1b" not in done.stdout + done.stderr


def test_a_long_run_keeps_its_spikes_and_validations_in_a_small_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page at the end of a run reads a part of the records, the command all."""
    monkeypatch.setattr(report, "QUICK", 400 << 10)
    folder = written(tmp_path / "run", steps=3_000)
    spiked = (folder / "metrics.jsonl").read_text().splitlines()
    spiked[2_000] = files.dumps(record(2_001, loss=1234.5))
    (folder / "metrics.jsonl").write_text("\n".join(spiked) + "\n")
    quick = read_history(folder, points=100, quick=True)
    assert quick["sampled"] and len(quick["curves"]["val_loss"]) > 50
    assert quick["curves"]["loss"][-1][0] == quick["last"]["step"] == 2_999
    whole = read_history(folder, points=100)
    assert [2_001, 512 * 2_001, 1234.5] in whole["curves"]["loss"]
    assert len(whole["curves"]["loss"]) <= 110 and whole["curves"]["loss"][0][0] == 1
    assert len(page([quick, whole])) < 60_000


def test_several_runs_are_overlaid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [written(tmp_path / "one"), written(tmp_path / "two", pp=4)]
    monkeypatch.chdir(tmp_path)
    assert main([*map(str, runs)]) == 0
    assert capsys.readouterr().out == "written: report.html\n"
    found = data_of(tmp_path / "report.html")
    assert [run["name"] for run in found["runs"]] == ["one", "two"]
    assert found["differences"] == {"pp": ["2", "4"]}
    assert main([str(tmp_path)]) == 2 and "is no run's directory" in capsys.readouterr().err


def test_a_browser_draws_curves_and_events_without_an_error(tmp_path: Path) -> None:
    row = [[Span("F", 0, 0, 0.0, 1.0), Span("B", 0, 0, 1.0, 2.0)]]

    def charts(*given: Any) -> Iterator[Chart]:
        yield from run_charts(*given)
        yield from (
            Chart(title, row, [0], end) for title, end in (("measured", 2.0), ("planned", 4.0))
        )

    runs = [read_history(written(tmp_path / n), charts_of=charts) for n in ("one", "two")]
    (tmp_path / "p.html").write_text(page(runs))
    document, console = opened(tmp_path / "p.html", tmp_path / "profile")
    assert console == []
    body = document[document.index("</noscript>") : document.index('<script id="data"')]
    for name in ("loss", "grad_norm", "lr", "tokens_per_second", "memory_bytes"):
        figure = re.search(rf'<figure id="chart-{name}".*?</figure>', body, re.DOTALL)[0]
        paths = re.findall(r'<path class="curve[^"]*" d="(M[^"]+)"[^>]*data-run="(\w+)"', figure)
        assert [run for _, run in paths] == ["one", "two"] * (1 + (name == "loss")), name
        points = [tuple(map(float, point.split())) for point in re.split("[ML]", paths[0][0])[1:]]
        assert len(points) == 39
        assert points == sorted(points), "steps go to the right"
        for kind in ("event saved", "event trouble", "event "):
            assert figure.count(f'class="{kind}"') >= 2, (name, kind)
    for figure in re.findall(r"<figure.*?</figure>", body, re.DOTALL):
        of_y = re.findall(r'<text [^>]*text-anchor="end">([^<]+)<', figure)
        assert len({*of_y}) == len(of_y) > 1, f"neighbouring ticks have different labels: {of_y}"
    assert "rollback at step 15" in body and "optimizer.lr 0.001 -&gt; 0.0005" in body
    assert 'class="curve validation"' in body
    assert 'class="curve validation"' in body
    assert body.count('class="span"') == 2 * (8 + 2 * 2), "of two ranks and microbatches; timed"
    steps = re.findall(r'<svg class="steps".*?</svg>', body, re.DOTALL)
    axes = [re.findall(r'class="tick"[^>]*>([^<]+)<', each) for each in steps]
    assert axes[1] == axes[2] == [f"{n} s" for n in range(5)] and axes[0] == [], axes
    wide = [re.findall(r'<rect class="span"[^>]* width="([\d.]+)"', each) for each in steps[1:3]]
    assert wide[0] == wide[1], "one scale"
    assert "0123456789ab with uncommitted changes" in body and "2023-11-14 22:13:20 UTC" in body
    assert body.count('class="stage"') == 4 and "&lt;/script&gt;" in body


def test_a_report_is_written_at_the_end_of_a_run(tmp_path: Path) -> None:
    """And the numbers of its steps are those of all ranks."""
    done = command(*TINY, "pp=2", "run_dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [run] = data_of(tmp_path / "run" / "report.html")["runs"]
    assert run["result"]["status"] == "completed" and len(run["curves"]["loss"]) == 5
    assert [stage["ranks"] for stage in run["layout"]["stages"]] == ["rank 0", "rank 1"]
    assert (
        run["layout"]["device"] == "2 x cpu with gloo" and "torch" in run["starts"][0]["versions"]
    )
    assert run["layout"]["model"].endswith("parameters") and run["layout"]["data"]
    [schedule] = run["charts"]
    microbatches = run["layout"]["mesh"].partition("schedule=")[2].split()[1]
    assert [len(row) for row in schedule["rows"]] == [2 * int(microbatches)] * 2
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    tokens = 16 * 16  # batch_size and seq_len
    assert [record["tokens"] for record in records] == [step * tokens for step in range(1, 6)]
    assert [round(r["tokens_per_second"] * r["step_seconds"]) for r in records] == [tokens] * 5


@pytest.mark.slow
def test_a_failed_run_has_a_report_unless_switched_off(tmp_path: Path) -> None:
    nan = ["model.num_hidden_layers=2", "optimizer=sgd", "optimizer.lr=1e12", "optimizer.clip=null"]
    done = command(*TINY, *nan, "steps=30", "run_dir=bad", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    [run] = data_of(tmp_path / "bad" / "report.html")["runs"]
    assert run["result"]["status"] == "failed" and "nan" in run["result"]["error"]
    command(*TINY, "report=false", "run_dir=without", cwd=tmp_path)
    assert not (tmp_path / "without" / "report.html").exists()
