"""Process groups: backends, timeouts, abort and clean-up."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


def pipeline_backend(backend: str) -> str | None:
    """The backend of a pipeline's group if it must differ from the default group's `backend`.

    Symptom without it (2.15): "nccl" opens one communicator per group, so all of a rank's P2P
    messages share a stream, where an early receive blocks the sends behind it; "nccl-lazy" opens
    one per pair of ranks, as "nccl" did before. Test:
    `test_fences.py::test_nccl_has_one_communicator_for_all_messages`.
    """
    if not hasattr(dist.distributed_c10d, "ProcessGroupNCCLLazy") or "cuda:nccl" not in backend:
        return None
    return backend.replace("cuda:nccl", "cuda:nccl-lazy")


def abort_groups() -> None:
    """Abort pending collectives of all groups, on this rank only; the groups cannot be used
    afterwards.

    A thread that waits for a GPU's collective returns, with an error or with garbage. gloo's go on:
    there peers notice a rank that leaves. Does nothing if torch has no such function.
    """
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_initialized():
        abort()


def group_named(name: str) -> dist.ProcessGroup:
    """The group with this `group_name`: operators take no objects."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def fill_later(tensor: Tensor, work: dist.Work) -> None:
    """Let `filled` wait for what fills a tensor: an operator that begins it returns no objects. torch
    does so for collectives that it compiles. Test: `test_functional_collectives.py
    ::test_what_fills_a_tensor_is_waited_for_by_its_memory`."""
    torch._C._distributed_c10d._register_work(tensor, work)


def filled(tensor: Tensor) -> Tensor:
    """The same tensor, once what was begun has filled it; at once if nothing was."""
    from torch.distributed._functional_collectives import wait_tensor  # late: 2 ms without experts

    return wait_tensor(tensor)


def default_store() -> dist.Store:
    """The store of the default group's rendezvous. torch has no public getter, and a second
    rendezvous at the same address is an error if rank 0 has the server."""
    return dist.distributed_c10d._get_default_store()


def forget_groups_of_meshes() -> None:
    """Drop the process groups of meshes whose job has ended.

    Symptom without it (2.11 to 2.15): DTensor's caches keep each DeviceMesh, its groups and their
    connections as long as the process lives, so after destroy_process_group a gloo peer still waits
    in a collective of a mesh axis. Test:
    `test_fences.py::test_meshes_still_keep_the_groups_of_a_job_that_has_ended`.
    """
    from torch.distributed.device_mesh import DeviceMesh

    for mesh in [item for item in gc.get_objects() if type(item) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()


@contextmanager
def as_only_rank() -> Iterator[None]:
    """A context in which a user's code that asks for rank and world size, by torch or by the
    environment, is told 0 and 1."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"), "0")
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"), "1")
    rank, size = (mock.patch.object(dist, name) for name in ("get_rank", "get_world_size"))
    with mock.patch.dict(os.environ, ranks | sizes), rank as told_rank, size as told_size:
        told_rank.return_value, told_size.return_value = 0, 1
        yield
