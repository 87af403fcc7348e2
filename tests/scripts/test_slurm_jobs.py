"""The job scripts in a real SLURM of two nodes on this machine: real sbatch, srun and torchrun.

Each job is submitted from a folder of its own, as from a user's project. Its cluster.env names the
Python to take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm_cluster import ROOT, Cluster, missing
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

TINY = "model.num_hidden_layers=2 model.hidden_size=32 model.intermediate_size=64 seq_len=16 batch_size=4 data=synthetic"
TINY = [*TINY.split(), "data.vocab_size=64", "validation.every=0", "logger=none", "device=cpu"]
# says that it was stopped before its first step, however often it is started
NEVER_GETS_ANYWHERE = """
import json, pathlib, sys, time
if "--check" not in sys.argv:
    by = "max_time" if "max_time=1" in sys.argv else "SIGUSR1"
    folder = pathlib.Path(sys.argv[-1].removeprefix("run_dir="))
    result = {"status": "stopped", "error": f"stopped early by {by}, with", "seconds": time.time()}
    (folder / "result.json").write_text(json.dumps(result))
    sys.exit(75)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project, with what the cluster needs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}$PATH"
    text = f'export PATH="{path}"\nexport PYTHONPATH="{ROOT}"\nexport NPROC=1\n'
    (tmp_path / "cluster.env").write_text(text)
    return tmp_path


def steps(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.open()] if path.exists() else []


def result(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())


def log(folder: Path) -> str:
    return (folder / "log").read_text()


def test_a_preempted_job_on_two_nodes_is_requeued_and_resumes(
    cluster: Cluster, folder: Path
) -> None:
    """The signal is the one that SLURM sends before a time limit."""
    words = [*TINY, "dp=2", "steps=150"]
    job = cluster.submit("train.sbatch", *words, options=("--nodes=2",), cwd=folder)
    run_dir = folder / "outputs" / f"slurm-{job}"
    until(lambda: len(steps(run_dir)) > 2, timeout=120)
    cluster.ask("scancel", "--signal=USR1", "--batch", job)
    ended = cluster.wait(job)
    text = log(folder)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), text
    (stop,) = (json.loads(line) for line in (run_dir / "events.jsonl").open() if "USR1" in line)
    assert f"requeued after {stop['step']} steps" in text
    assert f"resuming from step {stop['step']}\n" in text and stop["step"] < 150
    assert steps(run_dir) == list(range(1, 151)), "each step once"
    assert result(run_dir)["status"] == "completed"
    for restart, block in enumerate(text.split("job        ")[1:]):
        said = dict(line.split(maxsplit=1) for line in block.splitlines()[1:8])
        assert block.startswith(f"{job} (titanlike)\n")
        assert said["start"].endswith(f", restart {restart}")
        assert said["nodes"] == "2: n1 n2" and said["ranks"] == "1 a node, 2 in all, by torchrun"
        assert {"python", "torch", "titanlike"} < said.keys()


def test_srun_starts_each_rank_by_itself(cluster: Cluster, folder: Path) -> None:
    """Three ranks on two nodes, two on one and one on the other, in a run directory of the
    user's."""
    options = ("--nodes=2", "--ntasks=3")
    words = [*TINY, "dp=3", "batch_size=6", "steps=3", "run_dir=my runs/first"]
    job = cluster.submit("train_srun.sbatch", *words, options=options, cwd=folder)
    assert cluster.wait(job)["JobState"] == "COMPLETED", log(folder)
    run_dir = folder / "my runs" / "first"
    assert steps(run_dir) == [1, 2, 3] and result(run_dir)["status"] == "completed"
    assert "ranks      2,1 a node, 3 in all, by srun" in log(folder)
    assert not (folder / "outputs").exists()


def test_a_mistake_is_told_once_within_seconds_and_no_node_begins(
    cluster: Cluster, folder: Path
) -> None:
    words = [*TINY, "dp=2", "optimizer.lrr=0.1"]
    job = cluster.submit("train.sbatch", *words, options=("--nodes=2",), cwd=folder)
    ended = cluster.wait(job, timeout=60)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    text = log(folder)
    assert text.count("1 error in the config") == 1 and text.endswith(
        "optimizer.lrr=0.1: unknown key; write optimizer.lr=0.1\n"
    )
    left = [path for path in (folder / "outputs").rglob("*") if path.is_file()]
    assert left == []


