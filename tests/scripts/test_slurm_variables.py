"""What srun tells each rank, as torch wants it: the variables of steps as SLURM sets them."""

from __future__ import annotations

import os

import pytest

from titanlike.launch.slurm import adopt_slurm, tasks_of_nodes

ADOPTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of an outer launcher, and none of these left behind."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [*os.environ]:
        if name.startswith("SLURM") or name in ADOPTED:
            del os.environ[name]


def adopted(**variables: str | int) -> dict[str, str]:
    """torch's variables, from SLURM's of a rank."""
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
    os.environ.update({name: str(value) for name, value in (step | variables).items()})
    adopt_slurm()
    return {name: os.environ[name] for name in ADOPTED if name in os.environ}


@pytest.mark.parametrize(
    "text, tasks",
    [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("3,1,2(x2)", [3, 1, 2, 2])],
)
def test_the_short_form_of_tasks_is_read_node_by_node(text: str, tasks: list[int]) -> None:
    assert tasks_of_nodes(text) == tasks


@pytest.mark.parametrize(
    "node, rank, local, here", [(0, 1, 1, "2"), (2, 5, 1, "2"), (3, 6, 0, "1")]
)
def test_a_rank_knows_how_many_share_its_own_node(
    node: int, rank: int, local: int, here: str
) -> None:
    found = adopted(SLURM_NODEID=node, SLURM_PROCID=rank, SLURM_LOCALID=local)
    assert found["WORLD_SIZE"] == "7" and found["LOCAL_WORLD_SIZE"] == here
    assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(local))


def test_ports_of_array_tasks_and_of_steps_that_share_a_node_differ() -> None:
    """An array's tasks are jobs whose numbers follow each other."""
    ports = []
    for job in range(100, 120):
        for step in range(5):
            for name in ADOPTED:
                os.environ.pop(name, None)
            ports.append(adopted(SLURM_JOB_ID=job, SLURM_STEP_ID=step)["MASTER_PORT"])
    assert len(set(ports)) == 100 and all(1024 < int(port) < 32768 for port in ports)


@pytest.mark.parametrize("outer", [{"SLURM_STEP_NUM_TASKS": 1}, {"RANK": 3}])
def test_one_task_is_a_run_of_its_own_and_torchruns_ranks_stay(outer: dict[str, int]) -> None:
    """srun starts torchrun as one task a node, and torchrun sets the ranks."""
    found = adopted(**outer)
    assert "WORLD_SIZE" not in found and found.get("RANK") == (
        str(outer["RANK"]) if "RANK" in outer else None
    )


def test_an_address_and_port_that_are_set_stay() -> None:
    found = adopted(MASTER_ADDR="10.0.0.1", MASTER_PORT=29500)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")
