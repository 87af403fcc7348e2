"""Process groups: their time limits, and letting go of them."""

from __future__ import annotations

import gc
from datetime import timedelta

import torch.distributed as dist


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Bound waits in a group. A DeviceMesh gives its groups torch's default of 10 or 30 minutes."""
    setter = getattr(dist, "set_timeout", None)  # 2.15
    if setter is None:
        setter = dist.distributed_c10d._set_pg_timeout
    setter(timedelta(seconds=seconds), group)


def forget_groups_of_meshes() -> None:
    """Let go of the process groups of meshes whose job has ended.

    Symptom without it (2.11 to 2.15): after destroy_process_group a gloo peer that waits in a
    collective of a mesh axis waits on, since DTensor's caches keep each DeviceMesh for as long as
    the process lives, a mesh its groups, and a group its connections.
    """
    from torch.distributed.device_mesh import DeviceMesh

    for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
