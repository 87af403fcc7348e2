"""Jobs under any launcher: one run directory, console output of rank 0, a log per rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from support.cells import slow
from support.launched import Launched
from titanlike.launch.barrier import BarrierTimeout
from titanlike.launch.environment import import_path, workers_environment
from titanlike.launch.signals import GRACE
from titanlike.launch.worker import Worker, barrier

OPTIONS = ("-W", "once::UnicodeWarning", "-X", "utf8")


def results(folder: Path) -> list[str]:
    paths = sorted(folder.rglob("result.json"))
    return [json.loads(path.read_text())["status"] for path in paths]


@pytest.mark.parametrize("torchrun", [0, *slow(1, 2)])
def test_two_ranks_have_one_run_directory_and_a_log_each(tmp_path: Path, torchrun: int) -> None:
    """The driver starts them, also under torchrun's default of one process; or torchrun does. It
    hands Python's own options on."""
    job, options = ("hello", ()) if torchrun else ("tells_options", OPTIONS)
    launched = Launched(job, "pp=2", torchrun=torchrun, cwd=tmp_path, real=True, python=options)
    code, out, _ = launched.wait()
    said = "hello from {} of 2\n" if torchrun else "rank {}: ['once::UnicodeWarning'], utf8 1\n"
    assert code == 0 and out == said.format(0)
    (run_dir,) = (path.parent for path in tmp_path.rglob("result.json"))
    assert run_dir.relative_to(tmp_path).parts[0] == "outputs"
    for rank in (0, 1):
        log = run_dir / "logs" / f"rank{rank}.log"
        assert said.format(rank) in log.read_text()
    assert results(tmp_path) == ["completed"]


@pytest.mark.parametrize("torchrun", [*slow(0), 2])
def test_a_failing_job_does_not_stop_a_sweep(tmp_path: Path, torchrun: int) -> None:
    mesh = "pp=2" if torchrun else "pp=1"
    sweep = Launched(
        "odd_seeds_fail", "-m", "seed=0,1,2", mesh, f"run_dir={tmp_path}", torchrun=torchrun
    )
    code, _, err = sweep.wait()
    assert code == 1 and "seed 1 is odd" in err
    assert results(tmp_path) == ["completed", "failed", "completed"]


def test_a_job_that_fails_on_one_rank_does_not_stop_a_sweep(tmp_path: Path) -> None:
    """The others, in a collective, fail immediately."""
    words = ["-m", "seed=0,1,2", "dp=2", f"run_dir={tmp_path}"]
    sweep = Launched("odd_seeds_fail_on_rank_1", *words, torchrun=2)
    code, _, err = sweep.wait()
    assert code == 1 and "rank 1 failed: RuntimeError: seed 1 is odd" in err
    assert results(tmp_path) == ["completed", "failed", "completed"]
    failed = json.loads((tmp_path / "1" / "result.json").read_text())
    assert failed["error"] == "rank 1 failed: RuntimeError: seed 1 is odd"
    assert failed["seconds"] < GRACE


@pytest.mark.slow
def test_a_sweep_does_not_start_a_job_on_ranks_that_have_stopped_waiting(tmp_path: Path) -> None:
    words = ["-m", "seed=0,1", "dp=2", f"run_dir={tmp_path}"]
    sweep = Launched("rank_0_fails_late", *words, torchrun=2)
    code, _, err = sweep.wait()
    assert code == 1 and "rank 1 failed: RuntimeError: rank 1 has enough" in err
    assert results(tmp_path) == ["failed"] and sweep.all_exit()
    assert not list((tmp_path / "1").glob("begun*"))


def test_a_job_does_not_change_the_process_of_the_next_one(tmp_path: Path) -> None:
    sweep = Launched("leaks", "-m", "seed=0,1", "pp=2", f"run_dir={tmp_path}", torchrun=2)
    code, out, _ = sweep.wait()
    found = [line for line in out.splitlines() if line.startswith("found")]
    assert code == 0 and found == ["found (None, 0)"] * 2
    for number, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        log = tmp_path / str(number) / "logs" / f"rank{rank}.log"
        assert log.read_text() == "found (None, 0)\n"


def test_a_job_chooses_the_exit_code(tmp_path: Path) -> None:
    assert Launched("exits_with_9", f"run_dir={tmp_path}").wait()[0] == 9


def test_ranks_missing_at_a_barrier_are_named(tmp_path: Path) -> None:
    worker = Worker(0, 3, 0, 3, tmp_path, torch.distributed.HashStore(), [])
    worker.store.append("start/arrived", '[2, ""],')
    with pytest.raises(BarrierTimeout, match=r"rank 1 did not reach the job's start in 0.2 s"):
        barrier(worker, "start", timeout=0.2)


def test_workers_share_the_cores_and_have_no_variables_of_an_outer_launcher(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with workers_environment(10_000):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert not {"RANK", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    assert dict(os.environ) == before


def test_the_users_folder_is_importable_in_workers_and_shadows_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = import_path()
    standard = os.path.dirname(os.__file__)
    assert path.index(standard) < path.index(str(tmp_path))
