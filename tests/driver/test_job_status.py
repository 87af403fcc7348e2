"""What became of each job of a sweep, its numbers, and the spec, from the files that it left."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from support.paths import ROOT
from support.sweep_folders import age, config, done, log, steps
from titanlike.driver.sweep_status import Job, SweepSpec, add_jobs, read_spec, write_spec
from titanlike.driver.sweep_table import read_table
from titanlike.launch.heartbeat import Beat, Heartbeat
from titanlike.metrics.run_files import Events
from titanlike.metrics.summary import OBJECTIVES, Summary, objective_value, summarize


def test_a_job_is_running_as_long_as_its_heart_beats(tmp_path):
    """Also where it logs nothing for long; a job without beats was killed."""
    run_dir = tmp_path / "0"
    config(run_dir)
    log(run_dir, steps(5))
    write_spec(tmp_path, SweepSpec("loss", "", [Job(0, "0", [], [])]))

    def look() -> Beat:
        return Beat(0, 0, 0.0, "host", 1, 5, "step", "", 0.0, 0.0)

    def status(**options: object) -> str:
        return read_table(tmp_path, **options).rows[0].status

    assert status() == "running"  # it has only just begun
    age(run_dir, 1000)
    assert status() == "killed"
    Heartbeat(run_dir, 0, 0.01, look).end("done")
    assert status() == "running"
    assert status(ended={0}) == "killed"  # its processes are known to have ended
    beat = run_dir / "logs" / "rank0.heartbeat"
    os.utime(beat, (beat.stat().st_mtime - 40,) * 2)  # more than three heartbeats of 10 s
    assert status() == "killed"
    done(run_dir)
    assert status() == "completed"


def test_a_job_that_was_not_started_waits_and_one_with_a_result_has_ended(tmp_path):
    """A tool's jobs keep their files in a folder of their own."""
    jobs = [Job(i, str(i), [f"seed={i}"], [f"seed={i}"]) for i in range(3)]
    write_spec(tmp_path, SweepSpec("tokens_per_second", "bench", jobs))
    done(tmp_path / "0" / "bench", value=512.0)
    (tmp_path / "1").mkdir()
    done(tmp_path / "1", value=9e9)  # of a training run in the same place: not the tool's
    table = read_table(tmp_path)
    assert [row.status for row in table.rows] == ["completed", "waiting", "waiting"]
    assert [row.value for row in table.rows] == [512.0, None, None]
    assert table.best is None, "whether more of it is better only the tool knows"


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
    """It is a row like others; a result that is torn, as a copy that broke off leaves it, is
    none."""
    write_spec(tmp_path, SweepSpec("loss", "", [Job(i, str(i), [], []) for i in range(4)]))
    for number, text in enumerate((b"", b"\n", b'{"step": 1, "lo', b"\xff\xfe\n[1]\n{}\n")):
        folder = tmp_path / str(number)
        config(folder)
        (folder / "metrics.jsonl").write_bytes(text)
        assert summarize(folder) == summarize(tmp_path / "none") == Summary()
        (folder / "result.json").write_text('{"status": "comp')
        age(folder, 1000)
    assert [row.status for row in read_table(tmp_path).rows] == ["killed"] * 4


@pytest.mark.parametrize("value", ["loss", "tokens_per_second", "memory_bytes"])
def test_the_best_job_is_the_one_that_the_objective_says(tmp_path, value):
    """The most tokens a second, or the least of a loss. A loss that is nan, or of a job that did
    not complete, is never the best."""
    jobs = [Job(i, str(i), [f"seed={i}"], []) for i in range(4)]
    write_spec(tmp_path, SweepSpec(value, "", jobs))
    for number, size in enumerate((math.nan, 2.0, 3.0, 1.0 if not OBJECTIVES[value] else 9.0)):
        names = [name for name in OBJECTIVES if name != "memory_bytes" or math.isfinite(size)]
        log(tmp_path / str(number), [{"step": 1, **{name: size for name in names}}])
        done(tmp_path / str(number), "completed" if number < 3 else "failed", "no" * (number == 3))
    table = read_table(tmp_path)
    assert table.best.job.number == (2 if OBJECTIVES[value] else 1)


def test_a_job_that_failed_before_it_validated_has_no_validation_loss(tmp_path):
    """Its training loss is not compared with the others' validation losses."""
    write_spec(tmp_path, SweepSpec("val_loss", "", [Job(i, str(i), [], []) for i in (0, 1)]))
    for number, status in enumerate(("completed", "failed")):
        log(
            tmp_path / str(number),
            [{"step": 1, "loss": 2.0, **({} if number else {"val_loss": 3.0})}],
        )
        done(tmp_path / str(number), status, "nan" * number)
    assert [row.value for row in read_table(tmp_path).rows] == [3.0, None]


def test_the_tasks_of_an_array_add_jobs_at_once_and_none_is_lost_or_twice(tmp_path):
    """Nor does a line that a killed task has torn take another with it."""
    write_spec(tmp_path, SweepSpec("loss", "", [Job(0, "0", ["pp=1"], ["pp=1"])]))
    with (tmp_path / "sweep.jsonl").open("a") as file:
        file.write('{"number": 7, "fol')
    add_jobs(tmp_path, [Job(41, "41", ["a=" + "y" * 5000], [])])
    code = (
        "import sys; from pathlib import Path; from titanlike.driver.sweep_status import *\n"
        "for i in range(1, 41):\n"
        "    add_jobs(Path(sys.argv[1]), [Job(i, str(i), ['a=' + 'x' * 5000], [])])"
    )
    tasks = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) for _ in range(3)
    ]
    assert [task.wait(60) for task in tasks] == [0, 0, 0]
    spec = read_spec(tmp_path)
    assert [job.number for job in spec.jobs] == list(range(42))
    assert spec.jobs[0] == Job(0, "0", ["pp=1"], ["pp=1"])
    assert {len(job.overrides[0]) for job in spec.jobs[1:]} == {5002}


def test_a_plan_comes_back_as_it_was_but_for_its_credentials(tmp_path):
    """They are in no file of a sweep."""
    assert read_spec(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        add_jobs(tmp_path, [])
    secret = "hf_" + "a1B2" * 8
    jobs = [Job(0, "0", [f"model.hf_token={secret}", "pp=1"], ["pp=1"])]
    spec = SweepSpec("mfu", "verify", jobs)
    write_spec(tmp_path, spec)
    add_jobs(tmp_path, [Job(1, "1", [f"model.hf_token={secret}"], [])])
    assert secret not in (tmp_path / "sweep.jsonl").read_text()
    back = read_spec(tmp_path)
    assert (back.value, back.inner) == ("mfu", "verify")
    assert back.jobs[0] == Job(0, "0", ["model.hf_token=***", "pp=1"], ["pp=1"])
