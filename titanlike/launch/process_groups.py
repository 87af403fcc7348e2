"""Out of a failed job's process groups, while peers may still wait in them."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading


def leave_groups(patience: float) -> bool:
    """Close this process' connections to the others: those that wait for it come out at once.

    Whether that was done within `patience` seconds: a reduction in flight holds the connections
    until its peers are out, too. NCCL tells no peer that waits on its GPU, and may wait for it
    instead: its groups are left as they are.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or "nccl" in dist.get_backend_config():
        return True

    def leave() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
        gc.collect()  # the job's modules are cycles; gloo closes with the last reference
        # a job that has meshes has loaded this; to load it now would take seconds
        if (fences := sys.modules.get("titanlike.torch_private.process_groups")) is not None:
            fences.forget_groups_of_meshes()

    thread = threading.Thread(target=leave, daemon=True, name="leave groups")
    thread.start()
    thread.join(patience)
    return not thread.is_alive()
