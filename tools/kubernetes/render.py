"""Print the Kubernetes manifest of a run, for `kubectl apply -f -`.

    python render.py job --file cluster.env NAME=llama NODES=2 GPUS=8 -- pp=4 dp=4
    python render.py trainjob --file cluster.env NAME=llama NODES=2 -- pp=2
    python render.py pytorchjob --file cluster.env NAME=llama NODES=2 -- pp=2

`job` is an indexed Job with its headless Service (Kubernetes 1.29 or newer), `trainjob` a TrainJob
for Kubeflow Trainer 2 with its own TrainingRuntime, `pytorchjob` one for Kubeflow's former training
operator (1.7 or newer). All take the same variables, from files of NAME=value lines and from the
command line, where the last one counts; env.NAME=value is an environment variable of the pods.
After `--` come the overrides of training.

A pod is a node: torchrun with rank 0's pod as the master. All errors are shown at once (exit code
2), without a manifest.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from titanlike.config.credentials import REDACTED, is_secret_name, redact_override
from titanlike.config.errors import ConfigError, Problem, nearest

Object = dict[str, Any]


@dataclass(frozen=True)
class Variable:
    """A variable and its valid values. default: None = required, "" = may be missing."""

    meaning: str
    default: str | None
    pattern: str
    rule: str
    good: str

    def __str__(self) -> str:
        default = "must be given" if self.default is None else self.default
        return f"{self.meaning} ({default})" if default else self.meaning


# RFC 1035 with room for "-worker-12345": a pod's name is a host's, and a Service's under Kubeflow
_LABEL = r"(?=.{1,50}$)[a-z]([-a-z0-9]*[a-z0-9])?"
_LABEL_RULE = "is no name of a host: a-z, 0-9 and -, begun by a letter, not ended by -, at most 50"
_OBJECT = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_OBJECT_RULE = "is no name of an object: a-z, 0-9, - and ., begun and ended by a letter or digit"
_AMOUNT, _AMOUNT_RULE = r"[1-9][0-9]*([KMGTP]i?)?", "is no amount of bytes"
_COUNT, _COUNT_RULE = r"[1-9][0-9]{0,4}", "is no integer from 1"
_PATH, _KIND = r"/[\w./-]+", r"[a-z.]+/[\w.-]+"

VARIABLES = {
    "NAME": Variable("the run", None, _LABEL, _LABEL_RULE, "llama-8b"),
    "IMAGE": Variable("image with titanlike", None, r"\S+", "is no image", "registry/llama:1"),
    "CLAIM": Variable("shared volume's claim", None, _OBJECT, _OBJECT_RULE, "shared"),
    "MOUNT": Variable("the volume's path in a pod", "/shared", _PATH, "is no path", "/shared"),
    "NAMESPACE": Variable("namespace", "", _LABEL, _LABEL_RULE, "training"),
    "NODES": Variable("pods", "1", _COUNT, _COUNT_RULE, "2"),
    "GPUS": Variable("GPUs a pod", "0", r"[0-9]{1,3}", "is no integer from 0", "8"),
    "NPROC": Variable("ranks a pod; left out, GPUS or 1", "", _COUNT, _COUNT_RULE, "8"),
    "GPU_KIND": Variable(
        "the GPUs' resource", "nvidia.com/gpu", _KIND, "is no resource", "amd.com/gpu"
    ),
    "CPUS": Variable("cores a pod", "", r"[1-9][0-9]*m?", "is no amount of cores", "16"),
    "MEMORY": Variable("memory a pod", "", _AMOUNT, _AMOUNT_RULE, "200Gi"),
    "SHM": Variable("/dev/shm, for NCCL and loaders", "8Gi", _AMOUNT, _AMOUNT_RULE, "8Gi"),
    "SECRET_NAME": Variable(
        "Secret whose keys are environment", "", _OBJECT, _OBJECT_RULE, "wandb"
    ),
    "PORT": Variable("of the rendezvous", "29500", r"[1-9][0-9]{3,4}", "is no port", "29500"),
    "WAIT": Variable("seconds that pods wait for all", "1800", _COUNT, _COUNT_RULE, "1800"),
    "GRACE": Variable("seconds to save after SIGTERM", "300", _COUNT, _COUNT_RULE, "300"),
    "RESTARTS": Variable("times a pod is started again", "3", r"[0-9]{1,4}", "is no integer", "3"),
}


def main(arguments: list[str] | None = None) -> None:
    """Print a manifest. Exit code 2 for errors."""
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    own, overrides = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        usage="render.py {job,trainjob,pytorchjob} [--file FILE] [NAME=value ...] [-- OVERRIDE ...]",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="\n".join(f"{name:12} {v}" for name, v in VARIABLES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--file", action="append", default=[], help="NAME=value lines")
    parser.add_argument("settings", nargs="*", metavar="NAME=value")
    args = parser.parse_intermixed_args(own)
    try:
        settings = [line for file in args.file for line in read_file(Path(file))]
        objects = manifest(args.kind, settings + args.settings, overrides)
    except (ConfigError, OSError) as error:
        print(f"errors; no manifest was made\n{error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(to_yaml(objects), end="")


def to_yaml(objects: list[Object]) -> str:
    """YAML for kubectl, without anchors and aliases."""

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump_all(objects, Dumper=Plain, sort_keys=False)


def read_file(path: Path) -> list[str]:
    """The settings in a file: NAME=value lines, with # comments and shell quotes. Raises ConfigError."""
    found: list[str] = []
    place = ""
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            place = f"line {number}: "
            found.append(" ".join(shlex.split(line, comments=True)))
    except ValueError as error:  # also of bytes that are no UTF-8
        raise ConfigError([Problem("--file", str(path), f"{place}{error}", "NAME=tiny")]) from None
    return [setting for setting in found if setting]


