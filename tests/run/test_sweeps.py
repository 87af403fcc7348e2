"""Sweeps: each job by itself, whatever becomes of it; a table at the end; what is left, later."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.cells import GRID, slow
from support.launched import Launched
from support.paths import ROOT
from support.run_files import result
from support.waiting import until
from support.wandb_file import read_wandb_file
from titanlike.core.config.groups.jobs import Sweep
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator
from titanlike.core.launch.run_dir_lock import lock_run_dir
from titanlike.core.metrics.run_files import write_result
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.run import sweep_jobs
from titanlike.run.job import JobRunner
from titanlike.run.sweep import JobRow, SweepRun, shared_gpus
from titanlike.run.sweep_jobs import run_processes

JOBS = ROOT / "tests" / "support" / "sweep_jobs.py"
TINY = "data=synthetic logger=none model.num_hidden_layers=2 model.hidden_size=16 model.num_attention_heads=2 model.num_key_value_heads=1"
TINY = [
    *TINY.split(),
    "model.intermediate_size=32",
    "validation.every=0",
    "batch_size=4",
    "seq_len=16",
]
TINY += ["checkpoint.every=0", "device=cpu"]


def sweep(*words: object, job: str = "trains") -> Launched:
    return Launched(job, "-m", *TINY, *words, program=JOBS)


def table(folder: Path) -> list[JobRow]:
    return SweepRun(folder).rows()


def statuses(folder: Path) -> list[str]:
    return [row.status for row in table(folder)]


def test_resume_runs_the_failed_invalid_and_killed_jobs_of_a_sweep(tmp_path: Path) -> None:
    words = ["steps=1", "seed=3,five,7,8", f"run_dir={tmp_path}"]
    first = sweep(*words, "sweep.parallel=2")
    waits = tmp_path / "2" / "first"
    until(waits.exists, 120)
    until(lambda: waits.read_text())
    os.kill(int(waits.read_text()), signal.SIGKILL)
    code, out, err = first.wait(180)
    assert code == 1
    rows = table(tmp_path)
    expected = ["failed", "invalid", "killed", "completed"]
    assert [row.status for row in rows] == expected
    assert [row.overrides[-1] for row in rows] == ["seed=3", "seed=five", "seed=7", "seed=8"]
    assert all(row.summary.loss > 4 for row in rows if row.status == "completed")
    assert "seed 3 is not liked" in err
    assert "job 1: seed=five is invalid\n  seed=five: must be an integer" in err
    refused, begun = (tmp_path / path for path in ("1/result.json", "0/first"))
    assert refused.stat().st_mtime < begun.stat().st_mtime, "it is known before the first begins"
    assert "(3 of 3)" in out
    assert "killed by SIGKILL" in err
    assert "1 of 4 done; left: 0 (failed), 1 (invalid), 2 (killed)" in out
    assert first.all_exit()

    assert "to run what is left (jobs 1 are invalid as they are):" in out
    (line,) = (line for line in out.splitlines() if line.endswith("sweep.resume=true"))
    again = shlex.split(line)
    assert again[:3] == ["python", str(JOBS), "-m"]
    code, out, _ = Launched("trains", *again[2:], "sweep.parallel=2", program=JOBS).wait(120)
    begun = [text.split()[1] for text in out.splitlines() if " begins" in text]
    assert begun == ["0:", "2:"] and code == 1, "the invalid job stays so"
    assert statuses(tmp_path) == ["completed", "invalid", "completed", "completed"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Ctrl-C", "kill -9"])
def test_a_stopped_or_killed_sweep_resumes(tmp_path: Path, end: str) -> None:
    words = ["steps=60", "seed=1,2", f"run_dir={tmp_path}"]
    first = sweep(*words)
    metrics = tmp_path / "0" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(read_jsonl(metrics)) > 2)
    if end == "Ctrl-C":
        for process in first.alive():  # as a terminal does
            process.send_signal(signal.SIGINT)
        code, out, _ = first.wait()
        assert code == 75 and "0 of 2 done; left: 0 (stopped), 1 (waiting)" in out
        told = f"resuming from step {read_jsonl(metrics)[-1]['step']}"
    else:
        first.process.kill()
        first.wait()
        told = ""
    assert first.all_exit()
    code, out, _ = sweep(*words, "sweep.resume=true").wait()
    assert code == 0 and told in out and statuses(tmp_path) == ["completed"] * 2
    for job in "01":
        steps = [record["step"] for record in read_jsonl(tmp_path / job / "metrics.jsonl")]
        assert steps == list(range(1, 61)), "no step is missing, and none is there twice"


@pytest.mark.slow
def test_a_sweep_in_a_file_is_grouped_and_named_in_wandb(tmp_path: Path) -> None:
    """Offline; the file alone says that it is a sweep."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "pair.yaml").write_text(
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {lr: 'wsd,cosine'}}}\n"
    )
    tiny = [word for word in TINY if not word.startswith("logger")]
    where = ["--config-dir", tmp_path, f"run_dir={tmp_path}/night", "experiment=pair"]
    code, out, _ = Launched("trains", *where, *tiny, "steps=1", program=JOBS).wait()
    assert code == 0 and "2 of 2 done" in out
    assert "hydra.mode=RUN" in out[out.index("\nbest ") :].splitlines()[2], "or it is a sweep again"
    files = [*(tmp_path / "night").glob("?/wandb/**/*.wandb")]
    runs = [read_wandb_file(file) for file in sorted(files)]
    assert [(run.group, run.name) for run in runs] == [("night", "lr=wsd"), ("night", "lr=cosine")]


