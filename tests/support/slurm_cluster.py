"""A real SLURM of two nodes on this machine: daemons, ports, folders and a key of its own.

Nothing outside of its folder is read or written, so it stands beside any other SLURM.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from support.paths import ROOT

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
