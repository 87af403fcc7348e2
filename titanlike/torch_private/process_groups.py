"""Process groups: backends, timeouts, how they end, what keeps them alive."""

from __future__ import annotations

import gc
import warnings
from datetime import timedelta

import torch.distributed as dist


def pipeline_backend(backend: str) -> str | None:
    """The backend of a pipeline's group, where it needs another than the default group's `backend`.

    Symptom without it (2.15): all messages of a rank, to whichever peer, are in one stream, where a
    receive that is posted early holds up the sends behind it: "nccl" there opens one communicator
    for a group, "nccl-lazy" one for each pair that exchanges messages, as "nccl" did before.
    Test: `test_fences.py::test_nccl_has_one_communicator_for_all_messages`.
    """
    if not hasattr(dist.distributed_c10d, "ProcessGroupNCCLLazy") or "cuda:nccl" not in backend:
        return None
    return backend.replace("cuda:nccl", "cuda:nccl-lazy")


def abort_groups() -> bool:
    """End what is under way in all groups, on this rank alone; the groups cannot be used
    afterwards.

    A thread that waits for a GPU's collective returns, with an error or with garbage. With gloo
    nothing ends: there a peer that leaves its groups is noticed. Returns False where torch can't.
    """
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is None or not dist.is_initialized():
        return False
    abort()
    return True


def group_named(name: str) -> dist.ProcessGroup:
    """The group that has this `group_name`: an operator takes no objects."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def default_store() -> dist.Store:
    """The store by which the ranks of the default group met: torch tells it to nobody, and a second
    rendezvous at the same address is an error where rank 0 has the server."""
    return dist.distributed_c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of a group's collectives.

    Symptom without it: a DeviceMesh's groups have torch's default of 10 or 30 minutes.
    Test: `test_fences.py::test_a_device_mesh_ignores_the_timeout_of_the_process_group`.
    """
    setter = getattr(dist, "set_timeout", None)  # 2.15
    if setter is None:
        setter = dist.distributed_c10d._set_pg_timeout
    with warnings.catch_warnings():  # that a planned rank's group, without peers, has none
        warnings.filterwarnings("ignore", "Set timeout is now only supported")
        setter(timedelta(seconds=seconds), group)


def forget_groups_of_meshes() -> None:
    """Drop the process groups of meshes whose job has ended.

    Symptom without it (2.11 to 2.15): after destroy_process_group a gloo peer that waits in a
    collective of a mesh axis waits on, since DTensor's caches keep each DeviceMesh for as long as
    the process lives, a mesh its groups, and a group its connections.
    Test: `test_fences.py::test_meshes_still_keep_the_groups_of_a_job_that_has_ended`.
    """
    from torch.distributed.device_mesh import DeviceMesh

    for mesh in [item for item in gc.get_objects() if type(item) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