PROGRAM = """
import json, os, sys
print(json.dumps([os.environ.get("OMP_NUM_THREADS"), os.environ.get("RANK")]))
sys.exit({code})
"""


def test_parallel_jobs_are_bounded_and_fail_independently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the threads; the result of an earlier start is not read as that of this one."""
    monkeypatch.setenv("RANK", "3")  # of an outer launcher
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep_jobs.environment, "available_cores", lambda: 12)
    monkeypatch.setattr(
        sweep_jobs, "_program", lambda _, folder: PROGRAM.format(code=int(folder.name == "1"))
    )
    (tmp_path / "3").mkdir()
    write_result(tmp_path / "3", status="completed", value=7.0, error=None, seconds=1, overrides=[])
    told: list[str] = []
    monkeypatch.setattr(SweepRun, "say", lambda _, line, **__: told.append(line))
    jobs = {i: Config(dp=n) for i, n in enumerate([2, 2, 1, 3])}
    sweep_run = SweepRun(tmp_path, parallel=2, jobs={i: ["seed=1"] for i in range(4)})
    ends = run_processes(sweep_run, JobRunner("", ""), jobs)
    assert [end.status for end in ends] == ["failed"] * 4, "no job has left a result"
    codes = {end.number: end.error.split()[3] for end in ends}  # exited with code N
    assert codes == {0: "0", 1: "1", 2: "0", 3: "0"}
    given = [json.loads((tmp_path / str(i) / "output.log").read_text()) for i in range(4)]
    assert given == [[threads, None] for threads in ("3", "3", "6", "2")]
    running = 0
    for line in told:
        running += 1 if " begins" in line else -1
        assert running <= 2
    assert result(tmp_path / "1")["status"] == "failed"


def test_jobs_that_would_take_the_same_gpu_of_several_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless each command sees one GPU, or the jobs run on the CPU."""
    monkeypatch.setattr(accelerator, "visible_variable", lambda: "CUDA_VISIBLE_DEVICES")
    for parallel, device, count, refused in (
        *((2, "auto", 4, True), (2, "auto", 1, False), (2, "cpu", 4, False)),
        (1, "auto", 4, False),
    ):
        monkeypatch.setattr(accelerator, "count", lambda count=count: count)
        config = Config(device=device, dp=2, sweep=Sweep(parallel=parallel))
        problems = shared_gpus(config)
        assert [problem.fix for problem in problems] == ["sweep.parallel=1"] * refused
        assert not refused or "CUDA_VISIBLE_DEVICES=0 ..." in problems[0].reason


def test_check_says_which_jobs_are_wrong_and_starts_nothing(tmp_path: Path) -> None:
    words = ["seed=1", "batch_size=4,5", "schedule.microbatches=4", f"run_dir={tmp_path}/s"]
    code, out, err = sweep(*words, "--check").wait()
    assert code == 2 and "job 1: batch_size=5" in err and "job 0" not in err
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_search_of_trials_beats_the_default_and_outlives_failed_ones(tmp_path: Path) -> None:
    """On the real text. hydra/launcher=basic runs jobs in one process: one start for all."""
    words = [word for word in TINY if word not in ("data=synthetic", "checkpoint.every=0")]
    words += ["steps=20", "lr.warmup=2", "checkpoint.last=false", f"run_dir={tmp_path}/s"]
    search = [
        "hydra/sweeper=optuna",
        "hydra/launcher=basic",
        "optimizer.lr=tag(log,interval(1e-3,1))",
        "seed=choice(0,3)",
        "hydra.sweeper.n_trials=12",
    ]
    default = Launched("trains", *words[:-1], f"run_dir={tmp_path}/d", program=JOBS)
    assert default.wait()[0] == 0
    code, out, _ = Launched("trains", "-m", *words, *search, program=JOBS).wait(200)
    rows = table(tmp_path / "s")
    assert code == 1 and len(rows) == 12 and "best loss: " in out
    done = [row.summary.loss for row in rows if row.status == "completed"]
    assert 2 < len(done) < 12, "no job with seed 3 ends well"
    assert min(done) < result(tmp_path / "d")["value"] - 0.1


