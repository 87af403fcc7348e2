"""Sweeps: each job by itself, whatever becomes of it; a table at the end; what is left, later."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from support.cells import GRID, slow
from support.launched import Launched
from support.paths import ROOT
from support.stand_in_gpus import gpus
from support.waiting import until
from support.wandb_file import read_wandb_file
from titanlike.config.schema import Sweep
from titanlike.launch.run_dir_owner import lock_run_dir
from titanlike.metrics.result import write_result
from titanlike.metrics.sinks import read_jsonl
from titanlike.sweeps.plan import read_plan
from titanlike.sweeps.processes import Command, Processes
from titanlike.sweeps.sweep_run import SweepRun

JOBS = ROOT / "tests" / "support" / "sweep_jobs.py"
TINY = [
    "data=synthetic",
    "logger=none",
    "model.layers=2",
    "model.dim=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn_dim=32",
    "validation.every=0",
    "batch_size=4",
    "seq_len=16",
    "checkpoint.every=0",
    "device=cpu",
]


def sweep(*words: object, job: str = "trains", torchrun: int = 0) -> Launched:
    return Launched(job, "-m", *TINY, *words, program=JOBS, torchrun=torchrun)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def statuses(folder: Path) -> list[str]:
    return [row["status"] for row in table(folder)]


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_of_five_jobs_one_fails_one_is_invalid_one_is_killed_and_resume_runs_these(
    tmp_path: Path,
) -> None:
    words = ["steps=3", "seed=0,3,five,7,8", f"run_dir={tmp_path}"]
    first = sweep(*words, "sweep.parallel=2")
    waits = tmp_path / "3" / "first"
    until(waits.exists, 120)
    until(lambda: waits.read_text())
    os.kill(int(waits.read_text()), signal.SIGKILL)
    code, out, err = first.wait(180)
    assert code == 1
    rows = table(tmp_path)
    expected = ["completed", "failed", "invalid", "killed", "completed"]
    assert [row["status"] for row in rows] == expected
    assert [row["seed"] for row in rows] == ["0", "3", "five", "7", "8"]
    assert all(float(row["final_loss"]) > 4 for row in rows if row["status"] == "completed")
    assert "seed 3 is not liked" in err
    assert "job 2: seed=five is invalid\n  seed=five: must be an integer" in err
    refused, begun = (tmp_path / path for path in ("2/result.json", "0/first"))
    assert refused.stat().st_mtime < begun.stat().st_mtime, "it is known before the first begins"
    assert "(4 of 4)" in out
    assert "killed by SIGKILL" in err
    assert "2 of 5 done; left: 1 (failed), 2 (invalid), 3 (killed)" in out
    assert (tmp_path / "sweep.png").exists() and "| **" in (tmp_path / "sweep.md").read_text()
    assert first.all_exit()

    assert "to run what is left, without seed=five:" in out
    (line,) = (line for line in out.splitlines() if line.endswith("sweep.resume=true"))
    again = shlex.split(line)
    assert again[:3] == ["python", str(JOBS), "-m"]
    code, out, _ = Launched("trains", *again[2:], "sweep.parallel=2", program=JOBS).wait(120)
    begun = [text.split()[1] for text in out.splitlines() if " begins" in text]
    assert begun == ["1:", "3:"] and code == 0, "the line leaves out the invalid value"
    assert statuses(tmp_path) == ["completed", "completed", "invalid", "completed", "completed"]


@pytest.mark.slow
def test_ctrl_c_stops_the_job_with_a_checkpoint_and_resume_goes_on_from_it(tmp_path: Path) -> None:
    words = ["steps=400", "seed=1,2", f"run_dir={tmp_path}"]
    first = sweep(*words)
    metrics = tmp_path / "0" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(read_jsonl(metrics)) > 3)
    for process in first.alive():  # as a terminal does
        process.send_signal(signal.SIGINT)
    code, out, _ = first.wait()
    assert code == 75 and "0 of 2 done; left: 0 (stopped), 1 (waiting)" in out
    assert first.all_exit()
    stopped_at = read_jsonl(metrics)[-1]["step"]
    code, out, _ = sweep(*words, "sweep.resume=true").wait()
    assert code == 0 and f"resuming from step {stopped_at}" in out and "2 of 2 done" in out


@pytest.mark.slow
def test_a_sweep_whose_process_is_killed_all_exit_and_is_gone_on_with(tmp_path: Path) -> None:
    words = ["steps=60", "seed=1,2", f"run_dir={tmp_path}"]
    first = sweep(*words)
    metrics = tmp_path / "0" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(read_jsonl(metrics)) > 2)
    first.process.kill()
    first.wait()
    assert first.all_exit()
    code, out, _ = sweep(*words, "sweep.resume=true").wait()
    assert code == 0 and statuses(tmp_path) == ["completed"] * 2
    for job in "01":
        steps = [record["step"] for record in read_jsonl(tmp_path / job / "metrics.jsonl")]
        assert steps == list(range(1, 61)), "no step is missing, and none is there twice"


@pytest.mark.slow
def test_a_sweep_in_a_file_is_grouped_and_named_in_wandb(tmp_path: Path) -> None:
    """Offline; the file alone says that it is a sweep."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "pair.yaml").write_text(
        "# @package _global_\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
        "      lr: wsd,cosine\n      model.layers: 1\n"
    )
    tiny = [word for word in TINY if not word.startswith(("logger", "model.layers"))]
    words = ["experiment=pair", *tiny, "steps=2"]
    where = ["--config-dir", tmp_path / "conf", f"run_dir={tmp_path}/night"]
    run = Launched("trains", *where, *words, "sweep.parallel=2", program=JOBS)
    code, out, _ = run.wait()
    assert code == 0 and "2 of 2 done" in out
    names = {}
    for job in "01":
        (file,) = (tmp_path / "night" / job / "wandb").rglob("*.wandb")
        run = read_wandb_file(file)
        assert run.group == "night"
        names[job] = run.name
    assert names == {"0": "lr=wsd", "1": "lr=cosine"}


