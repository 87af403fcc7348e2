"""torch's record of the last collectives of each process group (flight recorder)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as _torch_c10d

_distributed_c10d: Any = _torch_c10d  # torch's stub lacks the recorders


def write_records(folder: Path, rank: int) -> list[Path]:
    """Write folder/BACKEND_rankN for each backend with records; return their paths.

    `python -m torch.distributed.flight_recorder.fr_trace FOLDER` compares all ranks' files. torch
    itself writes them only after a collective's timeout, to /tmp, and only for NCCL; a hanging run
    ends before. Test: test_flight_recorder.py
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
