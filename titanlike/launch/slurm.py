"""Ranks that SLURM's srun started, one process each: SLURM's variables as torch's."""

from __future__ import annotations

import os
import re
import socket
import subprocess

# below 32768, from where the system gives ports away
_PORTS = range(20000, 32000)
_STEPS = 101  # ports apart are the same steps of two jobs that follow each other


def adopt_slurm() -> None:
    """Take rank and world size from SLURM where `srun` started one process a rank.

    MASTER_ADDR and MASTER_PORT stay where they are set. Without them the ranks meet on the step's
    first node, at a port that they all find without talking: it is of this job and step. The tasks
    of a job array are jobs, with numbers of their own.
    """
    env = os.environ
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    tasks = tasks_of_nodes(env["SLURM_STEP_TASKS_PER_NODE"])
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _first_host(env["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" not in env:
        number = int(env["SLURM_JOB_ID"]) * _STEPS + int(env["SLURM_STEP_ID"])
        env["MASTER_PORT"] = str(_PORTS[number % len(_PORTS)])
    env.update(
        RANK=env["SLURM_PROCID"],
        LOCAL_RANK=env["SLURM_LOCALID"],
        WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"],
        LOCAL_WORLD_SIZE=str(tasks[int(env["SLURM_NODEID"])]),
    )


def tasks_of_nodes(text: str) -> list[int]:
    """SLURM's short form, node by node: "2(x3),1" is [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}: not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _first_host(nodes: str) -> str:
    """The first node: its name, or where no DNS knows that the address that SLURM has for it."""
    host = _scontrol("show", "hostnames", nodes).split()[0]
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        known = re.search(r" NodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", host))
        return known[1] if known else host


def _scontrol(*words: str) -> str:
    settings = {"capture_output": True, "text": True, "check": True, "timeout": 30}
    return subprocess.run(["scontrol", *words], **settings).stdout
