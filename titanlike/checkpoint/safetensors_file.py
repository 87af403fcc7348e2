"""The consolidate and restore commands: a checkpoint to one safetensors file, and back.

The file has the model's tensors, names without `model.`; with the optimizer also everything else
that a run needs to resume, names as in the checkpoint. Its metadata (strings):

format     pt
step       of the run
contents   model, or run: with the optimizer
xxh3       checksum of names and bytes, sorted by name
titanlike  state.json

Other safetensors files of a model can be restored, too: as step 0.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titanlike.checkpoint import state_dict
from titanlike.checkpoint.compare import open_checkpoint
from titanlike.checkpoint.dcp_storage import StorageWriter
from titanlike.checkpoint.integrity import MARKER, DamagedCheckpoint, delete_checkpoint, read_state
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import MODEL, OPTIMIZER, RNG
from titanlike.config.files import parse_object, temporary_beside
from titanlike.metrics import units

_RUN_PREFIXES = (OPTIMIZER, RNG)


class DamagedFile(DamagedCheckpoint):
    """A safetensors file differs from what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        ValueError.__init__(self, f"{path} is damaged: {reason}")


def consolidate(location: str, file: str, *, dtype: str | None, with_optimizer: bool) -> str:
    """Write `file` atomically; returns a summary. All tensors are in memory at once.

    Raises ValueError where data would be lost silently, DamagedCheckpoint, OSError.
    """
    path = _local(file)
    if path.exists():
        raise ValueError(f"{path} exists already; write another name, or remove it first")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if dtype and with_optimizer:
        raise ValueError(
            "--dtype with --optimizer: a resumed run needs its exact weights; write one of the two"
        )
    source = open_checkpoint("CHECKPOINT", location)
    if with_optimizer and not any(name.startswith(OPTIMIZER) for name in source.tensors):
        raise ValueError(f"--optimizer: {source.folder} has the model alone; write it without")
    tensors = {}
    for name in source.tensors:
        if not name.startswith(MODEL):
            if with_optimizer:
                tensors[name] = source.read(name)
            continue
        short = name.removeprefix(MODEL)
        if short.startswith(_RUN_PREFIXES):
            raise ValueError(f"a parameter is named {short}, a prefix reserved for the run's state")
        tensors[short] = _cast(name, source.read(name), dtype)
    state = read_state(source.folder)
    about = {"format": "pt", "step": str(state["step"]), "titanlike": json.dumps(state)}
    about |= {"contents": "run" if with_optimizer else "model", "xxh3": _checksum(tensors)}
    _write(path, tensors, about)
    return f"{path}: {_summary(tensors)} of {source.folder}"


def restore(file: str, folder: str) -> str:
    """Make a checkpoint in `folder` from a safetensors file; returns a summary.

    Raises ValueError where the file is missing or the checkpoint exists already; DamagedFile.
    """
    path, parent = _local(file), Storage(folder)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as source:
            about = source.metadata() or {}
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedFile(path, f"not a complete safetensors file: {error}") from None
    if not tensors:
        raise ValueError(f"{path} has no tensors")
    if "xxh3" in about and about["xxh3"] != _checksum(tensors):
        raise DamagedFile(path, "its tensors do not match its checksum")
    prefixes = _RUN_PREFIXES if about.get("contents") == "run" else ()
    named = {
        name if name.startswith(prefixes) else MODEL + name: tensor
        for name, tensor in tensors.items()
    }
    # a file of another program counts as step 0
    state = {"step": 0, "progress": {}, "val_loss": None, "same": {}, "sequences": None}
    state |= {**_state(path, about), "torch": torch.__version__}
    target = parent.at(f"{'step' if prefixes else 'model'}-{state['step']:08d}")
    if target.names():
        raise ValueError(f"{target} exists already; write another FOLDER, or remove it first")
    parent.make()
    writer = StorageWriter(target, state, lambda files: None)
    try:
        dcp.save(named, storage_writer=writer, no_dist=True)
    except CheckpointException as error:  # a BaseException
        raise OSError(f"{target} could not be written: {state_dict.error_line(error)}") from error
    finally:
        if not target.exists(MARKER):
            delete_checkpoint(target)
    key = "checkpoint.resume" if prefixes else "checkpoint.start_from"
    return f"{target}: {_summary(tensors)}; train with {key}={target}"


def _state(path: Path, about: dict[str, str]) -> dict[str, Any]:
    """state.json in the file's metadata, {} in a file of another program."""
    try:
        state = parse_object(about.get("titanlike", "{}"))
    except ValueError as error:
        raise DamagedFile(path, f"its state {error}") from None
    if type(state.get("step", 0)) is not int:
        raise DamagedFile(path, f"its state has {repr(state['step'])[:40]} as step")
    return state


def _cast(name: str, tensor: Tensor, dtype: str | None) -> Tensor:
    """Cast floating-point tensors only."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    cast = tensor.to(state_dict.DTYPES[dtype])
    if not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise ValueError(f"--dtype {dtype}: {name} has values too large for it; write bf16")
    return cast


def _checksum(tensors: dict[str, Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    temporary = temporary_beside(path)
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode  # as the umask says; save_file replaces it by 0600
        save_file(tensors, temporary, about)
        with open(temporary, "rb+") as file:
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        Storage(path.parent).sync()
    except SafetensorError as error:  # also raised for a full disk
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _local(file: str) -> Path:
    if "://" in file:
        raise ValueError(f"{file}: a safetensors file is a local path; copy it there afterwards")
    return Path(file).expanduser().absolute()


def _summary(tensors: dict[str, Tensor]) -> str:
    dtypes = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in tensors.values()}))
    size = units.size(sum(one.nbytes for one in tensors.values()))
    return f"{len(tensors)} tensors ({dtypes}, {size})"