def manifest(kind: str, settings: list[str], overrides: list[str]) -> list[Object]:
    """The objects of a run. kind: job, trainjob or pytorchjob. settings: NAME=value, env.NAME=value.

    Raises ConfigError with every mistake in them.
    """
    values, env = read(settings, overrides)
    return KINDS[kind](values, env, overrides)


def read(settings: list[str], overrides: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Variables, all of them, and the pods' environment. Raises ConfigError."""
    given = dict(text.partition("=")[::2] for text in settings)
    env = {key[4:]: value for key, value in given.items() if key.startswith("env.")}
    problems = []
    for key, value in given.items():
        if key not in VARIABLES and not key.startswith("env."):
            near = nearest(key, VARIABLES) or f"env.{key}"
            problems.append(Problem(key, value, "no such variable", f"{near}={value}"))
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            fix = "env.NCCL_SOCKET_IFNAME=eth0"
            problems.append(Problem(f"env.{name}", value, "no name of a variable", fix))
        elif name == "PET_MAX_RESTARTS":
            reason = "a stopped rank would exit with 0, and its pod count as completed"
            problems.append(Problem(f"env.{name}", value, reason, f"RESTARTS={value}"))
    named = [f"env.{name}" for name in env if is_secret_name(name, environment=True)]
    texts = [*(f"{key}={value}" for key, value in given.items()), *overrides]
    valued = [text.partition("=")[0] for text in texts if redact_override(text) != text]
    for key in dict.fromkeys(named + valued):
        reason = "a secret must not be in a manifest: keep it in a Secret and name that"
        problems.append(Problem(key, REDACTED, reason, "SECRET_NAME=wandb"))
    values = {}
    for key, variable in VARIABLES.items():
        values[key] = value = given.get(key, variable.default or "")
        if key not in given and variable.default is None:
            fix = f"{key}={variable.good}"
            problems.append(Problem(key, "", f"must be given: {variable.meaning}", fix))
        elif not re.fullmatch(variable.pattern, value) and (key in given or value):
            problems.append(Problem(key, value, variable.rule, f"{key}={variable.good}"))
    if problems:
        raise ConfigError(problems)
    return values, env


def indexed_job(values: dict[str, str], env: dict[str, str], overrides: list[str]) -> list[Object]:
    """A Service that gives the pods names, and the Job."""
    name, nodes = values["NAME"], int(values["NODES"])
    torchrun = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks(values)}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",  # Kubernetes puts its value here
        f"--master-addr={name}-0.{name}",
        f"--master-port={values['PORT']}",
    ]
    template = checked(values, pod(values, env, overrides, torchrun))
    template["spec"] |= {"subdomain": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(values),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": int(values["PORT"])}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(values),
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            # by pod, not in sum: a failure of one rank is a failure of all pods
            "backoffLimitPerIndex": int(values["RESTARTS"]),
            "maxFailedIndexes": 0,
            "podFailurePolicy": FAILURES,
            "template": template,
        },
    }
    return [service, job]


