"""Checkpoints of earlier versions, which were torch's: told of, and rewritten in place."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from support import saved_runs
from support.saved_runs import checkpoint
from support.saved_state import load_each
from support.saved_tensors import saved as tensors_of
from support.world import run_world
from titanlike.checkpoint.commands import main
from titanlike.checkpoint.discovery import select_resume
from titanlike.checkpoint.format import checksum
from titanlike.checkpoint.integrity import check_all
from titanlike.checkpoint.storage import MARKER, Storage
from titanlike.config.schema import Config

saved, run = saved_runs.saved, saved_runs.run


def as_before(folder: Path, tensors: dict[str, torch.Tensor], planted: Any = None) -> None:
    """Write a checkpoint as format 2 was, in halves of rows by two ranks."""
    for path in folder.glob("*"):
        if path.name != "state.json":
            path.unlink()
    described, places = {}, {}
    for rank in range(2):
        stream = io.BytesIO()
        for name, tensor in tensors.items():
            halves = tensor.chunk(2) if tensor.dim() and len(tensor) > 1 else (tensor,)
            chunks = [
                ChunkStorageMetadata(
                    torch.Size([n * len(halves[0])] + [0] * (half.dim() - 1)), half.shape
                )
                if half.dim()
                else ChunkStorageMetadata(torch.Size(), half.shape)
                for n, half in enumerate(halves)
            ]
            properties = TensorProperties(dtype=tensor.dtype)
            described[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
            for chunk, half in [*zip(chunks, halves, strict=True)][rank : rank + 1]:
                begin = stream.tell()
                torch.save(half.clone(), stream)
                place = _StorageInfo(f"__{rank}_0.distcp", begin, stream.tell() - begin)
                places[MetadataIndex(name, chunk.offsets)] = place
        (folder / f"__{rank}_0.distcp").write_bytes(stream.getvalue())
    metadata = Metadata(described, planted, places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    names = sorted(path.name for path in folder.iterdir())
    data = {name: (folder / name).read_bytes() for name in names}
    manifest = json.dumps({name: [len(d), checksum(d)] for name, d in data.items()}).encode()
    (folder / "files.json").write_bytes(manifest)
    (folder / MARKER).write_text(checksum(manifest))


def test_checkpoints_of_before_are_told_of_and_converted(
    run: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut off before its commit, a conversion is begun again; what is not complete stays."""
    folder = Path(run.run_dir)
    [[truth]] = run_world(load_each, run, tmp_path / "truth", [run])
    for step in (3, 6):
        as_before(checkpoint(folder, step), tensors_of(folder, step))
    (checkpoint(folder, 3) / MARKER).unlink()
    (checkpoint(folder, 6) / "index.json").write_text("{")
    convert = f"convert {folder}/checkpoints"
    with pytest.raises(ValueError, match=f"earlier version; .*{convert}"):
        select_resume(run)
    assert main(["verify", str(checkpoint(folder, 6))]) == 2 and convert in capsys.readouterr().err
    assert main(["convert", str(folder)]) == 1  # of step 3
    assert "step-00000003: left as it is" in capsys.readouterr().out
    assert not [*checkpoint(folder, 6).glob("*.distcp"), *checkpoint(folder, 6).glob(".*")]
    check_all(Storage(checkpoint(folder, 6)))
    [[loaded]] = run_world(load_each, run, tmp_path / "ranks", [run])
    assert (loaded.step, loaded.state) == (6, truth.state)
    assert main(["convert", str(checkpoint(folder, 6))]) == 0, "there is nothing to do"


def test_a_planted_pickle_is_not_run(
    run: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Touches:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    step = checkpoint(Path(run.run_dir), 6)
    as_before(step, tensors_of(Path(run.run_dir)), Touches())
    assert main(["convert", str(step)]) in (1, 2)
    assert "asks for" in capsys.readouterr().err and not (tmp_path / "ran").exists()
