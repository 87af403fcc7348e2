"""A first signal is deferred, a second one is not; however a run is ended, no process remains."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cells import slow
from support.launched import Launched
from support.paths import ROOT
from support.run_files import result
from support.waiting import until
from titanlike.launch import stop_request
from titanlike.launch.scratch_folder import scratch_folder
from titanlike.launch.stop_request import StopRequest


def test_a_second_signal_stops_immediately(tmp_path: Path) -> None:
    """The first reaches the driver twice, and does not end what waits for the end of its step."""
    launched = Launched("never_reaches_a_step", "pp=2", f"run_dir={tmp_path}")
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
    for _ in range(2):
        launched.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    time.sleep(1)
    assert launched.process.poll() is None, "it waits for the step"
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.wait(12)  # workers that did not learn of it would get 15 s
    assert code == 130 and err.count("stopping after the next step") == 1
    assert result(tmp_path)["status"] == "interrupted"
    assert launched.all_exit()


def test_a_signal_that_arrives_again_is_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """SLURM sends its signal to every process, the driver forwards its own."""
    now = SimpleNamespace(value=100.0)
    clock = SimpleNamespace(monotonic=lambda: now.value, time=time.time)
    monkeypatch.setattr(stop_request, "time", clock)
    driver, worker = StopRequest(), StopRequest(tmp_path)
    with driver.forwarding(tmp_path):
        assert not driver.receive(signal.SIGTERM), "no worker has begun to train"
        (tmp_path / "stop_now").unlink()
        with worker.deferred():
            assert driver.receive(signal.SIGTERM) and worker.code() == signal.SIGTERM
            now.value += 0.9
            assert driver.receive(signal.SIGTERM), "again"
            assert worker.receive(signal.SIGTERM), "its first, of the same command"
            now.value += 0.9
            assert worker.receive(signal.SIGTERM), "again"
            assert not driver.receive(signal.SIGINT), "a second one"
            now.value += 2
            assert not worker.receive(signal.SIGTERM), "the driver ends it"
        assert not worker.is_futile()
    assert capfd.readouterr().err.count("a second signal stops immediately") == 2
    with worker.deferred():
        worker.watch_peers(lambda: True)
        assert worker.is_futile(), "a peer that has failed never reaches the step's end"


@pytest.mark.parametrize("work_left", [300, 0])
def test_a_signal_while_an_object_is_deleted_is_not_lost(tmp_path: Path, work_left: int) -> None:
    """Python ignores what a finalizer raises, and prints "Exception ignored in"."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from titanlike.launch.signals import Interrupted, interruptible\n"
        "class Slow:\n"
        "    def __del__(self):\n"
        "        print('deleting', flush=True)\n"
        "        time.sleep(1)\n"
        "try:\n"
        "    with interruptible():\n"
        "        Slow()\n"
        f"        time.sleep({work_left})\n"
        "except Interrupted as interrupted:\n"
        "    sys.exit(interrupted.exit_code)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, program], text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "deleting\n"
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, err) == (143, "")


@pytest.mark.parametrize(
    ("signum", "torchrun"),
    [(signal.SIGKILL, 0), *slow((signal.SIGTERM, 0), (signal.SIGTERM, 2), (signal.SIGKILL, 2))],
)
def test_a_signal_to_the_driver_ends_all_workers(
    tmp_path: Path, signum: signal.Signals, torchrun: int
) -> None:
    launched = Launched("hangs", "pp=2", f"run_dir={tmp_path}", real=True, torchrun=torchrun)
    until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    launched.process.send_signal(signum)
    code, *_ = launched.wait(30)
    assert launched.all_exit()
    if not torchrun:
        assert code == (-9 if signum == signal.SIGKILL else 143)
    if signum == signal.SIGTERM or torchrun:  # torchrun's ranks outlive it, and report
        assert result(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
def test_a_process_that_is_stuck_in_c_ends_soon_and_leaves_its_result(tmp_path: Path) -> None:
    launched = Launched("deadlocks_in_c", f"run_dir={tmp_path}")
    until(lambda: (tmp_path / "ready0").exists())
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait(15)[0] == 143
    assert result(tmp_path)["status"] == "interrupted"


def test_the_scratch_folder_of_a_killed_driver_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "from titanlike.launch.scratch_folder import scratch_folder\n"
        "with scratch_folder() as folder: print(folder, flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", program]
    drivers = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(2)]
    killed, alive = (Path(driver.stdout.readline().strip()) for driver in drivers)
    drivers[0].kill()
    drivers[0].wait()
    assert killed.exists() and alive.exists()
    with scratch_folder() as mine:
        assert not killed.exists() and alive.exists() and mine.parent == tmp_path
    drivers[1].communicate("\n", timeout=20)
    assert list(tmp_path.iterdir()) == []
