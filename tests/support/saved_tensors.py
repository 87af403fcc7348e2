"""What a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from titanlike.checkpoint.dcp_metadata import read_metadata
from titanlike.checkpoint.state_dict import read
from titanlike.checkpoint.storage import Storage


def saved(run_dir: Path, step: int = 6) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    folder = Storage(run_dir / "checkpoints" / f"step-{step:08d}")
    metadata = read_metadata(folder)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }
    read(folder, metadata, tensors, None)
    return tensors
