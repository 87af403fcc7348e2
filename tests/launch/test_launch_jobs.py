"""Jobs under any launcher: one run directory, console output of rank 0, a log per rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cells import slow
from support.launched import Launched
from support.paths import ROOT
from support.run_files import result
from titanlike.launch.environment import import_path, workers_environment


@pytest.mark.parametrize("torchrun", [0, *slow(1)])
def test_two_ranks_have_one_run_directory_and_a_log_each(tmp_path: Path, torchrun: int) -> None:
    """The driver starts them, also under torchrun's default of one process."""
    words = ["pp=2", "seed=3", "+hydra.job.env_set.MINE=7"]
    launched = Launched("hello", *words, torchrun=torchrun, cwd=tmp_path)
    code, out, err = launched.wait()
    said = "hello from {} of 2, MINE=7\n"
    assert code == 0 and out == said.format(0), err
    (run_dir,) = (path.parent for path in tmp_path.rglob("result.json"))
    assert run_dir.relative_to(tmp_path).parts[0] == "outputs"
    for rank in (0, 1):
        assert said.format(rank) in (run_dir / "logs" / f"rank{rank}.log").read_text()
    assert (result(run_dir)["status"], result(run_dir)["value"]) == ("completed", 3.0)


def test_on_external_ranks_a_sweep_continues_after_max_time_and_ends_after_a_signal(
    tmp_path: Path,
) -> None:
    """And a job finds the process as the first one did, whatever that has left in it."""
    launched = Launched("stops", "-m", "seed=0,1,2", "pp=2", f"run_dir={tmp_path}", torchrun=2)
    _, out, _ = launched.wait()
    assert [path.parent.name for path in sorted(tmp_path.rglob("result.json"))] == ["0", "1"]
    assert (result(tmp_path / "0")["status"], result(tmp_path / "0")["value"]) == ("stopped", 0.0)
    assert "max_time" in result(tmp_path / "0")["error"]
    assert "SIGTERM" in result(tmp_path / "1")["error"]
    assert out.count("found (None, 0)\n") == 2
    logs = [tmp_path / str(job) / "logs" / f"rank{rank}.log" for job in (0, 1) for rank in (0, 1)]
    assert [log.read_text() for log in logs] == ["found (None, 0)\n"] * 4


def test_torchrun_does_not_restart_a_run_that_got_a_stop_request(tmp_path: Path) -> None:
    options = ("--max-restarts", "1")
    launched = Launched("stops", "pp=2", f"run_dir={tmp_path}", torchrun=2, options=options)
    assert launched.wait()[0] == 0 and result(tmp_path)["status"] == "stopped"
    assert (tmp_path / "logs" / "rank0.log").read_text().count("found") == 1


@pytest.mark.slow
def test_a_sweep_does_not_start_a_job_on_ranks_that_have_stopped_waiting(tmp_path: Path) -> None:
    words = ["-m", "seed=0,1", "dp=2", f"run_dir={tmp_path}"]
    sweep = Launched("rank_0_fails_late", *words, torchrun=2)
    code, _, err = sweep.wait()
    assert code == 1 and "rank 1 failed: RuntimeError: rank 1 has enough" in err
    assert [result(path.parent)["status"] for path in tmp_path.rglob("result.json")] == ["failed"]
    assert sweep.all_exit() and not list((tmp_path / "1").glob("begun*"))


def test_a_job_chooses_the_exit_code(tmp_path: Path) -> None:
    assert Launched("exits_with_9", f"run_dir={tmp_path}").wait()[0] == 9


def test_workers_share_the_cores_and_have_no_variables_of_an_outer_launcher(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with workers_environment(10_000):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert not {"RANK", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    assert dict(os.environ) == before


def test_workers_are_started_with_pythons_own_options() -> None:
    options = ["-W", "once::UnicodeWarning", "-X", "utf8"]
    code = "from titanlike.launch.environment import interpreter; print(*interpreter())"
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "-Wonce::UnicodeWarning" in done.stdout and "-Xutf8" in done.stdout.replace(" ", "")


def test_the_users_folder_is_importable_in_workers_and_shadows_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = import_path()
    standard = os.path.dirname(os.__file__)
    assert path.index(standard) < path.index(str(tmp_path))
