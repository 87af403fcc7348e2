"""Jobs under any launcher: started early, signalled, ended; one run directory, console output of
rank 0, a log per rank, and no process that remains."""

from __future__ import annotations

import json
import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from support.cells import slow
from support.commands import TINY
from support.forked import run
from support.launched import Launched
from support.models import tiny
from support.paths import ROOT
from support.run_files import result
from support.waiting import until
from support.world import fork_context
from titanlike.core.launch import signals
from titanlike.core.launch.environment import import_path, workers_environment
from titanlike.core.launch.signals import StopRequest
from titanlike.core.launch.worker import Job
from titanlike.core.torch_private import accelerator
from titanlike.run import local
from titanlike.run.local import WorkerProcesses, scratch_folder


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        *slow({"WORLD_SIZE": "x"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "-1"}, {"RANK": "3"}),
    ],
)
def test_inconsistent_launcher_variables_are_an_error_with_a_fix(
    variables: dict[str, str], tmp_path: Path
) -> None:
    env = {**os.environ, **variables}
    done = run([str(ROOT / "train.py"), f"run_dir={tmp_path}/run"], tmp_path, env)
    assert done.returncode == 2 and "unset RANK LOCAL_RANK WORLD_SIZE" in done.stderr
    assert all(f"{name}={value}" in done.stderr for name, value in variables.items())
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_a_folder_that_is_gone_is_an_error_and_ignored_children_are_none(tmp_path: Path) -> None:
    """What a process inherits: its working directory, and SIGCHLD as `trap '' CHLD` leaves it."""
    start = "from titanlike.cli import main; main('train')"
    (tmp_path / "gone").mkdir()
    done = run(["-c", f"import os; os.rmdir(os.getcwd()); {start}"], tmp_path / "gone")
    assert done.returncode == 1 and done.stderr.startswith("error: the working directory has been")
    words = [*TINY, "dp=2", "data=synthetic", "device=cpu", f"run_dir={tmp_path}/run"]
    ignored = f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); {start}"
    done = run(["-c", ignored, *words], tmp_path)
    assert done.returncode == 0 and result(tmp_path / "run")["status"] == "completed", done.stderr


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


@pytest.mark.slow
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
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr("titanlike.core.launch.environment.available_cores", lambda: 256)
    compilers = [
        workers_environment(ranks)["TORCHINDUCTOR_COMPILE_THREADS"] for ranks in (1, 8, 16, 10_000)
    ]
    assert compilers == ["32", "32", "16", "1"], "a rank's processes that compile"
    environment = workers_environment(10_000)
    assert environment["OMP_NUM_THREADS"] == "1" and environment["PATH"] == os.environ["PATH"]
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    assert workers_environment(8)["TORCHINDUCTOR_COMPILE_THREADS"] == "3", "as the user says"
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & environment.keys()


def test_workers_are_started_with_pythons_own_options() -> None:
    options = ["-W", "once::UnicodeWarning", "-X", "utf8"]
    code = "from titanlike.core.launch.environment import interpreter; print(*interpreter())"
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


MODEL = """
import pathlib, time
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size: int = 256):
        super().__init__()
        pathlib.Path("checking").touch()
        while not pathlib.Path("go on").exists():
            time.sleep(0.05)
        {then}
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def started(scratch: Path, then: str) -> Launched:
    """A job of two ranks whose config is being checked, which takes as long as `go on` is missing;
    its workers wait."""
    folder = scratch.parent
    (folder / "slow_model.py").write_text(MODEL.format(then=then))
    words = ["data=synthetic", "model=own", "model.name=slow_model.Model", "pp=2", "seq_len=16"]
    launched = Launched("hello", *words, f"run_dir={folder / 'run'}", cwd=folder)
    until((folder / "checking").exists)
    until(lambda: workers_wait(scratch) and len(launched.alive()) >= 2)
    return launched


def workers_wait(scratch: Path) -> bool:
    return any(scratch.glob("titanlike-*/driver.lock"))


def test_an_error_in_the_config_ends_the_workers_that_wait_for_it(scratch: Path) -> None:
    launched = started(scratch, 'raise ValueError("vocab_size: is odd")')
    (scratch.parent / "go on").touch()
    code, out, err = launched.wait()
    assert code == 2 and "vocab_size" in err and "hello" not in out
    assert launched.all_exit(1) and not workers_wait(scratch)


@pytest.mark.parametrize("signum, code", [(signal.SIGKILL, -9), *slow((signal.SIGTERM, 143))])
def test_a_signal_while_the_config_is_checked_leaves_no_process(
    scratch: Path, signum: signal.Signals, code: int
) -> None:
    launched = started(scratch, "")
    launched.process.send_signal(signum)
    assert launched.wait(30)[0] == code
    assert launched.all_exit(5)
    assert not (scratch.parent / "run" / "logs").exists()


def test_a_worker_that_dies_before_its_job_is_named(scratch: Path) -> None:
    then = "self.layer = nn.Embedding(vocab_size, vocab_size)\n    "
    launched = started(scratch, then + "def forward(self, tokens): return self.layer(tokens)")
    driver = launched.process.pid
    # each worker has a session of its own
    next(p for p in launched.alive() if p.pid != driver and os.getsid(p.pid) == p.pid).kill()
    (scratch.parent / "go on").touch()
    code, _, err = launched.wait()
    said = "the process that forks the ranks was lost: killed by SIGKILL"
    assert code == 1 and said in err and "rank 0" not in err, err
    assert launched.all_exit()


def test_workers_that_do_not_end_are_killed_with_what_they_have_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 fails, rank 1 ignores SIGTERM and has a child; both are forks of one process."""
    monkeypatch.setattr(local, "_SHUTDOWN_TIMEOUT", 0.2)
    function = "support.launch_jobs.fails_beside_one_that_does_not_end"
    for name in ("run", "workers"):
        (tmp_path / name).mkdir()
    workers = WorkerProcesses(2, tmp_path / "workers", function)
    deaths = workers.run(Job(function, tiny(pp=2), tmp_path / "run", []).to_json())
    assert [(death.rank, death.transport) for death in deaths] == [(0, True)], "it has told why"
    files = sorted((tmp_path / "run").glob("process*"))
    rows = [map(int, file.read_text().split()) for file in files]
    parents, pids, forks = zip(*rows, strict=True)
    assert len({*parents}) == 1 and parents[0] != os.getpid() and all(forks)
    until(lambda: not any(map(is_running, [*parents, *pids])), 10)


