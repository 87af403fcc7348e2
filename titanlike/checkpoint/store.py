"""Checkpoints of a run: what is saved, where, and which one a run goes on from.

    run_dir/checkpoints/step-00000100/   one checkpoint, written by all ranks with DCP
        *.distcp .metadata               tensors and their layout, names as in the whole model
        state.json                       step, seed, position in the data, sizes of the layout
        COMMITTED                        written last: without it the folder does not count

Tensors are keyed by parameter name, so any layout can load what another one saved. The position in
the data and the learning rate are functions of the step.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from titanlike.torch_private import read_newer_checkpoints

MARKER = "COMMITTED"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Part:
    """One stage of this rank and its optimizer."""

    stage: nn.Module
    optimizer: torch.optim.Optimizer


def newest(folder: Path) -> Path | None:
    """The committed checkpoint with the largest step."""
    whole = [path for path in folder.glob("step-*") if (path / MARKER).exists()]
    return max(whole, key=lambda path: path.name, default=None)


def find(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, None for a fresh start.

    Raises ValueError when the named one is not there or not whole.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return newest(run_dir / "checkpoints")
    path = Path(resume)
    if (path / MARKER).exists():
        return path
    inside = newest(path / "checkpoints") or newest(path)
    if inside is None:
        raise ValueError(
            f"checkpoint.resume={resume}: no whole checkpoint there; "
            "write the path of a step-XXXXXXXX folder or of a run directory"
        )
    return inside


def save(folder: Path, step: int, parts: list[Part], about: dict[str, Any]) -> Path:
    """Write checkpoint step-XXXXXXXX of all ranks; returns its path. Collective."""
    path = folder / f"step-{step:08d}"
    rank = dist.get_rank()
    if rank == 0:
        # of a killed save, or of a run that started again from an earlier step: marker first, so
        # that no half of it ever counts
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    dcp.save({**_tensors(parts), f"rng.{rank}": torch.get_rng_state()}, checkpoint_id=path)
    if rank == 0:
        (path / "state.json").write_text(json.dumps({"step": step, **about}, indent=1) + "\n")
        marker = path / f"{MARKER}.tmp"
        marker.write_text(f"step {step}\n")
        os.replace(marker, path / MARKER)
    dist.barrier()
    return path


def load(path: Path, parts: list[Part]) -> dict[str, Any]:
    """Load a checkpoint into the parts, whatever layout saved it; returns its state. Collective.

    Raises ValueError, naming the checkpoint, when a tensor is missing or of another shape.
    """
    read_newer_checkpoints()
    about = json.loads((path / "state.json").read_text())
    tensors = _tensors(parts)
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    absent = sorted(name for name in tensors if name not in saved)
    shapes = [
        f"{name} is {tuple(saved[name].size)} there and {tuple(value.shape)} here"
        for name, value in tensors.items()
        if name in saved and isinstance(value, torch.Tensor) and saved[name].size != value.shape
    ]
    problems = [f"{name} is not in it" for name in absent] + shapes
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"checkpoint {path} is of another model or optimizer: {'; '.join(problems[:3])}{more}; "
            "write the config that saved it (its config.yaml is in the run directory), "
            "another run_dir, or checkpoint.resume=never"
        )
    rng = f"rng.{dist.get_rank()}"
    if rng in saved and about.get("world_size") == dist.get_world_size():
        tensors[rng] = torch.get_rng_state()
    dcp.load(tensors, checkpoint_id=path)
    if rng in tensors:
        torch.set_rng_state(tensors.pop(rng))
    for part in parts:
        names = [name for name, _ in part.stage.named_parameters()]
        model = {name: tensors[f"model.{name}"] for name in names}
        set_model_state_dict(part.stage, model)
        optimizer = {
            name.removeprefix("optimizer."): value
            for name, value in tensors.items()
            if name.startswith("optimizer.") and _parameter(name) in names
        }
        set_optimizer_state_dict(part.stage, part.optimizer, optimizer, options=_FLAT)
    return about


def _tensors(parts: list[Part]) -> dict[str, Any]:
    """model.NAME and optimizer.{state,param_groups}.NAME.KEY of all parts (one optimizer a stage:
    DCP mixes up the parameters of an optimizer that spans several modules)."""
    out = {}
    for part in parts:
        for name, value in get_model_state_dict(part.stage).items():
            out[f"model.{name}"] = value
        state = get_optimizer_state_dict(part.stage, part.optimizer, options=_FLAT)
        for name, value in state.items():
            out[f"optimizer.{name}"] = value
    return out


def _parameter(name: str) -> str:
    """optimizer.state.layers.0.wq.weight.exp_avg -> layers.0.wq.weight"""
    return name.split(".", 2)[2].rpartition(".")[0]
