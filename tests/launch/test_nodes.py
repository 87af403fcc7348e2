"""Machines leave and join under torchrun: the run resumes, with launch.elastic in another mesh."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from support.cells import slow
from support.commands import TINY
from support.launched import Launched
from support.paths import ROOT
from support.records import numbers
from support.run_files import config_of, last_step
from support.waiting import until
from support.world import run_world
from titanlike.config.schema import Config, Custom, Launch, Schedule, SyntheticData
from titanlike.driver.checks import available_ranks
from titanlike.driver.elastic import fit_mesh
from titanlike.launch.environment import RestartState
from titanlike.training.loop import train

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


def events(run_dir: Path, kind: str) -> list[dict]:
    path = run_dir / "events.jsonl"
    all_events = [json.loads(line) for line in path.open()] if path.exists() else []
    return [event for event in all_events if event["event"] == kind]


def losses(run_dir: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert len({record["step"] for record in records}) == len(records)
    return {record["step"]: record["loss"] for record in records}


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


@pytest.mark.slow
def test_an_elastic_run_resumes_with_fewer_machines_and_again_with_more(tmp_path: Path) -> None:
    """torchrun alone is killed; its rank outlives it until the end of the step, and all save."""
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    words = [*SHORT, "dp=2", "steps=100000", "checkpoint.every=0", "checkpoint.keep=0"]
    words += ["launch.elastic=true", f"run_dir={run_dir}"]
    with nodes("1:2", words, tmp_path) as all_nodes:
        machines = [all_nodes.start(), all_nodes.start()]
        until(lambda: last_step(run_dir) > 5)
        stays, goes = sorted(machines, key=lambda machine: worker(machine, 0) is None)
        goes.process.kill()
        until(lambda: len(events(run_dir, "resume")) == 1 and last_step(run_dir) > 40)
        back = all_nodes.start()
        until(lambda: len(events(run_dir, "resume")) == 2)
        grown = events(run_dir, "resume")[1]["step"]
        until(lambda: last_step(run_dir) > grown + 10)
        for machine in (stays, back):
            machine.process.terminate()
        ends(stays, back)
        assert goes.all_exit()
    fewer, more = events(run_dir, "layout")
    assert (fewer["ranks"], fewer["dp"], fewer["before"]) == (1, 1, 2)
    assert (more["ranks"], more["dp"], more["before"]) == (2, 2, 1)
    resumes = events(run_dir, "resume")
    assert [event["world_size"] for event in resumes] == [1, 2]
    stops = [event["step"] for event in events(run_dir, "stop")]
    assert [event["step"] for event in resumes] == stops[:2], "no step is lost"
    elastic = losses(run_dir)
    assert list(elastic) == list(range(1, stops[2] + 1))
    declared = config_of(run_dir)
    first = replace(declared, max_tokens=40 * 8 * 16)
    settings = replace(declared.checkpoint, resume=resumes[1]["path"])
    then = replace(declared, max_tokens=(grown + 10) * 8 * 16, checkpoint=settings)
    for config, name in ((first, "first"), (then, "then")):
        run_world(train, config, alone / name)
        for number, loss in losses(alone / name).items():
            assert elastic[number] == pytest.approx(loss, rel=1e-4)


def config(tmp_path: Path, **keys) -> Config:
    model = Custom(
        "llama",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": None},
    )
    base = {"model": model, "data": SyntheticData(vocab_size=64), "launch": Launch(elastic=True)}
    base |= {"seq_len": 16, "batch_size": 24, "run_dir": str(tmp_path)}
    return Config(**{**base, **keys})


def test_dp_follows_the_ranks(tmp_path: Path) -> None:
    for declared, ranks, dp, replicate in (
        ({"pp": 2, "dp": 4}, 4, 2, 1),
        ({"pp": 2, "dp": 2}, 6, 3, 1),
        ({"dp": 4, "replicate": 4}, 2, 2, 2),
        ({"dp": 4, "replicate": 2}, 2, 2, 2),
        ({"dp": 4, "tp": 2}, 4, 2, 1),
    ):
        fitted, problems = fit_mesh(config(tmp_path, **declared), ranks)
        assert (fitted.dp, fitted.replicate, problems) == (dp, replicate, [])
        assert (fitted.pp, fitted.tp) == (declared.get("pp", 1), declared.get("tp", 1))
        assert fitted.batch_size == 24


@pytest.mark.parametrize(
    "declared, ranks, key, possible",
    [
        ({"pp": 2, "dp": 4}, 5, "pp", "2, 4, 6, 8"),
        *slow(({"dp": 6, "replicate": 2}, 3, "replicate", "2, 4, 6")),
        *slow(({"dp": 8}, 5, "batch_size", "2, 3, 4, 6")),
        ({"dp": 2, "schedule": Schedule(microbatches=12)}, 4, "schedule.microbatches", "1, 2"),
    ],
)
def test_the_error_for_a_number_of_ranks_names_the_possible_ones(
    declared, ranks, key, possible, tmp_path: Path
) -> None:
    before = config(tmp_path, **declared)
    after, (problem,) = fit_mesh(before, ranks)
    assert after == before and problem.key == key
    assert f"{ranks} ranks are available" in problem.reason
    assert problem.reason.endswith(f"possible numbers of ranks: {possible}")


def test_the_mesh_is_fixed_without_launch_elastic_or_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigid, elastic = config(tmp_path, dp=4, launch=Launch()), config(tmp_path, dp=4)
    assert fit_mesh(rigid, 2) == (rigid, [])
    assert available_ranks(elastic, None, RestartState()) is None, "python train.py starts its own"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert available_ranks(rigid, None, RestartState()) is None, "so does torchrun train.py"
    assert available_ranks(elastic, None, RestartState()) == 1


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
        "from titanlike.launch.environment import RestartState\n"
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