@pytest.mark.slow
def test_any_submit_command_takes_the_jobs(tmp_path: Path) -> None:
    """The command is a script that puts the job into the background, as a scheduler would."""
    submit = tmp_path / "submit"
    submit.write_text(
        f"#!/bin/sh\necho queued as $1\nshift\n{sys.executable} {ROOT / 'train.py'} "
        '"$@" >/dev/null 2>&1 &\n'
    )
    submit.chmod(submit.stat().st_mode | stat.S_IXUSR)
    words = ["steps=2", "seed=1,2", "batch_size=4,5", "schedule.microbatches=4"]
    first = sweep(*words, f"sweep.submit={submit} j17", "sweep.wait=90s", f"run_dir={tmp_path}/s")
    code, out, err = first.wait()
    assert code == 1 and out.count("submitted: queued as j17") == 2
    assert err.count("does not divide into 4") == 2
    assert statuses(tmp_path / "s").count("completed") == 2
    assert statuses(tmp_path / "s").count("invalid") == 2
    assert first.all_exit()


@pytest.mark.slow
def test_two_tasks_of_a_job_array_share_a_sweep(tmp_path: Path) -> None:
    words = ["seed=1,2,3", f"run_dir={tmp_path}"]
    tasks = [sweep(*words, f"sweep.share={i}/2", job="where") for i in (0, 1)]
    ends = [task.wait() for task in tasks]
    assert [code for code, _, _ in ends] == [0, 0]
    begun = [[ln.split()[1] for ln in out.splitlines() if ln[:4] == "job "] for _, out, _ in ends]
    assert begun == [["0:", "2:"], ["1:"]]
    plan = read_plan(tmp_path)
    assert plan is not None and [job.number for job in plan.jobs] == [0, 1, 2]
    code, out, _ = sweep("seed=1,2,3,4", words[1], "sweep.resume=true", job="where").wait()
    assert code == 0 and "a sweep of 4 jobs, 3 of them done before" in out
    refused = sweep(*words, job="where").wait()
    assert refused[0] == 2 and "holds a sweep of 4 jobs already; write sweep.resume" in refused[2]


