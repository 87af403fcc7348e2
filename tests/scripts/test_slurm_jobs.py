"""The job scripts in a real SLURM of two nodes on this machine: real sbatch, srun and torchrun.

Each job is submitted from a folder of its own, as from a user's project. Its cluster.env names the
Python to take.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.paths import ROOT
from support.records import numbers
from support.run_files import last_step, result
from support.waiting import until

TOOLS = ROOT / "tools" / "slurm"
_GOING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
_DAEMONS = ("munged", "slurmctld", "slurmd")
_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits for as long as its old credential lives: 5 s is the least
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=20
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why SLURM cannot be started here; "" where it can."""
    if os.geteuid() != 0:
        return "SLURM's daemons are started by root alone"
    absent = [name for name in _DAEMONS if _daemon(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends slurm-wlm munge"
    return ""


class Cluster:
    """Two nodes of four CPUs, until `stop`."""

    def __init__(self, folder: Path) -> None:
        """Start it in `folder`. Raises RuntimeError where a node does not come up in 30 s."""
        self.folder = folder
        self._processes: list[subprocess.Popen] = []
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        self.conf = folder / "slurm.conf"
        self.conf.write_text(
            _CONF.format(host=socket.gethostname().split(".")[0], folder=folder, ports=_ports(3))
        )
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "WANDB", "TITANLIKE"))
        } | {"SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1"}
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-c", "-f", str(self.conf))
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-N", node, "-f", str(self.conf))
            self._wait_for_nodes()
        except BaseException:
            self.stop()
            raise

    def submit(self, script: str, *arguments: str, options: tuple[str, ...] = (), cwd: Path) -> str:
        """sbatch tools/slurm/`script` from `cwd`; the job's number. The log is cwd/log."""
        log = f"--output={cwd}/log"
        return self.ask(
            "sbatch", "--parsable", log, *options, str(TOOLS / script), *arguments, cwd=cwd
        )

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        """What a command of SLURM's prints."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, env=self.environment, cwd=cwd
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job (or of an array's task, `JOB_TASK`)."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, timeout: float = 150) -> dict[str, str]:
        """What SLURM knows of a job once it has ended."""
        deadline = time.monotonic() + timeout
        while (known := self.show(job))["JobState"] in _GOING:
            told = f"job {job} is {known['JobState']} ({known['Reason']})"
            assert time.monotonic() < deadline, told
            time.sleep(0.2)
        return known

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        for process in self._of_jobs():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for daemon in reversed(self._processes):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._processes:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _of_jobs(self) -> list[psutil.Process]:
        """Processes of jobs, and the parents that SLURM gave them, which outlive its daemons."""
        daemons = {daemon.pid for daemon in self._processes}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("SLURM_CONF") == str(self.conf)
                if not ours or process.pid in daemons:
                    continue
                parent = process.parent()
                if parent is not None and parent.name().startswith("slurmstepd"):
                    found.append(parent)
                found.append(process)
        return found

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        names = {
            "--socket": "socket",
            "--key-file": "key",
            "--pid-file": "pid",
            "--log-file": "log",
            "--seed-file": "seed",
        }
        options = [f"{option}={self.folder}/munge.{name}" for option, name in names.items()]
        self._start("munged", "--foreground", "--force", *options)
        deadline = time.monotonic() + 10
        while not (self.folder / "munge.socket").exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"munged did not start:\n{self._said()}")
            time.sleep(0.05)

    def _start(self, name: str, *options: str) -> None:
        daemon = _daemon(name)
        assert daemon is not None
        with (self.folder / "said").open("a") as said:
            self._processes.append(
                subprocess.Popen(
                    [daemon, *options],
                    stdout=said,
                    stderr=said,
                    stdin=subprocess.DEVNULL,
                    env=self.environment,
                    start_new_session=True,
                )
            )

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            done = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format=%T"],
                capture_output=True,
                text=True,
                timeout=30,
                env=self.environment,
            )
            if done.stdout.split() == ["idle", "idle"]:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes did not come up: {done.stdout}\n{self._said()}")
            time.sleep(0.1)

    def _said(self) -> str:
        return (self.folder / "said").read_text()[-3000:]


def _daemon(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


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
    return [step for step, *_ in numbers(run_dir)]


def log(folder: Path) -> str:
    return (folder / "log").read_text()


def test_a_preempted_job_on_two_nodes_is_requeued_and_resumes(
    cluster: Cluster, folder: Path
) -> None:
    """The signal is the one that SLURM sends before a time limit."""
    words = [*TINY, "dp=2", "steps=150"]
    job = cluster.submit("train.sbatch", *words, options=("--nodes=2",), cwd=folder)
    run_dir = folder / "outputs" / f"slurm-{job}"
    until(lambda: last_step(run_dir) > 2, timeout=120)
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
    user's; rehearsed before."""
    with (folder / "cluster.env").open("a") as env:
        env.write("export REHEARSE=1\n")
    options = ("--nodes=2", "--ntasks=3")
    words = [*TINY, "dp=3", "batch_size=6", "steps=3", "run_dir=my runs/first"]
    job = cluster.submit("train_srun.sbatch", *words, options=options, cwd=folder)
    assert cluster.wait(job)["JobState"] == "COMPLETED", log(folder)
    run_dir = folder / "my runs" / "first"
    assert steps(run_dir) == [1, 2, 3] and result(run_dir)["status"] == "completed"
    assert "ranks      2,1 a node, 3 in all, by srun" in log(folder)
    assert log(folder).index("cannot hang: ") < log(folder).index("step")
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


def test_a_job_that_its_user_cancels_saves_and_stays_cancelled(
    cluster: Cluster, folder: Path
) -> None:
    job = cluster.submit("train_srun.sbatch", *TINY, "steps=100000", cwd=folder)
    run_dir = folder / "outputs" / f"slurm-{job}"
    until(lambda: last_step(run_dir) > 2, timeout=120)
    cluster.ask("scancel", job)
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    assert result(run_dir)["status"] == "stopped", log(folder)
    last = last_step(run_dir)
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
