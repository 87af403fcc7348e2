"""Kubernetes: its own schemas accept the manifests, and what a pod runs trains on two nodes."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models as trainer_models

from support.cells import slow
from support.forked import ForkedProgram
from support.paths import ROOT
from support.waiting import until

KINDS = ("job", "trainjob")
TINY = "data=synthetic logger=none model.num_hidden_layers=2 model.hidden_size=32 model.intermediate_size=64 validation.every=0"
TINY = [*TINY.split(), "batch_size=4", "seq_len=16", "device=cpu", "log_every=1"]
# the first with all that a Job asks for, and the newest of which there are schemas
VERSIONS = ("1.29", kubernetes_validate.latest_version())

# --- what Kubernetes accepts --------------------------------------------------------------------


def manifest(kind: str) -> list[dict[str, Any]]:
    text = (ROOT / f"tools/kubernetes/{kind}.yaml").read_text(encoding="utf-8")
    return copy.deepcopy([*yaml.safe_load_all(text)])


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    if objects[-1]["kind"] == "Job":
        return objects[-1]["spec"]["template"]["spec"]
    (node,) = objects[0]["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == node["template"]["spec"]["template"]["spec"]["containers"][0]["name"]
    return node["template"]["spec"]["template"]["spec"]


def refuse_unless_valid(objects: list[dict[str, Any]]) -> None:
    """Raises for a key that the published schemas do not know, a missing one, or a wrong type."""
    for item in objects:
        if item["apiVersion"].startswith("trainer.kubeflow.org"):
            _of_trainer(item)
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)


def _of_trainer(item: dict[str, Any]) -> None:
    """By the types that Kubeflow Trainer's controller is built with, which drop unknown keys."""
    known = getattr(trainer_models, f"TrainerV1alpha1{item['kind']}").from_dict(item)
    assert json.loads(known.to_json()) == item
    for job in item["spec"].get("template", {}).get("spec", {}).get("replicatedJobs", []):
        spec = {**job["template"]["spec"], "completions": 2, "parallelism": 2}
        spec |= {"completionMode": "Indexed"}  # as the controller fills it in
        kinds = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        refuse_unless_valid([{**kinds, "spec": spec}])


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_accepts_a_manifest(kind: str) -> None:
    refuse_unless_valid(manifest(kind))


def test_a_misspelt_key_of_a_manifest_would_be_found() -> None:
    for kind, at, key, value in (
        ("job", 1, "completions", "2"),
        ("trainjob", 0, "mlpolicy", {}),
        ("trainjob", 1, "trainer", {"numNodes": "2"}),
    ):
        objects = manifest(kind)
        objects[at]["spec"][key] = value
        with pytest.raises((kubernetes_validate.ValidationError, AssertionError, ValueError)):
            refuse_unless_valid(objects)