@pytest.mark.slow
def test_a_search_that_is_resumed_runs_what_is_not_done(tmp_path: Path) -> None:
    """Its seed repeats the trials; a job that is done has its value from its first run."""
    words = ["hydra/sweeper=optuna", "seed=range(0,9)", f"run_dir={tmp_path}"]
    assert sweep(*words, "hydra.sweeper.n_trials=2", job="where").wait()[0] == 0
    begun = (tmp_path / "0" / "where").read_text()
    again = sweep(*words, "hydra.sweeper.n_trials=3", "sweep.resume=true", job="where")
    code, out, _ = again.wait()
    assert code == 0 and "job 0: " not in out and "job 2: seed=" in out
    assert (tmp_path / "0" / "where").read_text() == begun and statuses(tmp_path)[2] == "completed"


@pytest.mark.parametrize(
    "words, told",
    [
        (["sweep.share=0/2"], "sweep.share=0/2: unknown key; a command has all jobs"),
        (["shedule=gpipe,1f1b"], "write schedule=gpipe"),
        (["hydra/sweeper=optuna", "optimizr.lr=interval(0.1,1)"], "optimizer.lr=interval(0.1,1)"),
        *slow(
            (["value=los"], "write value=loss"),
            (["sweep.parallel=1,2"], "is common to all jobs of a sweep; write sweep.parallel=1"),
            (["sweep.submit=sbatch"], "hydra/launcher=submitit_slurm submits each job"),
            (["sweep.parallel=-1"], "sweep.parallel=-1: must be at least 1"),
            (["optimizer.lr=interval(0.1,1)"], "write hydra/sweeper=optuna"),
            (["seed=3,4"], "seed=3,4: the key is given twice"),
            (["hydra.sweep.subdir=a"], "a sweep's jobs are in folders by their numbers"),
            marks=GRID,
        ),
    ],
)
def test_a_sweep_that_cannot_be_run_as_asked_is_refused_at_once(
    tmp_path: Path, words: list[str], told: str
) -> None:
    code, _, err = sweep("seed=1,2", *words, f"run_dir={tmp_path}/s").wait()
    assert code == 2 and told in err
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_the_sweep(tmp_path: Path) -> None:
    """`train.py -m ... | head -1`, or a tee that died."""
    words = shlex.join(["where", "-m", *TINY, "seed=1,2", f"run_dir={tmp_path}"])
    line = f"{sys.executable} {JOBS} {words} | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("a sweep of 2 jobs") and "Traceback" not in done.stderr
    until(lambda: (tmp_path / "1" / "result.json").exists())
    assert statuses(tmp_path) == ["completed"] * 2


def opened(folder: Path, resume: bool = True) -> SweepRun:
    sweep_run = SweepRun(folder)
    assert sweep_run.open(resume) == []
    return sweep_run


def test_a_folder_of_a_run_or_of_another_start_is_refused(tmp_path: Path) -> None:
    def told(folder: Path, resume: bool) -> list[str]:
        return [problem.reason for problem in SweepRun(folder).open(resume)]

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert told(tmp_path / "run", True) == ["has a run, not a sweep"]
    first = opened(tmp_path / "s", resume=False)
    assert first.jobs_to_run([["seed=1"], ["seed=2"]]) == [0, 1]
    assert "is run by another start" in told(tmp_path / "s", True)[0]
    first.lock.close()
    assert told(tmp_path / "s", False) == ["holds a sweep of 2 jobs already"]
    assert told(tmp_path / "s", True) == []


def test_a_job_is_identified_by_its_overrides_and_claimed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = opened(tmp_path)
    grid = [["lr=wsd", f"seed={seed}", "sweep.parallel=2"] for seed in range(5)]
    assert first.jobs_to_run(grid) == [0, 1, 2, 3, 4]
    first.lock.close()
    write_result(tmp_path / "0", status="completed", value=1.0, error=None, seconds=1, overrides=[])
    early = "stopped early by max_time, with a checkpoint"
    write_result(tmp_path / "1", status="stopped", value=1.0, error=early, seconds=1, overrides=[])
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "config.yaml").touch()
    reordered = [["seed=9", f"seed={seed}", "lr=wsd"] for seed in (4, 3, 2, 1, 0, 5)]
    with lock_run_dir(tmp_path / "3"):
        second = opened(tmp_path)
        assert second.jobs_to_run(reordered) == [4, 2, 5]
    assert "job 3 runs elsewhere" in capsys.readouterr().out
    second.lock.close()
    assert opened(tmp_path).jobs_to_run(reordered) == [4, 3, 2, 5]


def test_a_sweep_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    """Its list has a header, and more of each job."""
    more = {"folder": "0", "swept": ["seed=1"]}
    lines = [{"value": "loss", "inner": ""}, {"number": 0, "overrides": ["seed=1"], **more}]
    (tmp_path / "sweep.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert opened(tmp_path).jobs_to_run([["seed=2"], ["seed=1"]]) == [1, 0]
