"""What a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from titanlike.core.checkpoint.integrity import open_header
from titanlike.core.checkpoint.reader import read
from titanlike.core.checkpoint.storage import Storage


def saved(run_dir: Path, step: int = 6) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    header = open_header(Storage(run_dir / "checkpoints" / f"step-{step:08d}"))
    tensors = {
        name: torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        for name, saved in header.tensors.items()
    }
    read(header, tensors, None)
    return tensors
