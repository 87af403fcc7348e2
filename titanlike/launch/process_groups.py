"""Leaving the process groups of a failed job while peers may still wait in them."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading


def leave_groups(timeout: float) -> bool:
    """Close this process' connections, so that peers waiting for it get an error immediately.

    Returns whether that took less than `timeout` seconds: a reduction in flight holds the
    connections until its peers have left, too. NCCL groups are not touched: a peer waiting on its
    GPU would not be notified, and destroying them may wait for that peer.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or "nccl" in dist.get_backend_config():
        return True

    def leave() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
        gc.collect()  # modules are reference cycles; gloo closes with the last reference
        # loaded by every job that has meshes; importing it now would take seconds
        if (groups := sys.modules.get("titanlike.torch_private.process_groups")) is not None:
            groups.forget_groups_of_meshes()

    thread = threading.Thread(target=leave, daemon=True, name="leave groups")
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()
