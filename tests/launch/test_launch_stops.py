"""A first signal is a wish, a second one an order; workers that were killed are started again."""

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
from support.waiting import until
from titanlike.launch.scratch_folder import scratch_folder


def result(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.parametrize("mesh", [pytest.param("pp=1", marks=pytest.mark.slow), "pp=2"])
def test_a_second_signal_ends_at_once_but_the_same_one_twice_is_one(
    mesh: str, tmp_path: Path
) -> None:
    """SLURM's comes to a process on several ways."""
    launched = Launched("never_at_a_step", mesh, f"run_dir={tmp_path}", real=True)
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
    assert code == 130 and err.count("stopping after this step") == 1
    assert result(tmp_path)["status"] == "interrupted"
    assert launched.leaves_nobody()


@pytest.mark.slow
def test_workers_that_were_killed_are_started_again_though_others_never_come_to_a_step(
    tmp_path: Path,
) -> None:
    launched = Launched("one_dies_once", "pp=2", "launch.max_restarts=1", f"run_dir={tmp_path}")
    code, _, err = launched.wait()
    assert code == 0, err
    assert "rank 1 failed: killed by SIGKILL" in err and "restart 1 of 1 from the beginning" in err
    assert (result(tmp_path)["status"], result(tmp_path)["value"]) == ("completed", 2.0)
    (event,) = (json.loads(line) for line in (tmp_path / "events.jsonl").open())
    assert (event["event"], event["restart"], event["of"]) == ("restart", 1, 1)
    (first, _) = (tmp_path / "starts").read_text().split()
    assert event["time"] - float(first) < 20, "it is not waited for them until they are killed"
    assert launched.leaves_nobody()


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    launched = Launched("mistaken", "launch.max_restarts=3", f"run_dir={tmp_path}")
    code, _, err = launched.wait()
    assert code == 1 and "importing no.such failed" in err and "restart" not in err
    assert (tmp_path / "starts0").read_text() == "x"


def test_on_started_ranks_a_sweep_goes_on_after_max_time_and_ends_after_a_signal(
    tmp_path: Path,
) -> None:
    launched = Launched("stops", "-m", "seed=0,1,2", "pp=2", f"run_dir={tmp_path}", torchrun=2)
    launched.wait()
    assert [path.parent.name for path in sorted(tmp_path.rglob("result.json"))] == ["0", "1"]
    assert (result(tmp_path / "0")["status"], result(tmp_path / "0")["value"]) == ("stopped", 0.0)
    assert "max_time" in result(tmp_path / "0")["error"]
    assert "SIGTERM" in result(tmp_path / "1")["error"]


def test_torchrun_does_not_start_a_run_again_that_was_asked_to_end(tmp_path: Path) -> None:
    launched = Launched(
        "stops", "pp=2", f"run_dir={tmp_path}", torchrun=2, options=("--max-restarts", "1")
    )
    code, out, _ = launched.wait()
    assert code == 0 and result(tmp_path)["status"] == "stopped"
    assert (tmp_path / "logs" / "rank0.log").read_text().count("stops") == 1


def test_what_a_killed_driver_left_in_the_temporary_folder_goes_with_the_next(
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
