"""Machines leave and join under torchrun: the run resumes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from support.commands import TINY
from support.launched import Launched
from support.paths import ROOT
from support.records import numbers
from support.run_files import config_of
from support.saved_runs import events
from support.waiting import until
from support.world import run_world
from titanlike.core.launch.environment import RestartState
from titanlike.core.training.loop import train

# a dead machine is detected after 6 s (sooner, a busy one might be taken for dead, and two runs
# would write to one folder); the machines that have joined 1 s later take part in the next start
TIMES = "keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=1,join_timeout=60"


class Nodes:
    """Machines with one rank each."""

    def __init__(self, nnodes: str, words: list[str], cwd: Path, restarts: int = 2) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._options = (
            f"--nnodes={nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._store.port}",
            f"--rdzv-conf=is_host=0,{TIMES}",
            "--rdzv-id=test",
            "--local-addr=127.0.0.1",
            f"--max-restarts={restarts}",
        )
        self._words, self._cwd = words, cwd
        self._started: list[Launched] = []

    def start(self) -> Launched:
        """Start a machine."""
        how = {"torchrun": 1, "options": self._options, "cwd": self._cwd, "real": True}
        node = Launched(*self._words, program=ROOT / "train.py", **how)
        self._started.append(node)
        return node

    def close(self) -> None:
        for node in self._started:
            for process in node.alive():
                process.kill()
            node.process.communicate()


@contextlib.contextmanager
def nodes(nnodes: str, words: list[str], cwd: Path, **how: int) -> Iterator[Nodes]:
    """All their processes are killed at the end."""
    all_nodes = Nodes(nnodes, words, cwd, **how)
    try:
        yield all_nodes
    finally:
        all_nodes.close()


def worker(node: Launched, rank: int) -> psutil.Process | None:
    """The process of a rank; None if it is on another machine."""
    for process in node.alive():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank):
                return process
    return None


def power_off(node: Launched) -> None:
    """Kill all processes of a machine."""
    for process in sorted(node.alive(), key=lambda process: process.pid != node.process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.process.communicate()


EVERY = 5
SHORT = [*TINY, "model.num_hidden_layers=2", "batch_size=8", "data=synthetic", "data.vocab_size=64"]
SHORT += ["log_every=1000", "checkpoint.last=true", "checkpoint.keep=2", "device=cpu"]
SHORT += [f"checkpoint.every={EVERY}"]


@pytest.fixture(autouse=True)
def machines_may_rejoin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As documented: otherwise a restarted torchrun does not find torch's own store."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def ends(*machines: Launched) -> list[int]:
    codes = [machine.wait(90)[0] for machine in machines]
    assert all(machine.all_exit() for machine in machines)
    return codes


@pytest.mark.slow
def test_the_machine_of_rank_0_is_lost_and_rejoins(tmp_path: Path) -> None:
    """The run directory has the time of the first start in its name; the other machine knows it."""
    with nodes("2", [*SHORT, "dp=2", "steps=40"], tmp_path) as all_nodes:
        machines = [all_nodes.start(), all_nodes.start()]
        until(lambda: list(tmp_path.rglob("COMMITTED")))
        first, other = sorted(machines, key=lambda machine: worker(machine, 0) is None)
        power_off(first)
        assert ends(all_nodes.start(), other) == [0, 0]
    (run_dir,) = (path.parent for path in (tmp_path / "outputs").rglob("config.yaml"))
    (resumed,) = events(run_dir, "resume")
    assert resumed["step"] >= EVERY
    run_world(train, config_of(run_dir), tmp_path / "uninterrupted")
    assert [number for number, *_ in numbers(run_dir)] == list(range(1, 41))
    assert numbers(run_dir) == numbers(tmp_path / "uninterrupted"), "to the last bit"


def test_a_rejoining_node_adopts_the_state_with_the_most_restarts(tmp_path: Path) -> None:
    stays = RestartState(tmp_path / "stays")
    stays.count_start()
    stays.set_default("started", "1.0")
    without_second_start = RestartState(tmp_path / "other")
    without_second_start.adopt_newest([stays.to_json()])
    stays.count_start()
    stays.set("dp", "1")
    back = RestartState(tmp_path / "back")
    back.adopt_newest([without_second_start.to_json(), stays.to_json()])
    back.set_default("started", "2.0")
    again = RestartState(tmp_path / "back")  # the next start there
    assert (again.get("started"), again.get("dp")) == ("1.0", "1")


def test_the_state_of_a_job_whose_torchrun_has_ended_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one may have the same process id, and the same --rdzv-id."""
    program = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from titanlike.core.launch.environment import RestartState\n"
        "state = RestartState.load(); state.count_start(); print(state.get('key'))\n"
        "state.set_default('key', 'value')"
    )
    torchrun = (
        "import subprocess, sys\n"
        f"for _ in range(2): subprocess.run([sys.executable, '-c', {program!r}], check=True)"
    )
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for _ in range(2):
        command, env = [sys.executable, "-c", torchrun], os.environ | {"PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert run.stdout.split() == ["None", "value"], run.stderr
    assert len(list(tmp_path.rglob("*.json"))) == 1