@pytest.mark.slow
def test_several_jobs_at_a_time_share_the_gpus(tmp_path: Path, monkeypatch) -> None:
    """As on a machine with 4 GPUs, of which the user has left 3, named in the usual way."""
    gpus(monkeypatch, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    commands = [
        partial(
            Command,
            name=str(i),
            function="support.sweep_jobs:where",
            inner="",
            arguments=[*TINY, f"seed={i}", f"run_dir={tmp_path}/{i}"],
            overrides=[],
            folder=tmp_path / str(i),
            ranks=ranks,
            device="auto",
        )
        for i, ranks in enumerate([2, 2, 1])
    ]
    ends = Processes(0, lambda command: None, lambda end: None).run(commands)
    assert [(end.status, end.value) for end in ends] == [("completed", float(i)) for i in range(3)]
    spans = [(tmp_path / str(i) / "where").read_text().split() for i in range(3)]
    (a0, a1, a, _), (b0, b1, b, _), (c0, c1, c, _) = spans
    assert a == "0,2" and c == "3" and len(b.split(",")) == 2
    assert float(b0) > float(a1) or float(b0) > float(c1), "there was no room beside the first"


def test_check_says_which_jobs_are_wrong_and_starts_nothing(tmp_path: Path) -> None:
    words = ["seed=1", "batch_size=4,5", "schedule.microbatches=4", f"run_dir={tmp_path}/s"]
    code, out, err = sweep(*words, "--check").wait()
    assert code == 2 and "job 1: batch_size=5" in err and "job 0" not in err
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_search_of_20_trials_beats_the_default_and_outlives_failed_ones(tmp_path: Path) -> None:
    """On the real text. hydra/launcher=basic runs the jobs in one process, which saves their
    start."""
    words = [word for word in TINY if word not in ("data=synthetic", "checkpoint.every=0")]
    words += ["steps=20", "lr.warmup=2", "checkpoint.last=false", f"run_dir={tmp_path}/s"]
    search = [
        "hydra/sweeper=optuna",
        "hydra/launcher=basic",
        "optimizer.lr=tag(log,interval(1e-3,1))",
        "seed=choice(0,3)",
        "hydra.sweeper.n_trials=20",
    ]
    default = Launched("trains", *words[:-1], f"run_dir={tmp_path}/d", program=JOBS)
    assert default.wait()[0] == 0
    code, out, _ = Launched("trains", "-m", *words, *search, program=JOBS).wait(200)
    rows = table(tmp_path / "s")
    assert code == 1 and len(rows) == 20 and "best loss: " in out
    done = [float(row["final_loss"]) for row in rows if row["status"] == "completed"]
    assert 5 < len(done) < 20, "no job with seed 3 ends well"
    assert min(done) < result(tmp_path / "d")["value"] - 0.1


@pytest.mark.parametrize(
    "words, told",
    [
        (["sweep.share=3/2"], "sweep.share=3/2: must be i/n"),
        (["value=val_los"], "write value=loss"),
        (["shedule=gpipe,1f1b"], "write schedule=gpipe"),
        (["hydra/sweeper=optuna", "optimizr.lr=interval(0.1,1)"], "optimizer.lr=interval(0.1,1)"),
        (["sweep.parallel=1,2"], "is common to all jobs of a sweep; write sweep.parallel=1"),
        *slow(
            (["sweep.wait=1h"], "sweep.wait=3600.0: there is nothing to wait for"),
            (["sweep.parallel=-1"], "sweep.parallel=-1: must be at least 0"),
            (["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"], "the best loss is"),
            (["optimizer.lr=interval(0.1,1)"], "write hydra/sweeper=optuna"),
            (
                ["value=loss,mfu"],
                "value=loss,mfu: is common to all jobs of a sweep; write value=loss",
            ),
            (["seed=3,4"], "seed=3,4: the key is given twice"),
            (["hydra.sweep.subdir=a"], "a sweep's jobs are in folders by their numbers"),
            marks=GRID,
        ),
    ],
)
def test_a_sweep_that_cannot_be_run_as_asked_is_refused_at_once(
    tmp_path: Path, words: list[str], told: str
) -> None:
    begin = time.monotonic()
    code, _, err = sweep("seed=1,2", *words, f"run_dir={tmp_path}/s").wait()
    assert code == 2 and told in err and time.monotonic() - begin < 20
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_sweep_that_varies_nothing_runs_with_wandb(tmp_path: Path) -> None:
    """No override names its job."""
    words = ["logger=wandb", "logger.mode=offline", "steps=1", f"run_dir={tmp_path}/s"]
    code, out, err = sweep("pp=1", *words).wait()
    assert code == 0 and "completed" in out, err


@pytest.mark.slow
def test_a_check_of_a_search_or_for_another_launcher_starts_nothing_either(tmp_path: Path) -> None:
    for words in (
        ["seed=1,2", "hydra/launcher=submitit_local"],
        ["optimizer.lr=interval(0.1,1)", "hydra/sweeper=optuna"],
        ["schedule=glob(*1*)", "pp=2"],
    ):
        code, out, _ = sweep(*words, f"run_dir={tmp_path}/s", "--check").wait()
        assert code == 0 and "config OK" in out and not (tmp_path / "s").exists(), words


@pytest.mark.slow
def test_a_folder_with_a_run_takes_no_sweep_and_one_with_a_sweep_no_run(tmp_path: Path) -> None:
    """Nor the sweep of a tool; and one job whose folder is taken does not stop the others."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "0").touch()
    code, out, err = sweep("seed=1,2", f"run_dir={tmp_path}/s", job="where").wait()
    assert code == 1 and "job 0: seed=1 is invalid" in err and "1 of 2 done" in out
    run = Launched("where", *TINY, f"run_dir={tmp_path}/s", program=JOBS)
    assert run.wait()[0] == 2
    words = ["-m", "seed=1,2", "--config-path", f"{tmp_path}/s/1"]
    code, _, err = Launched("where", *words, program=JOBS).wait()
    assert code == 2 and "has a run, not a sweep" in err
    again = [*TINY, f"run_dir={tmp_path}/s", "sweep.resume=true", "seed=1,2"]
    tool = Launched("-m", *again, program=ROOT / "tools" / "verify.py")
    code, _, err = tool.wait()
    assert code == 2 and "has the sweep of another program" in err


@pytest.mark.slow
def test_a_listener_that_leaves_does_not_end_the_sweep(tmp_path: Path) -> None:
    """`train.py -m ... | head -1`, or a tee that died."""
    words = shlex.join(["where", "-m", *TINY, "seed=1,2", f"run_dir={tmp_path}"])
    line = f"{sys.executable} {JOBS} {words} | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("a sweep of 2 jobs") and "Traceback" not in done.stderr
    until(lambda: (tmp_path / "sweep.csv").exists())
    assert statuses(tmp_path) == ["completed"] * 2


def context(folder: Path, **changes: object) -> SweepRun:
    settings = Sweep(resume=True, **changes)
    return SweepRun(folder, settings, "loss", ["python", "train.py"], [], [], "", True, frozenset())


def test_a_job_is_the_same_in_any_order_and_is_not_run_where_somebody_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = context(tmp_path)
    assert first.open() == []
    grid = [["lr=wsd", f"seed={seed}", "sweep.parallel=2"] for seed in range(5)]
    assert [job.number for job in first.jobs_to_run(grid)] == [0, 1, 2, 3, 4]
    write_result(tmp_path / "0", status="completed", value=1.0, error=None, seconds=1, overrides=[])
    early = "stopped early by max_time, with a checkpoint"
    write_result(tmp_path / "1", status="stopped", value=1.0, error=early, seconds=1, overrides=[])
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "submitted").write_text("job 17")
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "config.yaml").touch()
    reordered = [["seed=9", f"seed={seed}", "lr=wsd"] for seed in (4, 3, 2, 1, 0)]
    with lock_run_dir(tmp_path / "3"):
        assert [job.number for job in context(tmp_path).jobs_to_run(reordered)] == [4]
    told = capsys.readouterr().out
    assert "job 3 runs elsewhere" in told and "job 2 is submitted; to submit it again" in told
    assert [job.number for job in context(tmp_path).jobs_to_run(reordered)] == [4, 3]


def test_a_task_whose_share_is_done_ends_well_whatever_became_of_the_others(tmp_path: Path) -> None:
    task = context(tmp_path, share="0/2")
    task.open()
    task.jobs_to_run([["seed=1"], ["seed=2"]])
    for job, status in (("0", "completed"), ("1", "failed")):
        write_result(tmp_path / job, status=status, value=1.0, error="no", seconds=1, overrides=[])
    assert task.close(0) == 0
    whole = context(tmp_path)
    whole.jobs_to_run([["seed=1"], ["seed=2"]])
    assert whole.close(0) == 1
