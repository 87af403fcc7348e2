"""torch's record of collectives: which were begun, which have ended, by whom they were called."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as _torch_c10d

_distributed_c10d: Any = _torch_c10d  # torch's stub lacks the recorders


def write_records(folder: Path, rank: int) -> list[Path]:
    """Write folder/BACKEND_rankN for each backend with records; returns those.

    `python -m torch.distributed.flight_recorder.fr_trace FOLDER` compares those of all ranks.
    torch writes such files by itself once a collective has timed out, to /tmp, and only of NCCL; a
    run that hangs ends before. Test: test_flight_recorder.py
    """
    written = []
    for backend, record in _records().items():
        if pickle.loads(record)["entries"]:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{backend}_rank{rank}"
            unfinished = path.with_suffix(".tmp")
            unfinished.write_bytes(record)
            written.append(unfinished.replace(path))
    return written


def _records() -> dict[str, bytes]:
    """Pickled records by backend, as torch's analyzer reads them."""
    if not dist.is_initialized():
        return {}
    names = dict.fromkeys(pair.split(":")[-1] for pair in dist.get_backend_config().split(","))
    found: dict[str, bytes] = {}
    # 2.11 and 2.13: one recorder for NCCL, in builds that have it, and one for all other backends.
    # 2.15: one for each backend, by the name of its implementation, besides the old NCCL's
    by_name = "backend" in (_distributed_c10d._dump_fr_trace.__doc__ or "").partition("\n")[0]
    if hasattr(_distributed_c10d, "_dump_nccl_trace") and "nccl" in names:
        found["nccl"] = _distributed_c10d._dump_nccl_trace()
    if not by_name:
        found["gloo"] = _distributed_c10d._dump_fr_trace()
        return found
    implementations = {"nccl": ("nccl2", "nccl2-lazy", "nccl-lazy")}
    for name in names:
        for each in implementations.get(name, (name,)):
            found[each] = _distributed_c10d._dump_fr_trace(backend=each)
    return found
