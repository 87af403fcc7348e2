"""A first signal is deferred, a second one is not; workers that were killed are restarted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.launched import Launched
from support.paths import ROOT
from support.run_files import result
from support.waiting import until
from titanlike.launch.scratch_folder import scratch_folder


@pytest.mark.parametrize("mesh", [pytest.param("pp=1", marks=pytest.mark.slow), "pp=2"])
def test_a_second_signal_stops_immediately_but_a_repeated_one_does_not_count(
    mesh: str, tmp_path: Path
) -> None:
    """SLURM's signal may reach a process several times."""
    launched = Launched("never_reaches_a_step", mesh, f"run_dir={tmp_path}", real=True)
    ready = [tmp_path / f"ready{rank}" for rank in range(int(mesh[-1]))]
    until(lambda: all(path.exists() for path in ready))
    for _ in range(2):
        launched.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    time.sleep(1)
    assert launched.process.poll() is None, "it waits for the step"
    launched.process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    code, _, err = launched.wait(30)
    assert time.monotonic() - begin < 10
    assert code == 130 and err.count("stopping after the next step") == 1
    assert result(tmp_path)["status"] == "interrupted"
    assert launched.all_exit()


@pytest.mark.parametrize("work_left", [20, 0])
def test_a_signal_while_an_object_is_deleted_is_not_lost(tmp_path: Path, work_left: int) -> None:
    """Python ignores what a finalizer raises, and prints "Exception ignored in"."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from titanlike.launch.signals import Interrupted, interruptible\n"
        "class Slow:\n"
        "    def __del__(self):\n"
        "        print('deleting', flush=True)\n"
        "        time.sleep(2)\n"
        "try:\n"
        "    with interruptible():\n"
        "        Slow()\n"
        f"        time.sleep({work_left})\n"
        "except Interrupted as interrupted:\n"
        "    sys.exit(interrupted.exit_code)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, program], text=True, **pipes) as process:
        assert process.stdout.readline() == "deleting\n"
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "") and time.monotonic() - begin < 10


@pytest.mark.slow
def test_killed_workers_are_restarted_though_others_never_reach_the_end_of_a_step(
    tmp_path: Path,
) -> None:
    launched = Launched(
        "last_rank_dies_once", "pp=2", "launch.max_restarts=1", f"run_dir={tmp_path}"
    )
    code, _, err = launched.wait()
    assert code == 0, err
    assert "rank 1 failed: killed by SIGKILL" in err and "restart 1 of 1 from the beginning" in err
    assert (result(tmp_path)["status"], result(tmp_path)["value"]) == ("completed", 2.0)
    (event,) = (json.loads(line) for line in (tmp_path / "events.jsonl").open())
    assert (event["event"], event["restart"], event["of"]) == ("restart", 1, 1)
    (first, _) = (tmp_path / "starts").read_text().split()
    assert event["time"] - float(first) < 20, "the others do not have to be killed"
    assert launched.all_exit()


def test_a_permanent_failure_is_not_restarted(tmp_path: Path) -> None:
    launched = Launched("user_error", "launch.max_restarts=3", f"run_dir={tmp_path}")
    code, _, err = launched.wait()
    assert code == 1 and "importing no.such failed" in err and "restart" not in err
    assert (tmp_path / "starts0").read_text() == "x"


def test_on_external_ranks_a_sweep_continues_after_max_time_and_ends_after_a_signal(
    tmp_path: Path,
) -> None:
    launched = Launched("stops", "-m", "seed=0,1,2", "pp=2", f"run_dir={tmp_path}", torchrun=2)
    launched.wait()
    assert [path.parent.name for path in sorted(tmp_path.rglob("result.json"))] == ["0", "1"]
    assert (result(tmp_path / "0")["status"], result(tmp_path / "0")["value"]) == ("stopped", 0.0)
    assert "max_time" in result(tmp_path / "0")["error"]
    assert "SIGTERM" in result(tmp_path / "1")["error"]


def test_torchrun_does_not_restart_a_run_that_got_a_stop_request(tmp_path: Path) -> None:
    launched = Launched(
        "stops", "pp=2", f"run_dir={tmp_path}", torchrun=2, options=("--max-restarts", "1")
    )
    code, out, _ = launched.wait()
    assert code == 0 and result(tmp_path)["status"] == "stopped"
    assert (tmp_path / "logs" / "rank0.log").read_text().count("stops") == 1


def test_the_scratch_folder_of_a_killed_driver_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "from titanlike.launch.scratch_folder import scratch_folder\n"
        "with scratch_folder() as folder: print(folder, flush=True); input()"
    )
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for _ in range(2)
    ]
    killed, alive = (Path(driver.stdout.readline().strip()) for driver in drivers)
    drivers[0].kill()
    drivers[0].wait()
    assert killed.exists() and alive.exists()
    with scratch_folder() as mine:
        assert not killed.exists() and alive.exists() and mine.parent == tmp_path
    drivers[1].communicate("\n", timeout=20)
    assert list(tmp_path.iterdir()) == []