def test_world_sizes_in_a_manifest_agree() -> None:
    """Nodes, ranks and names stand in several places of a file: these agree as it is shipped."""
    service, job = manifest("job")
    spec, template = job["spec"], pod_of([job])
    nodes = spec["completions"]
    assert spec["parallelism"] == nodes and template["subdomain"] == service["metadata"]["name"]
    # the label that Kubernetes puts on a Job's pods
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    (command,) = (container["command"] for container in template["containers"])
    assert f"--master-addr=llama-0.{template['subdomain']}" in command
    port = service["spec"]["ports"][0]["port"]
    assert {f"--nnodes={nodes}", f"--master-port={port}"} < {*command}
    runtime, train_job = manifest("trainjob")
    trainer = train_job["spec"]["trainer"]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == trainer["numNodes"]
    for objects in ([job], [runtime, train_job]):
        pod = pod_of(objects)
        (check,), (train,) = pod["initContainers"], pod["containers"]
        ranks = train["resources"]["limits"]["nvidia.com/gpu"]
        counts = {"WORLD_SIZE": str(nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        assert check["env"] == train["env"] + [{"name": n, "value": v} for n, v in counts.items()]
        assert check["args"] == train["args"]
        grace = pod["terminationGracePeriodSeconds"]
        assert {"name": "PET_SHUTDOWN_TIMEOUT", "value": str(grace - 10)} in train["env"]
    assert f"--nproc-per-node={trainer['numProcPerNode']}" in command


# --- what a pod runs ----------------------------------------------------------------------------


def expanded(text: str, env: dict[str, str]) -> str:
    """As Kubernetes does it in command, args and env: $(NAME), and $$ for a $."""
    pattern = r"\$\$|\$\((\w+)\)"
    return re.sub(pattern, lambda m: env.get(m[1], m[0]) if m[1] else "$", text)


def trainers_env(objects: list[dict[str, Any]], index: int, port: str) -> dict[str, str]:
    """What version 2 of Kubeflow Trainer adds to the environment of the container called node."""
    runtime, job = objects
    assert "torch" in runtime["spec"]["mlPolicy"]
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    return {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": port,
    }


class Cluster:
    """Two nodes that are this machine: the pods' host names are localhost, the volume a folder."""

    def __init__(self, volume: Path) -> None:
        self.volume, self.running = volume, list[ForkedProgram]()

    def manifest(self, kind: str, *overrides: str) -> list[dict[str, Any]]:
        """For two pods of one rank each."""
        with socket.create_server(("localhost", 0)) as free:
            self.port = str(free.getsockname()[1])
        objects = manifest(kind)
        pod = pod_of(objects)
        for container in (*pod["initContainers"], *pod["containers"]):
            container["args"] = [*TINY, *overrides, f"run_dir={self.volume}/outputs/tiny"]
            container["workingDir"] = str(self.volume)
            replaced = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            for item in container["env"]:
                item["value"] = replaced.get(item["name"], item["value"])
            words = {"--nproc-per-node=8": "--nproc-per-node=1"}
            words |= {"--master-port=29500": f"--master-port={self.port}"}
            container["command"] = [words.get(word, word) for word in container["command"]]
        if kind == "trainjob":
            objects[1]["spec"]["trainer"]["numProcPerNode"] = 1
        return objects

    def start(self, objects: list[dict[str, Any]]) -> list[ForkedProgram]:
        """Both pods' containers that train."""
        (container,) = pod_of(objects)["containers"]
        if objects[-1]["kind"] == "Job":
            return [self.run(container, {"JOB_COMPLETION_INDEX": str(i)}) for i in (0, 1)]
        return [self.run(container, trainers_env(objects, i, self.port)) for i in (0, 1)]

    def run(self, container: dict[str, Any], added: dict[str, str]) -> ForkedProgram:
        outer = {k: os.environ[k] for k in ("PATH", "HOME", "PYTHONPATH") if k in os.environ}
        env = {**added, **{item["name"]: item["value"] for item in container["env"]}}
        env |= {"OMP_NUM_THREADS": "1"}
        words = [expanded(word, env) for word in container["command"] + container["args"]]
        here = r"\bllama-(0|node-0-0)\.llama\b"
        assert words[0] == "python"
        process = ForkedProgram(
            [re.sub(here, "localhost", word) for word in words[1:]],
            container["workingDir"],
            outer | {k: re.sub(here, "localhost", expanded(v, env)) for k, v in env.items()},
        )
        self.running.append(process)
        return process

    def wait(self, pods: list[ForkedProgram], seconds: float = 90) -> tuple[list[int], str]:
        """Exit codes, and what the pods printed."""
        deadline = time.monotonic() + seconds
        texts = [pod.communicate(timeout=max(1, deadline - time.monotonic())) for pod in pods]
        return [pod.returncode for pod in pods], "\n".join(out + err for out, err in texts)

    def result(self) -> dict[str, Any]:
        return json.loads((self.volume / "outputs/tiny/result.json").read_text())

    def steps(self) -> list[int]:
        lines = (self.volume / "outputs/tiny/metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for process in made.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


@pytest.mark.parametrize("kind", slow("job", "trainjob"))
def test_two_pods_train_one_model(cluster: Cluster, kind: str) -> None:
    """Whose config is checked before."""
    objects = cluster.manifest(kind, "dp=2", "steps=2")
    (check,) = pod_of(objects)["initContainers"]
    (code,), text = cluster.wait([cluster.run(check, {"JOB_COMPLETION_INDEX": "1"})])
    assert code == 0, text
    codes, text = cluster.wait(cluster.start(objects))
    assert codes == [0, 0], text
    assert cluster.result()["status"] == "completed" and cluster.steps() == [1, 2]
    assert (cluster.volume / "outputs/tiny/logs/rank1.log").is_file()


def test_a_mistake_ends_the_job_before_anything_is_started(cluster: Cluster) -> None:
    """Also a mesh that does not fit the pods."""
    _, job = cluster.manifest("job", "dp=4", "stepps=3")
    (check,) = job["spec"]["template"]["spec"]["initContainers"]
    (code,), text = cluster.wait([cluster.run(check, {"JOB_COMPLETION_INDEX": "1"})])
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["containerName"] == check["name"]
    assert code in rule["onExitCodes"]["values"], text
    assert "stepps=3: unknown key; write steps=3" in text
    assert "4 processes, but 2 were started" in text, text
    assert not any(path.is_file() for path in cluster.volume.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_pod_is_evicted_resumes_without_gap_or_repeat(
    cluster: Cluster, kind: str
) -> None:
    """One pod gets SIGTERM. All must fail for Kubernetes to start them again, none end well."""
    objects = cluster.manifest(kind, "dp=2", "steps=300", "checkpoint.every=1000")
    pods = cluster.start(objects)
    metrics = cluster.volume / "outputs/tiny/metrics.jsonl"
    until(lambda: metrics.is_file() and len(metrics.read_bytes().splitlines()) > 3)
    pods[1].send_signal(signal.SIGTERM)  # kubelet tells a container's first process alone
    codes, text = cluster.wait(pods, seconds=30)
    assert 0 not in codes, text
    assert cluster.result()["status"] == "stopped"
    stopped = cluster.steps()[-1]
    assert 3 <= stopped < 300

    again = cluster.manifest(kind, "dp=2", f"steps={stopped + 2}", "checkpoint.every=1000")
    codes, text = cluster.wait(cluster.start(again))
    assert codes == [0, 0] and f"resuming from step {stopped}" in text, text
    assert cluster.steps() == list(range(1, stopped + 3))
