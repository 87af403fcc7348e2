"""A checkpoint as one safetensors file, and back.

The file holds the model's tensors, names without `model.`; with the optimizer also everything else
that a run needs, names as in the checkpoint. Its metadata (texts):

format     pt
step       of the run
contents   model, or run: with the optimizer
xxh3       checksum of names and bytes, sorted by name
titanlike  state.json

Any other safetensors file of a model may be restored, too: as one of step 0.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titanlike.checkpoint import store
from titanlike.checkpoint.compare import opened
from titanlike.checkpoint.contents import MODEL, OPTIMIZER, RNG
from titanlike.checkpoint.dcp_files import Writer
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.whole import MARKER, Damaged, Manifest, read_state, revoke
from titanlike.metrics import units

_REST = (OPTIMIZER, RNG)


class DamagedFile(Damaged):
    """A safetensors file is not what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        ValueError.__init__(self, f"{path} is damaged: {reason}")


def consolidate(location: str, file: str, *, dtype: str | None, with_optimizer: bool) -> str:
    """Write FILE, whole or not at all; says what was written. All of it is in memory at once.

    Raises ValueError where it would lose something silently, Damaged, OSError.
    """
    path = _local(file)
    if path.exists():
        raise ValueError(f"{path} is there already; write another name, or remove it first")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if dtype and with_optimizer:
        raise ValueError(
            "--dtype with --optimizer: a run that goes on needs its own weights, to the last bit; "
            "write one of the two"
        )
    source = opened("CHECKPOINT", location)
    if with_optimizer and not any(name.startswith(OPTIMIZER) for name in source.tensors):
        raise ValueError(f"--optimizer: {source.folder} holds the model alone; write it without")
    tensors = {}
    for name in source.tensors:
        if not name.startswith(MODEL):
            if with_optimizer:
                tensors[name] = source.read(name)
            continue
        short = name.removeprefix(MODEL)
        if short.startswith(_REST):
            raise ValueError(f"a parameter is named {short}, which would be taken for the run's")
        tensors[short] = _cast(name, source.read(name), dtype)
    state = read_state(source.folder)
    about = {
        "format": "pt",
        "step": str(state["step"]),
        "contents": "run" if with_optimizer else "model",
        "xxh3": _checksum(tensors),
        "titanlike": json.dumps(state),
    }
    _write(path, tensors, about)
    return f"{path}: {_what(tensors)} of {source.folder}"


def restore(file: str, folder: str) -> str:
    """Make a checkpoint in `folder` of a safetensors file; says which.

    Raises ValueError where there is no file, or the checkpoint is there already; DamagedFile.
    """
    path, above = _local(file), Storage(folder)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as source:
            about = source.metadata() or {}
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedFile(path, f"it is no whole safetensors file: {error}") from None
    if not tensors:
        raise ValueError(f"{path} holds no tensors")
    if "xxh3" in about and about["xxh3"] != _checksum(tensors):
        raise DamagedFile(path, "its tensors do not have the checksum that is in it")
    rest = _REST if about.get("contents") == "run" else ()
    named = {
        name if rest and name.startswith(rest) else MODEL + name: tensor
        for name, tensor in tensors.items()
    }
    state = _state(about)
    target = above.at(f"{'step' if rest else 'model'}-{state['step']:08d}")
    if target.names():
        raise ValueError(f"{target} is there already; write another FOLDER, or remove it first")
    above.make()
    try:
        dcp.save(named, storage_writer=Writer(target, state, _nothing), no_dist=True)
    except CheckpointException as error:  # a BaseException
        raise OSError(f"{target} could not be written: {store.first_line(error)}") from error
    finally:
        if not target.exists(MARKER):
            revoke(target)
    key = "checkpoint.resume" if rest else "checkpoint.start_from"
    return f"{target}: {_what(tensors)}; train with {key}={target}"


def _state(about: dict[str, str]) -> dict[str, Any]:
    """For state.json; of a file that another program wrote, as of a run that has not begun."""
    unknown = {"step": 0, "progress": {}, "val_loss": None, "same": {}, "sequences": None}
    state = json.loads(about.get("titanlike", "{}"))
    return {**unknown, **state, "torch": torch.__version__}


def _cast(name: str, tensor: Tensor, dtype: str | None) -> Tensor:
    """Floating point in another dtype; what else there is stays."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    cast = tensor.to(store.DTYPES[dtype])
    if not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise ValueError(f"--dtype {dtype}: {name} has numbers too large for it; write bf16")
    return cast


def _checksum(tensors: dict[str, Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return hasher.hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, unfinished, about)
        with open(unfinished, "rb+") as file:
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        Storage(path.parent).sync()
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _local(file: str) -> Path:
    if "://" in file:
        raise ValueError(f"{file}: a safetensors file is a local path; copy it there afterwards")
    return Path(file).expanduser().absolute()


def _what(tensors: dict[str, Tensor]) -> str:
    dtypes = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in tensors.values()}))
    size = units.size(sum(one.nbytes for one in tensors.values()))
    return f"{len(tensors)} tensors ({dtypes}, {size})"


def _nothing(files: Manifest) -> None:
    """Nobody waits for it."""
