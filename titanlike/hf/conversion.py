"""The commands of tools/checkpoint.py that read tensors: consolidate, the model in one safetensors
file; and digest, whether two checkpoints have the same tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from titanlike.core.checkpoint.digest import digest_of, text_of
from titanlike.core.checkpoint.integrity import MODEL, RNG
from titanlike.core.checkpoint.reader import ShardReader
from titanlike.core.checkpoint.state_dict import DTYPES, cast_weights
from titanlike.core.checkpoint.storage import STATE, DamagedCheckpoint, Storage
from titanlike.core.config.files import replaced
from titanlike.core.data.kinds import READERS
from titanlike.core.metrics import units
from titanlike.core.metrics.console import Console
from titanlike.hf.safetensors_folder import write_file


def consolidate(location: str, file: str, *, dtype: str | None = None) -> str:
    """Write `file` atomically; return a summary. All tensors are in memory at once.

    Raises ValueError if data would be lost silently, DamagedCheckpoint, OSError.
    """
    if "://" in file:
        raise ValueError(f"{file}: a safetensors file is a local path; copy it there afterwards")
    path = Path(file).expanduser().absolute()
    if path.exists():
        raise ValueError(f"{path} exists already; write another name, or remove it first")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    source, tensors = ShardReader.open("CHECKPOINT", location), {}
    for short in source.entries(MODEL):
        tensor = source.whole(MODEL + short)
        tensors[short] = cast_weights(tensor, DTYPES[dtype], MODEL + short) if dtype else tensor
    with replaced(path) as temporary:
        write_file(tensors, temporary, {"format": "pt", "step": str(source.header.state["step"])})
    Storage(path.parent).sync()
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}))
    size = units.size(sum(tensor.nbytes for tensor in tensors.values()))
    return f"{path}: {len(tensors)} tensors ({dtypes}, {size}) of {source.folder}"


def compare_digests(console: Console, location_a: str, location_b: str) -> bool:
    """Print the digests of two checkpoints, random generators excluded; return whether they are
    equal.

    A digest is computed from the files. Raises DamagedCheckpoint if it differs from the digest that
    the run recorded.
    """
    digests, steps = [], []
    for key, location in ("A", location_a), ("B", location_b):
        reader = ShardReader.open(key, location)
        steps.append(reader.header.state.get("step"))
        total = torch.zeros((), dtype=torch.int64)
        for name, saved in reader.header.tensors.items():
            row, shape = 0, torch.Size(saved.shape)
            if name.startswith((RNG, READERS)):
                continue
            for rows in reader.rows(name):
                total += digest_of(name, rows, shape, (row, *[0] * (len(shape) - 1))[: len(shape)])
                row += len(rows) if shape else 0
        computed, recorded = text_of(total), reader.header.state.get("digest")
        if recorded not in (None, computed):
            reason = f"has the digest {recorded}, and the tensors in the files have {computed}"
            raise DamagedCheckpoint(reader.folder, STATE, reason)
        digests.append(computed)
        console.line(f"{key}: {computed} {reader.folder}")
    same = digests[0] == digests[1]
    verdict = "the same" if same else "different"
    if not same and steps[0] != steps[1]:
        verdict = f"different, as they are of steps {steps[0]} and {steps[1]}"
    console.line(verdict)
    return same
