"""Process groups: backends, timeouts, how they end, what keeps them alive; the record of
collectives."""

from __future__ import annotations

import gc
import pickle
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as _torch_c10d


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


_distributed_c10d: Any = _torch_c10d  # torch's stub lacks the recorders


def write_records(folder: Path, rank: int) -> list[Path]:
    """Write folder/BACKEND_rankN for each backend with records; returns those.

    `python -m torch.distributed.flight_recorder.fr_trace FOLDER` compares those of all ranks.
    torch writes such files by itself once a collective has timed out, to /tmp, and only of NCCL; a
    run that hangs ends before. Test: test_flight_recorder.py
    """
    if not dist.is_initialized():
        return []
    names = dict.fromkeys(pair.split(":")[-1] for pair in dist.get_backend_config().split(","))
    records: dict[str, bytes] = {}  # pickled, as torch's analyzer reads them
    # 2.11 and 2.13: one recorder for NCCL, in builds that have it, and one for all other backends.
    # 2.15: one for each backend, by the name of its implementation, besides the old NCCL's
    by_name = "backend" in (_distributed_c10d._dump_fr_trace.__doc__ or "").partition("\n")[0]
    if hasattr(_distributed_c10d, "_dump_nccl_trace") and "nccl" in names:
        records["nccl"] = _distributed_c10d._dump_nccl_trace()
    if by_name:
        nccl = ("nccl2", "nccl2-lazy", "nccl-lazy")
        for name in (n for backend in names for n in (nccl if backend == "nccl" else [backend])):
            records[name] = _distributed_c10d._dump_fr_trace(backend=name)
    else:
        records["gloo"] = _distributed_c10d._dump_fr_trace()
    written = []
    for backend, record in records.items():
        if pickle.loads(record)["entries"]:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{backend}_rank{rank}"
            unfinished = path.with_suffix(".tmp")
            unfinished.write_bytes(record)
            written.append(unfinished.replace(path))
    return written