def test_a_rank_is_spawned_where_a_fork_cannot_use_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An import may have called the driver before the fork."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(accelerator, "in_bad_fork", lambda: True)
    job = Job("support.launch_jobs.is_forked", tiny(), tmp_path / "run", [])
    (tmp_path / "job.json").write_text(job.to_json())
    pid = local._fork_rank(str(tmp_path), 0, {signal.SIGTERM: signal.SIG_DFL})
    assert os.waitpid(pid, 0)[1] == 0
    assert json.loads((tmp_path / "result.json").read_text()) == {"value": 0.0}


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
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
    monkeypatch.setattr(signals, "time", clock)
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
        worker.peer_failed = lambda: True
        assert worker.is_futile(), "a peer that has failed never reaches the step's end"


def test_a_clock_that_is_set_does_not_end_a_run_with_max_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = SimpleNamespace(wall=1e9, monotonic=50.0)
    clock = SimpleNamespace(monotonic=lambda: now.monotonic, time=lambda: now.wall)
    monkeypatch.setattr(signals, "time", clock)
    stop = StopRequest()
    for wall in (1e9 + 3600, 1e9 - 1e8):
        now.wall = wall
        assert stop.code(max_time=600) == 0
    now.monotonic += 600
    assert stop.code(max_time=600) == signals.MAX_TIME


@pytest.mark.slow
def test_a_terminal_has_a_line_before_torch_is_imported(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    words = [sys.executable, ROOT / "train.py", *TINY, "dp=2", "device=cpu", "--check"]
    done = subprocess.run(words, cwd=tmp_path, stdout=theirs, timeout=300)
    os.close(theirs)
    lines = os.read(ours, 4096).decode().splitlines()
    os.close(ours)
    assert done.returncode == 0 and lines[0] == "2 ranks on cpu, importing torch ..."


def test_a_full_disk_at_the_start_is_one_line(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    words = [*TINY, f"run_dir={tmp_path}/run"]
    start = f"{limit}; from titanlike.cli import main; main('train')"
    done = run(["-c", start, *words], tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("a file of the run could not be written")
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_child_that_is_ended_leaves_its_parents_temporary_folder() -> None:
    """multiprocessing gives a child the folder's path, in which the sockets of its parent are."""
    child = fork_context().Process(target=signals.exit_now, args=(3,))
    child.start()
    child.join(30)
    assert child.exitcode == 3 and Path(multiprocessing.util.get_temp_dir()).is_dir()


@pytest.mark.parametrize("work_left", [300, 0])
def test_a_signal_while_an_object_is_deleted_is_not_lost(tmp_path: Path, work_left: int) -> None:
    """Python ignores what a finalizer raises, and prints "Exception ignored in"."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from titanlike.core.launch.signals import Interrupted, interruptible\n"
        "class Slow:\n"
        "    def __del__(self):\n"
        "        print('deleting', flush=True)\n"
        "        time.sleep(1)\n"
        "try:\n"
        "    with interruptible():\n"
        "        Slow()\n"
        f"        time.sleep({work_left})\n"
        "except Interrupted as interrupted:\n"
        "    print('cleaned up')\n"
        "    sys.exit(interrupted.exit_code)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, program], text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "deleting\n"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (143, "cleaned up\n", "")


def test_a_signal_to_every_process_stops_a_run_at_the_next_step_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    """As SLURM and Kubernetes send it: also to the process that the ranks are forked from."""
    words = ["pp=2", "steps=100000", "data=synthetic", "device=cpu", f"run_dir={tmp_path}"]
    launched = Launched(*words, program=ROOT / "train.py")
    metrics = tmp_path / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size)
    processes = launched.alive()
    for process in processes:
        process.send_signal(signal.SIGTERM)
    code, out, err = launched.wait(60)
    assert code == 75 and "resume with" in out, err
    assert len(processes) >= 4 and [*tmp_path.glob("checkpoints/step-*")]
    assert launched.all_exit()


@pytest.mark.parametrize(
    ("signum", "torchrun"),
    [(signal.SIGKILL, 0), *slow((signal.SIGTERM, 0), (signal.SIGTERM, 2), (signal.SIGKILL, 2))],
)
def test_a_signal_to_the_driver_ends_all_workers(
    tmp_path: Path, signum: signal.Signals, torchrun: int
) -> None:
    launched = Launched("hangs", "pp=2", f"run_dir={tmp_path}", torchrun=torchrun)
    until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    launched.process.send_signal(signum)
    code, *_ = launched.wait(30)
    assert launched.all_exit()
    if not torchrun:
        assert code == (-9 if signum == signal.SIGKILL else 143)
    if signum == signal.SIGTERM or torchrun:  # torchrun's ranks outlive it, and report
        assert result(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
def test_a_process_stuck_in_native_code_ends_and_leaves_its_result(tmp_path: Path) -> None:
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
        "from titanlike.run.local import scratch_folder\n"
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
