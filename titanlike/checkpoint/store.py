"""Checkpoints of a run: what is saved, and where.

    run_dir/checkpoints/step-00000100/   one checkpoint, written by all ranks with DCP
        *.distcp .metadata               tensors and their layout, names as in the whole model
        state.json                       step, seed, position in the data, sizes of the layout
        COMMITTED                        written last: without it the folder does not count

Tensors are keyed by parameter name, so any layout can load what another one saved. The position in
the data and the learning rate are functions of the step.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from titanlike.checkpoint.find import MARKER, damaged, read_state
from titanlike.files import replace_file
from titanlike.optimization import Part
from titanlike.torch_private import read_newer_checkpoints

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


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
    try:
        dcp.save({**_tensors(parts), **_generators()}, checkpoint_id=path)
    except CheckpointException as error:
        free = shutil.disk_usage(folder).free
        raise OSError(
            f"checkpoint {path} could not be written, {free / 2**20:.0f} MiB are free there: "
            f"{str(_first(error)).strip().splitlines()[0]}"
        ) from error
    if rank == 0:
        replace_file(path / "state.json", json.dumps({"step": step, **about}, indent=1) + "\n")
        replace_file(path / MARKER, f"step {step}\n")
    dist.barrier()
    return path


def load(path: Path, parts: list[Part]) -> dict[str, Any]:
    """Load a checkpoint into the parts, whatever layout saved it; returns its state. Collective.

    Raises ValueError, naming the checkpoint, when a tensor is missing or of another shape.
    """
    read_newer_checkpoints()
    about = read_state(path)
    tensors = _tensors(parts)
    try:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # pickle raises anything on damaged bytes
        raise damaged(path, error) from error
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
    generators = _generators()
    if about["world_size"] != dist.get_world_size() or not generators.keys() <= saved.keys():
        generators = {}  # another layout has other ranks: each goes on with its own seed
    loaded = {**tensors, **generators}
    try:
        dcp.load(loaded, checkpoint_id=path)
    except CheckpointException as error:  # a BaseException; one entry a rank that failed
        raise damaged(path, _first(error)) from error
    tensors = {name: loaded[name] for name in tensors}
    _set_generators({name: loaded[name] for name in generators})
    for part in parts:
        names = [name for name, _ in part.stage.named_parameters()]
        model = {name: tensors[f"model.{name}"] for name in names}
        set_model_state_dict(part.stage, model)
        optimizer = {
            name.removeprefix("optimizer."): value
            for name, value in tensors.items()
            if name.startswith("optimizer.") and _parameter(name) in names
        }
        # DCP also brings back lr, weight_decay and the like: those are the config's to say
        declared = [_settings(group) for group in part.optimizer.param_groups]
        set_optimizer_state_dict(part.stage, part.optimizer, optimizer, options=_FLAT)
        for group, settings in zip(part.optimizer.param_groups, declared, strict=True):
            group.update(settings)
    return about


def _first(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that DCP names."""
    return next((wrapped[0] for wrapped in error.failures.values()), error)


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


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _generators() -> dict[str, torch.Tensor]:
    """The states of this rank's random generators."""
    rank = dist.get_rank()
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    for name, state in states.items():
        setter = torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state
        setter(state)


def _parameter(name: str) -> str:
    """optimizer.state.layers.0.wq.weight.exp_avg -> layers.0.wq.weight"""
    return name.split(".", 2)[2].rpartition(".")[0]
