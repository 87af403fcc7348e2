"""What a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.store import metadata_of, read


def saved(run_dir: Path, step: int = 6) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    folder = Storage(run_dir / "checkpoints" / f"step-{step:08d}")
    metadata = metadata_of(folder)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }
    read(folder, metadata, tensors, None)
    return tensors