FAILURES = {
    "rules": [
        {  # an error in the config recurs
            "action": "FailJob",
            "onExitCodes": {"containerName": "check", "operator": "In", "values": [2]},
        },
        {  # preempted, drained, evicted
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]
}


def checked(values: dict[str, str], template: Object) -> Object:
    """The template of a pod that checks the config before it trains.

    That finds errors in seconds, before the pods wait for each other, and with its own exit code:
    torchrun's is 1 whatever its ranks' were. It sees the devices of training.
    """
    (train,) = template["spec"]["containers"]
    world = int(values["NODES"]) * int(ranks(values))
    count = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": ranks(values)}
    check = train | {
        "name": "check",
        "command": ["python", "-m", "titanlike", "--check"],
        "env": train["env"] + [{"name": key, "value": value} for key, value in count.items()],
    }
    template["spec"] |= {"restartPolicy": "Never", "initContainers": [check]}
    return template


def train_job(values: dict[str, str], env: dict[str, str], overrides: list[str]) -> list[Object]:
    """A TrainingRuntime with the pods, and the TrainJob that runs it. The trainer's controller sets
    PET_... variables of the container that is called node, in the job of that name."""
    version = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,  # a failed pod is a failure of all: the JobSet restarts them
                "podFailurePolicy": FAILURES,
                "template": checked(values, pod(values, env, overrides, [], name="node")),
            },
        },
    }
    recurs = {
        "name": "config",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    failures = {"maxRestarts": int(values["RESTARTS"]), "rules": [recurs]}
    policy = {"numNodes": int(values["NODES"]), "torch": {}}
    jobs = {"spec": {"failurePolicy": failures, "replicatedJobs": [node]}}
    runtime = {"mlPolicy": policy, "template": jobs}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime"}
    trainer = {"numNodes": int(values["NODES"]), "numProcPerNode": int(ranks(values))}
    spec = {"runtimeRef": {**reference, "name": values["NAME"]}, "trainer": trainer}
    return [
        {**version, "kind": "TrainingRuntime", "metadata": metadata(values), "spec": runtime},
        {**version, "kind": "TrainJob", "metadata": metadata(values), "spec": spec},
    ]


def pytorch_job(values: dict[str, str], env: dict[str, str], overrides: list[str]) -> list[Object]:
    """A PyTorchJob: the operator sets PET_... variables instead of torchrun's options."""
    nodes, specs = int(values["NODES"]), {}
    for role, count in (("Master", 1), ("Worker", nodes - 1)):
        template = pod(values, env, overrides, [], name="pytorch")
        port = {"name": "pytorchjob-port", "containerPort": int(values["PORT"])}
        template["spec"]["containers"][0]["ports"] = [port]
        if count:
            specs[role] = {"replicas": count, "restartPolicy": "OnFailure", "template": template}
    # the operator counts the restarts of all pods together
    policy = {"backoffLimit": int(values["RESTARTS"]) * nodes, "cleanPodPolicy": "Running"}
    spec = {"nprocPerNode": ranks(values), "runPolicy": policy, "pytorchReplicaSpecs": specs}
    kind = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}
    return [{**kind, "metadata": metadata(values), "spec": spec}]


KINDS = {"job": indexed_job, "trainjob": train_job, "pytorchjob": pytorch_job}


def metadata(values: dict[str, str]) -> Object:
    namespace = {"namespace": values["NAMESPACE"]} if values["NAMESPACE"] else {}
    return {"name": values["NAME"], **namespace}


def ranks(values: dict[str, str]) -> str:
    """Ranks per pod: NPROC, or one per GPU."""
    return values["NPROC"] or str(max(1, int(values["GPUS"])))


def pod(
    values: dict[str, str],
    env: dict[str, str],
    overrides: list[str],
    torchrun: list[str],
    name: str = "train",
) -> Object:
    """The template of a pod, which trains. torchrun: its options; name: the container's."""
    mount, claim = values["MOUNT"], values["CLAIM"]
    run_dir = [f"run_dir={mount}/outputs/{values['NAME']}"]  # the same in all pods, and restarts
    if any(text.startswith("run_dir=") for text in overrides):
        run_dir = []
    settings = {
        "PET_RDZV_CONF": f"timeout={values['WAIT']}",  # options of torchrun, by its own variables
        "PET_SHUTDOWN_TIMEOUT": str(max(1, int(values["GRACE"]) - 10)),
        **env,
    }
    container = {
        "name": name,
        "image": values["IMAGE"],
        "workingDir": mount,
        "command": ["python", "-m", "torch.distributed.run", *torchrun, "-m", "titanlike"],
        "args": [text.replace("$", "$$") for text in overrides + run_dir],  # $(...) is Kubernetes'
        "env": [{"name": key, "value": text.replace("$", "$$")} for key, text in settings.items()],
        "resources": resources(values),
        "volumeMounts": [
            {"name": "shared", "mountPath": mount},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if values["SECRET_NAME"]:
        container["envFrom"] = [{"secretRef": {"name": values["SECRET_NAME"]}}]
    return {
        "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},  # ranks talk directly
        "spec": {
            "terminationGracePeriodSeconds": int(values["GRACE"]),
            "containers": [container],
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": values["SHM"]}},
            ],
        },
    }


def resources(values: dict[str, str]) -> Object:
    """Requests and limits of a container."""
    memory = {"memory": values["MEMORY"]} if values["MEMORY"] else {}
    cores = {"cpu": values["CPUS"]} if values["CPUS"] else {}
    gpus = {values["GPU_KIND"]: int(values["GPUS"])} if int(values["GPUS"]) else {}
    return {"requests": cores | memory, "limits": memory | gpus}


if __name__ == "__main__":
    main()
