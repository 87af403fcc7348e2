"""Kubernetes: its own schemas accept every manifest, and what a pod runs trains on two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow.training import models
from kubeflow_trainer_api import models as trainer_models

from support.cells import slow
from support.forked import ForkedProgram
from support.paths import ROOT
from support.waiting import until
from titanlike.config.errors import ConfigError
from tools.kubernetes.render import KINDS, manifest, read_file

RENDER = ROOT / "tools/kubernetes/render.py"
NEEDED = ["NAME=tiny", "IMAGE=registry/tiny:1", "CLAIM=shared"]
TINY = "data=synthetic logger=none model.num_hidden_layers=2 model.hidden_size=32 model.intermediate_size=64 validation.every=0"
TINY = [*TINY.split(), "batch_size=4", "seq_len=16", "device=cpu", "log_every=1"]
# the first with all that a Job asks for, and the newest of which there are schemas
VERSIONS = ("1.29", kubernetes_validate.latest_version())

# --- what Kubernetes accepts --------------------------------------------------------------------


def refuse_unless_valid(objects: list[dict[str, Any]]) -> None:
    """Raises for a key that the published schemas do not know, a missing one, or a wrong type."""
    for item in objects:
        if item["apiVersion"].startswith("kubeflow.org"):
            _of_kubeflow("KubeflowOrgV1PyTorchJob", item)
            continue
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


def _of_kubeflow(kind: str, value: Any) -> None:
    """By the types that the operator's own SDK is generated with; pods by those of Kubernetes."""
    if inner := re.fullmatch(r"list\[(\w+)\]", kind):
        for item in value:
            _of_kubeflow(inner[1], item)
    elif inner := re.fullmatch(r"dict\(str, (\w+)\)", kind):
        for item in value.values():
            _of_kubeflow(inner[1], item)
    elif kind == "V1PodTemplateSpec":
        refuse_unless_valid([{"apiVersion": "v1", "kind": "Pod", **value}])
    elif kind == "V1ObjectMeta":
        refuse_unless_valid([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": value}])
    elif kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, f"{value!r} is no {kind}"
    else:
        model = getattr(models, kind)
        attributes = {key: name for name, key in model.attribute_map.items()}
        for key, item in value.items():
            assert key in attributes, f"{kind} has no {key}"
            _of_kubeflow(model.openapi_types[attributes[key]], item)
        model(**{attributes[key]: item for key, item in value.items()})  # nothing is missing


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_accepts_a_manifest(kind: str) -> None:
    example = read_file(RENDER.with_name("kubernetes.env.example"))
    refuse_unless_valid(manifest(kind, [*example, "NAME=tiny", "NODES=2"], []))
    for settings in (
        "",
        f"NODES=64 NPROC=4 NAME=a{48 * '-'}z CLAIM=disk.of-all MOUNT=/mnt/a NAMESPACE=training",
        "NODES=3 GPUS=4 GPU_KIND=amd.com/gpu CPUS=96 MEMORY=800Gi SHM=64Gi",
        "SECRET_NAME=keys env.NCCL_SOCKET_IFNAME=eth0 PORT=1234 GRACE=30 RESTARTS=0",
    ):
        refuse_unless_valid(manifest(kind, [*NEEDED, *settings.split()], ["pp=2"]))


def test_a_misspelt_key_of_a_manifest_would_be_found() -> None:
    for kind, at, key, value in (
        ("job", 1, "completions", "2"),
        ("pytorchjob", 0, "nprocPerNode", 8),
        ("trainjob", 0, "mlpolicy", {}),
        ("trainjob", 1, "trainer", {"numNodes": "2"}),
    ):
        objects = manifest(kind, [*NEEDED, "NODES=2"], [])
        objects[at]["spec"][key] = value
        with pytest.raises((kubernetes_validate.ValidationError, AssertionError, ValueError)):
            refuse_unless_valid(objects)


def test_all_pods_of_a_job_run_at_once_find_each_other_by_name_and_are_started_again() -> None:
    settings = [*NEEDED, "NODES=3", "GPUS=4", "PORT=2345", "RESTARTS=7"]
    service, job = manifest("job", settings, [])
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == 3
    assert spec["backoffLimitPerIndex"] == 7 and spec["maxFailedIndexes"] == 0
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailJob", "Ignore"]
    template = spec["template"]["spec"]
    assert template["subdomain"] == service["metadata"]["name"]
    (command,) = (container["command"] for container in template["containers"])
    assert f"--master-addr=tiny-0.{template['subdomain']}" in command
    assert {"--nnodes=3", "--nproc-per-node=4", "--master-port=2345"} < {*command}
    assert service["spec"]["ports"][0]["port"] == 2345
    # the label that Kubernetes puts on a Job's pods
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    # a config is checked for the ranks of all pods
    (check,) = template["initContainers"]
    env = {item["name"]: item["value"] for item in check["env"]}
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("12", "4")
    runtime, job = manifest("trainjob", settings, [])
    assert job["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 4}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "tiny"
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 7
    (job,) = manifest("pytorchjob", settings, [])
    # of the restarts of all pods together
    assert job["spec"]["runPolicy"]["backoffLimit"] == 21 and job["spec"]["nprocPerNode"] == "4"
    counts = {role: each["replicas"] for role, each in job["spec"]["pytorchReplicaSpecs"].items()}
    assert counts == {"Master": 1, "Worker": 2}


# --- what a user may write ----------------------------------------------------------------------


def test_what_kubernetes_would_refuse_is_refused_with_what_works() -> None:
    for setting, told in {
        "NAME=Llama": "NAME=Llama: is no name of a host: .*; write NAME=llama-8b",
        "NAME=8b": "NAME=8b: .*begun by a letter.*; write NAME=llama-8b",
        "NAME=llama_8b": "NAME=llama_8b: is no name",
        "NAME=llama-": "NAME=llama-: is no name",
        f"NAME={51 * 'a'}": "at most 50; write NAME=llama-8b",
        "NAME=": "NAME: is no name",
        "CLAIM=a_b": "CLAIM=a_b: is no name of an object.*; write CLAIM=shared",
        "NODES=0": "NODES=0: is no integer from 1; write NODES=2",
        "GPUS=eight": "GPUS=eight: is no integer from 0; write GPUS=8",
        "MEMORY=80 GB": "MEMORY=80 GB: is no amount of bytes; write MEMORY=200Gi",
        "MOUNT=data": "MOUNT=data: is no path; write MOUNT=/shared",
        "NODE=2": "NODE=2: no such variable; write NODES=2",
        "NCCL_DEBUG=INFO": "NCCL_DEBUG=INFO: no such variable; write env.NCCL_DEBUG=INFO",
        "env.PET_MAX_RESTARTS=5": "env.PET_MAX_RESTARTS=5: .*; write RESTARTS=5",
        "env.a-b=1": "env.a-b=1: no name of a variable; write env.NCCL_SOCKET_IFNAME=eth0",
    }.items():
        with pytest.raises(ConfigError, match=told):
            manifest("job", [*NEEDED, setting], [])


def test_a_secret_is_named_and_never_written() -> None:
    (_, job) = manifest("job", [*NEEDED, "SECRET_NAME=wandb"], [])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    key = "0123456789abcdef"
    overrides = [f"checkpoint.folder=s3://user:{key}@bucket/a"]
    with pytest.raises(ConfigError, match="write SECRET_NAME=wandb") as refused:
        manifest("job", [*NEEDED, f"env.WANDB_API_KEY={key}"], overrides)
    assert len(refused.value.problems) == 2 and key not in str(refused.value)
    for name, value in {
        "env.FOO": "hf_" + 5 * "Ab1cd",
        "env.DATABASE_URL": f"postgres://user:{key}@host/db",
        "env.OPTIONS": f"--token {key}",
        "env.my_token": key,
        "env.a-b": f"https://{key}@host/x",  # wrong for another reason, too
        "IMAGE": f"https://user:{key}@registry/llama:1",
    }.items():
        with pytest.raises(ConfigError, match="write SECRET_NAME=wandb") as refused:
            manifest("job", [*NEEDED, f"{name}={value}"], [])
        assert value not in str(refused.value) and key not in str(refused.value)


@pytest.mark.parametrize(
    "text, told", [(b"A=1\nB='x\n", "line 2: No closing quotation"), (b"A=\xff\n", "utf-8")]
)
def test_a_damaged_file_of_variables_is_named(text: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.env").write_bytes(text)
    with pytest.raises(ConfigError, match=f"--file={tmp_path}/cluster.env: .*{told}"):
        read_file(tmp_path / "cluster.env")


def test_variables_come_from_a_file_and_the_command_line_counts(tmp_path: Path) -> None:
    file = tmp_path / "cluster.env"
    file.write_text("# of our cluster\nIMAGE=a:1\nCLAIM=shared # all\n\nenv.A='b c'\nNODES=2\n")
    command = [sys.executable, str(RENDER), "job", "--file", str(file), "NODES=3", "NAME=tiny"]
    made = subprocess.run(
        [*command, "--", "-m", "pp=3"], capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    _, job = yaml.safe_load_all(made.stdout)
    assert "&id" not in made.stdout, "YAML's references are hard to read, and to edit"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert (job["spec"]["completions"], container["image"]) == (3, "a:1")
    assert {"name": "A", "value": "b c"} in container["env"]
    assert container["args"] == ["-m", "pp=3", "run_dir=/shared/outputs/tiny"]

    wrong = subprocess.run(command[:3], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and not wrong.stdout
    assert [line.split(":")[0] for line in wrong.stderr.splitlines()[1:]] == [
        *("NAME", "IMAGE", "CLAIM")
    ]


def test_an_override_comes_through_kubernetes_unchanged() -> None:
    overrides = ["logger.run_name=${steps}", "a=$(HOME)", "b=$$(HOME)", "c=$", "run_dir=/x y/z"]
    _, job = manifest("job", NEEDED, overrides)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert [expanded(word, {"HOME": "/root"}) for word in container["args"]] == overrides


# --- what a pod runs ----------------------------------------------------------------------------


def expanded(text: str, env: dict[str, str]) -> str:
    """As Kubernetes does it in command, args and env: $(NAME), and $$ for a $."""
    pattern = r"\$\$|\$\((\w+)\)"
    return re.sub(pattern, lambda m: env.get(m[1], m[0]) if m[1] else "$", text)


def operators_env(job: dict[str, Any], role: str, index: int) -> dict[str, str]:
    """What version 1.9 of the training operator adds to a container's environment."""
    specs, nproc = job["spec"]["pytorchReplicaSpecs"], job["spec"]["nprocPerNode"]
    nodes = sum(spec["replicas"] for spec in specs.values())
    (port,) = specs["Master"]["template"]["spec"]["containers"][0]["ports"]
    assert port["name"] == "pytorchjob-port"  # where the operator looks for it
    rank = str(index + (role == "Worker"))
    master = {"ADDR": f"{job['metadata']['name']}-master-0", "PORT": str(port["containerPort"])}
    return {
        "PYTHONUNBUFFERED": "1",
        **{
            f"{start}MASTER_{key}": value for start in ("", "PET_") for key, value in master.items()
        },
        "WORLD_SIZE": str(nodes * int(nproc)),
        "RANK": rank,
        "PET_NODE_RANK": rank,
        "PET_NPROC_PER_NODE": nproc,
        "PET_NNODES": str(nodes),
    }


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
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        self.port = str(port)
        settings = [f"MOUNT={self.volume}", f"PORT={port}", "NODES=2", "WAIT=60", "GRACE=60"]
        return manifest(kind, NEEDED + settings, [*TINY, *overrides])

    def start(self, objects: list[dict[str, Any]]) -> list[ForkedProgram]:
        """Both pods' containers that train."""
        job = objects[-1]
        if job["kind"] == "Job":
            (container,) = job["spec"]["template"]["spec"]["containers"]
            return [self.run(container, {"JOB_COMPLETION_INDEX": str(i)}) for i in (0, 1)]
        if job["kind"] == "TrainJob":
            (node,) = objects[0]["spec"]["template"]["spec"]["replicatedJobs"]
            (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
            assert (node["name"], container["name"]) == ("node", "node")
            return [self.run(container, trainers_env(objects, i, self.port)) for i in (0, 1)]
        pods = []
        for role, spec in job["spec"]["pytorchReplicaSpecs"].items():
            (container,) = spec["template"]["spec"]["containers"]
            for index in range(spec["replicas"]):
                pods.append(self.run(container, operators_env(job, role, index)))
        return pods

    def run(self, container: dict[str, Any], added: dict[str, str]) -> ForkedProgram:
        outer = {k: os.environ[k] for k in ("PATH", "HOME", "PYTHONPATH") if k in os.environ}
        env = {**added, **{item["name"]: item["value"] for item in container["env"]}}
        env |= {"OMP_NUM_THREADS": "1"}
        words = [expanded(word, env) for word in container["command"] + container["args"]]
        here = r"\btiny-(0\.tiny|master-0|node-0-0\.tiny)\b"
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


@pytest.mark.parametrize("kind", slow("job", "trainjob", "pytorchjob"))
def test_two_pods_train_one_model(cluster: Cluster, kind: str) -> None:
    """Whose config is checked before."""
    objects = cluster.manifest(kind, "dp=2", "steps=2")
    if kind == "job":
        (check,) = objects[1]["spec"]["template"]["spec"]["initContainers"]
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
def test_a_run_whose_pod_is_evicted_goes_on_without_gap_or_repeat(
    cluster: Cluster, kind: str
) -> None:
    """One pod gets SIGTERM. All must fail for Kubernetes to start them again, and not one end
    well."""
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