def test_a_sweep_is_an_array_whose_tasks_share_the_jobs(cluster: Cluster, folder: Path) -> None:
    words = [*TINY, "steps=2", "seed=0,1"]
    array = cluster.submit("sweep.sbatch", *words, options=("--array=3-5:2",), cwd=folder)
    for task in (3, 5):
        assert cluster.wait(f"{array}_{task}")["JobState"] == "COMPLETED", log(folder)
    sweep = folder / "outputs" / f"slurm-sweep-{array}"
    assert {result(sweep / f"{number}")["status"] for number in range(2)} == {"completed"}
    assert all(f"seed={job}" in result(sweep / job)["overrides"] for job in "01")


def test_an_array_with_gaps_is_refused(cluster: Cluster, folder: Path) -> None:
    array = cluster.submit("sweep.sbatch", "seed=0,1", options=("--array=0,3",), cwd=folder)
    for task in (0, 3):
        assert cluster.wait(f"{array}_{task}")["ExitCode"] == "2:0"
    assert log(folder).count("gaps; write sbatch --array=0-1\n") == 2


def test_a_job_that_its_user_cancels_saves_and_stays_cancelled(
    cluster: Cluster, folder: Path
) -> None:
    job = cluster.submit("train_srun.sbatch", *TINY, "steps=100000", cwd=folder)
    run_dir = folder / "outputs" / f"slurm-{job}"
    until(lambda: len(steps(run_dir)) > 2, timeout=120)
    cluster.ask("scancel", job)
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    assert result(run_dir)["status"] == "stopped", log(folder)
    last = steps(run_dir)[-1]
    assert (run_dir / "checkpoints" / f"step-{last:08d}" / "COMMITTED").exists()
    assert "requeued" not in log(folder)


@pytest.mark.parametrize(
    "words, code, restarts",
    [(["max_time=1"], "75:0", "0"), pytest.param([], "1:0", "1", marks=pytest.mark.slow)],
    ids=["its own config ends it", "two starts bring no step"],
)
def test_a_job_without_progress_is_not_requeued(
    cluster: Cluster, folder: Path, words: list[str], code: str, restarts: str
) -> None:
    (folder / "train.py").write_text(NEVER_GETS_ANYWHERE)
    ended = cluster.wait(cluster.submit("train_srun.sbatch", *words, cwd=folder))
    assert (ended["ExitCode"], ended["Restarts"]) == (code, restarts), log(folder)
    assert words or "two starts in a row completed no new step" in log(folder)


def test_an_environment_file_that_is_not_there_is_named(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cluster.environment, "TITANLIKE_ENV", "/no/such.env")
    ended = cluster.wait(cluster.submit("train.sbatch", cwd=folder))
    assert ended["ExitCode"] == "2:0"
    assert log(folder).startswith("TITANLIKE_ENV=/no/such.env: cannot be read on ")


def test_a_sweep_goes_to_slurm_through_submitit(cluster: Cluster, folder: Path) -> None:
    """On two nodes, where srun starts each rank; a job that fails does not stop the other."""
    words = [*TINY, "dp=2", "steps=3", "batch_size=4,5", "run_dir=night"]
    launcher = ["partition=debug", "nodes=2", "tasks_per_node=1", "timeout_min=5", "mem_gb=null"]
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "train.py"), "-m", *words),
            *("hydra/launcher=submitit_slurm", *(f"hydra.launcher.{word}" for word in launcher)),
        ],
        cwd=folder,
        env={**cluster.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 1, done.stderr
    assert steps(folder / "night" / "0") == [1, 2, 3]
    told = [result(folder / "night" / job)["status"] for job in "01"]
    assert told == ["completed", "invalid"]
    assert "1 of 2 done; left: 1 (invalid)" in done.stdout
