"""Ranks started by SLURM's srun, one process each: torch's environment variables from SLURM's."""

from __future__ import annotations

import os
import re
import socket
import subprocess

_PORTS = range(20000, 32000)  # below 32768, where Linux's ephemeral ports begin
_STEPS = 101  # ports between the same step of two consecutive jobs


def adopt_slurm() -> None:
    """Set RANK, WORLD_SIZE and so on if `srun` started one process per rank.

    MASTER_ADDR and MASTER_PORT default to the step's first node and a port derived from the ids of
    job and step, so that all ranks find the same one. (Each task of a job array is a job with an id
    of its own.)
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
    """Tasks of each node from SLURM's short form: "2(x3),1" is [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}: not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _first_host(nodes: str) -> str:
    """The first node's name, or if DNS does not resolve it, its address from SLURM."""
    host = _scontrol("show", "hostnames", nodes).split()[0]
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        address = re.search(r" NodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", host))
        return address[1] if address else host


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
