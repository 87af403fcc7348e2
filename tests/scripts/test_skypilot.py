"""SkyPilot: its documented fields, and what its nodes run, on two nodes that are this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from support.paths import ROOT

TASK = yaml.safe_load((ROOT / "tools" / "skypilot" / "train.yaml").read_text("utf-8"))
# of SkyPilot 0.14's reference; the package itself needs a server and fifty others
FIELDS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts"}
FIELDS |= {"volumes", "setup", "run", "service", "config"}
RESOURCES = {"infra", "accelerators", "cpus", "memory", "instance_type", "use_spot", "disk_size"}
RESOURCES |= {"disk_tier", "network_tier", "image_id", "ports", "labels", "autostop", "any_of"}
RESOURCES |= {"ordered", "job_recovery"}
TINY = "data=synthetic logger=none model.num_hidden_layers=2 model.hidden_size=32 device=cpu"
TINY += " model.intermediate_size=64 validation.every=0 batch_size=4 seq_len=16 dp=2"


def node(folder: Path, rank: int, port: int, overrides: str) -> subprocess.Popen[str]:
    """What a node runs, with the environment that SkyPilot gives it."""
    env = {**os.environ, **TASK["envs"], "OVERRIDES": overrides, "SHARED": str(folder)}
    env |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank), "NAME": "tiny"}
    env |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    env |= {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", "-c", TASK["run"]], env=env, cwd=folder, **pipes)


def test_the_task_has_documented_fields_of_their_types() -> None:
    assert TASK.keys() <= FIELDS and TASK["resources"].keys() <= RESOURCES
    assert type(TASK["num_nodes"]) is int
    assert all(isinstance(TASK[name], str) for name in ("name", "workdir", "setup", "run"))
    assert all(isinstance(text, str) for text in TASK["envs"].values())
    recovery = TASK["resources"]["job_recovery"]
    assert recovery.keys() <= {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
    for script in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", TASK[script]], check=True)


@pytest.mark.slow
def test_two_nodes_train_one_model_and_a_mistake_ends_them_first(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    wrong = node(tmp_path, 1, port, f"{TINY} stepps=2")
    text = wrong.communicate(timeout=60)[0]
    assert wrong.returncode == 2 and "write steps=2" in text, text
    nodes = [node(tmp_path, rank, port, f"{TINY} steps=2") for rank in (0, 1)]
    texts = [each.communicate(timeout=120)[0] for each in nodes]
    assert [each.returncode for each in nodes] == [0, 0], texts
    result = json.loads((tmp_path / "outputs" / "tiny" / "result.json").read_text())
    assert result["status"] == "completed"
