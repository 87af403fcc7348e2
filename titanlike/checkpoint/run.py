"""Saving a run and going on with it: what besides tensors must be the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlike.checkpoint import store
from titanlike.checkpoint.find import (
    MARKER,
    difference,
    find,
    folder_of,
    must_be_the_same,
    newest,
    read_state,
)
from titanlike.config.schema import Config
from titanlike.data.sources import Data
from titanlike.optimization import Part


def save_run(
    parts: list[Part],
    config: Config,
    data: Data,
    run_dir: Path,
    step: int,
    progress: dict[str, Any],
) -> None:
    """Write the checkpoint of a step. Collective."""
    about = {
        "progress": progress,
        "world_size": config.world_size,
        "layout": {key: getattr(config, key) for key in ("pp", "dp", "replicate")},
        "same": must_be_the_same(config),
        "sequences": len(data.train),
    }
    store.save(folder_of(run_dir), step, parts, about)


def resume_run(parts: list[Part], config: Config, data: Data, run_dir: Path) -> dict[str, Any]:
    """Load what `checkpoint.resume` names; its state, empty for a fresh start. Collective.

    Rank 0 decides, so that all ranks go on from the same step. Raises ValueError when another rank
    cannot see that checkpoint, or when it was made with other data or another model.
    """
    chosen: list[str | None] = [None]
    if dist.get_rank() == 0:
        path = find(config.checkpoint.resume, run_dir)
        chosen = [None if path is None else str(path.absolute())]
    dist.broadcast_object_list(chosen, src=0)
    if chosen[0] is None:
        return {}
    path = Path(chosen[0])
    if not (path / MARKER).exists():
        raise ValueError(
            f"rank {dist.get_rank()} does not see {path}, which rank 0 goes on from; "
            "write a run_dir on a file system that all machines share"
        )
    if text := difference(path, config):
        raise ValueError(text)
    sequences = read_state(path)["sequences"]
    if sequences != len(data.train):
        raise ValueError(
            f"data: {path} was trained on {sequences} sequences, and there are {len(data.train)} "
            "now; give it the same data, or another run_dir"
        )
    return store.load(path, parts)


def last_good(run_dir: Path) -> str:
    """From where a run that diverged can go on."""
    path = newest(folder_of(run_dir))
    if path is None:
        return "there is no checkpoint yet: write a smaller optimizer.lr or a longer lr.warmup"
    return f"the last good checkpoint is {path}: start again from it with a smaller optimizer.lr"
