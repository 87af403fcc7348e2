"""What became of each job of a sweep, its numbers, and the list of jobs, from the files that it left."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from support.paths import ROOT
from support.sweep_folders import a_sweep, config, done, log, rows, steps
from titanlike.core.metrics.run_files import Events
from titanlike.core.metrics.summary import Summary, is_maximized, objective_value, summarize
from titanlike.run.sweep import OBJECTIVES, add_job, best_job, read_jobs


def test_a_job_that_was_not_started_waits_and_one_with_a_result_has_ended(tmp_path):
    """A tool's jobs keep their files in a folder of their own."""
    a_sweep(tmp_path, *([f"seed={i}"] for i in range(3)))
    done(tmp_path / "0" / "verify", value=512.0)
    (tmp_path / "1").mkdir()
    done(tmp_path / "1", value=9e9)  # of a training run in the same place: not the tool's
    found = rows(tmp_path, "loss", "verify")
    assert [row.status for row in found] == ["completed", "waiting", "waiting"]
    assert [row.value for row in found] == [512.0, None, None]


def test_speed_is_the_steady_state_speed(tmp_path):
    """The median of the second half since the last start: compiling and a hiccup do not count."""
    records = steps(20, speed=1000.0)
    for record in (*records[:10], records[14]):
        record["tokens_per_second"] = 3.0
    path = log(tmp_path, records)
    with path.open("a") as file:
        file.write('{"step": 21, "loss": 9.0, "tokens_per_s')  # it writes this very moment
    first = summarize(tmp_path)
    assert (first.steps, first.tokens_per_second, first.memory_bytes) == (20, 1000.0, 400 << 20)
    assert first.step_seconds == 2.048 and first.mfu is None
    assert first.loss == records[-1]["loss"] and first.val_loss == records[-1]["val_loss"]
    Events(tmp_path, lambda line: None).log("resume", 10)
    faster = [record | {"tokens_per_second": 5000.0} for record in steps(12)[10:]]
    log(tmp_path, faster, start=10)
    assert summarize(tmp_path).tokens_per_second == 5000.0  # step 12, on the new machine
    log(tmp_path, steps(6, speed=7000.0))  # and once more from the beginning
    assert (summarize(tmp_path).steps, summarize(tmp_path).tokens_per_second) == (6, 7000.0)


def test_the_last_record_is_read_from_the_end_of_a_long_file(tmp_path):
    """Also a validation that lies far back. 20,000 steps are not read as a whole."""
    records = steps(20_000, val_every=0)
    records[4_000]["val_loss"] = 1.25
    records[150]["val_loss"] = 7.0
    path = log(tmp_path, records)
    found = summarize(tmp_path)
    assert (found.steps, found.val_loss) == (20_000, 1.25)
    assert objective_value("val_loss", tmp_path) == 1.25
    path.write_bytes(path.read_bytes().replace(b'"val_loss"', b'"other"'))
    assert objective_value("val_loss", tmp_path) == records[-1]["loss"]


def test_a_run_without_a_complete_record_has_no_metrics(tmp_path):
    """It is a row like others; a torn result, as of a copy that broke off, is none."""
    a_sweep(tmp_path, *([[]] * 4))
    for number, text in enumerate((b"", b"\n", b'{"step": 1, "lo', b"\xff\xfe\n[1]\n{}\n")):
        folder = tmp_path / str(number)
        config(folder)
        (folder / "metrics.jsonl").write_bytes(text)
        assert summarize(folder) == summarize(tmp_path / "none") == Summary()
        (folder / "result.json").write_text('{"status": "comp')
    assert [row.status for row in rows(tmp_path, "loss")] == ["killed"] * 4


@pytest.mark.parametrize("value", ["loss", "tokens_per_second", "memory_bytes"])
def test_the_best_job_is_the_one_that_the_objective_says(tmp_path, value):
    """The most tokens a second, or the least of a loss. A loss that is nan, or of a job that did
    not complete, is never the best."""
    a_sweep(tmp_path, *([f"seed={i}"] for i in range(4)))
    for number, size in enumerate((math.nan, 2.0, 3.0, 1.0 if not is_maximized(value) else 9.0)):
        names = [name for name in OBJECTIVES if name != "memory_bytes" or math.isfinite(size)]
        log(tmp_path / str(number), [{"step": 1, **{name: size for name in names}}])
        status, error = ("completed", None) if number < 3 else ("failed", "no")
        done(tmp_path / str(number), status, error, value=size)
    assert best_job(rows(tmp_path, value), value).number == (2 if is_maximized(value) else 1)


def test_processes_add_jobs_at_once_and_none_is_lost(tmp_path):
    """Nor does a line that a killed process has torn take another with it. Credentials are in no
    file of a sweep."""
    assert read_jobs(tmp_path) == {}
    secret = "hf_" + "a1B2" * 8
    add_job(tmp_path, 0, [f"model.hf_token={secret}", "pp=1"])
    with (tmp_path / "sweep.jsonl").open("a") as file:
        file.write('{"number": 7, "ov')
    code = (
        "import sys; from pathlib import Path; from titanlike.run.sweep import add_job\n"
        "for i in range(1, 41): add_job(Path(sys.argv[1]), i, ['a=' + 'x' * 5000])"
    )
    tasks = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) for _ in range(3)
    ]
    assert [task.wait(60) for task in tasks] == [0, 0, 0]
    jobs = read_jobs(tmp_path)
    assert [*jobs] == [*range(41)] and jobs[0] == ["model.hf_token=***", "pp=1"]
    assert {len(overrides[0]) for number, overrides in jobs.items() if number} == {5002}
    assert secret not in (tmp_path / "sweep.jsonl").read_text()
