"""What srun tells each rank, as torch wants it: the variables of steps as SLURM sets them."""

from __future__ import annotations

import os
from unittest import mock

from titanlike.core.launch.environment import adopt_slurm, tasks_of_nodes

ADOPTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def adopted(**variables: str | int) -> dict[str, str]:
    """torch's variables, from SLURM's of a rank and nothing else."""
    step = {
        "SLURM_JOB_ID": 100,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_TASKS": 7,
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_NODEID": 0,
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "MASTER_ADDR": "n1",
    }
    given = {name: str(value) for name, value in (step | variables).items()}
    with mock.patch.dict(os.environ, given, clear=True):
        adopt_slurm()
        return {name: os.environ[name] for name in ADOPTED if name in os.environ}


def test_a_rank_knows_how_many_share_its_own_node() -> None:
    assert tasks_of_nodes("4") == [4] and tasks_of_nodes("3,1,2(x2)") == [3, 1, 2, 2]
    for node, rank, local, here in ((0, 1, 1, "2"), (2, 5, 1, "2"), (3, 6, 0, "1")):
        found = adopted(SLURM_NODEID=node, SLURM_PROCID=rank, SLURM_LOCALID=local)
        assert found["WORLD_SIZE"] == "7" and found["LOCAL_WORLD_SIZE"] == here
        assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(local))


def test_ports_of_array_tasks_and_of_steps_that_share_a_node_differ() -> None:
    """An array's tasks are jobs whose numbers follow each other."""
    ports = [
        adopted(SLURM_JOB_ID=job, SLURM_STEP_ID=step)["MASTER_PORT"]
        for job in range(100, 120)
        for step in range(5)
    ]
    assert len(set(ports)) == 100 and all(1024 < int(port) < 32768 for port in ports)


def test_what_torchrun_or_the_user_has_set_stays() -> None:
    """srun starts torchrun as one task a node, and torchrun sets the ranks."""
    assert not {"RANK", "WORLD_SIZE"} & adopted(SLURM_STEP_NUM_TASKS=1).keys()
    found = adopted(RANK=3)
    assert found["RANK"] == "3" and "WORLD_SIZE" not in found
    found = adopted(MASTER_ADDR="10.0.0.1", MASTER_PORT=29500)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")
