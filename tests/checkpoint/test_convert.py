"""Checkpoints of earlier versions, which were torch's: told of, and rewritten in place."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from functools import partial
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
from support.saved_runs import checkpoint, flip
from support.saved_state import load_each
from support.saved_tensors import saved as tensors_of
from support.world import run_world
from titanlike.core.checkpoint.discovery import select_resume
from titanlike.core.checkpoint.format import checksum
from titanlike.core.checkpoint.integrity import check_all, read_state
from titanlike.core.checkpoint.storage import MARKER, STATE, Storage
from titanlike.core.config.schema import Config
from titanlike.use.checkpoint_commands import main

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
    seal(folder)


def seal(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()} - {"files.json", MARKER}
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
    tensors = tensors_of(folder, 6)
    for step in (3, 6):
        as_before(checkpoint(folder, step), tensors_of(folder, step))
    (checkpoint(folder, 3) / MARKER).unlink()
    old = json.loads((checkpoint(folder, 6) / STATE).read_text())
    (checkpoint(folder, 6) / STATE).write_text(json.dumps(old | {"sequences": None}))
    as_before(checkpoint(folder, 6), tensors)  # as `restore` has written it
    (checkpoint(folder, 6) / "index.json").write_text("{")
    convert = f"convert {folder}/checkpoints"
    with pytest.raises(ValueError, match=f"earlier version; .*{convert}"):
        select_resume(run)
    assert main(["verify", str(checkpoint(folder, 6))]) == 2 and convert in capsys.readouterr().err
    assert main(["convert", str(folder)]) == 1  # of step 3
    assert "step-00000003: left as it is" in capsys.readouterr().out
    assert not [*checkpoint(folder, 6).glob("*.distcp"), *checkpoint(folder, 6).glob(".*")]
    check_all(Storage(checkpoint(folder, 6)))
    assert read_state(Storage(checkpoint(folder, 6)))["sequences"] is None
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
    assert "asks for" in capsys.readouterr().out and not (tmp_path / "ran").exists()


def described(step: Path, metadata: bytes) -> None:
    (step / ".metadata").write_bytes(metadata)
    seal(step)


LARGE = pickle.PROTO + b"\x04N" + pickle.LONG_BINPUT + b"\xff" * 4 + pickle.STOP
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "files.json": (lambda step: flip(step / "files.json"), "files.json does not match"),
    "the marker": (lambda step: flip(step / MARKER), "files.json does not match"),
    "a file": (lambda step: flip(step / "__0_0.distcp"), "__0_0.distcp does not match"),
    "a size": (lambda step: os.truncate(step / "__0_0.distcp", 2**40), "__0_0.distcp has 1,099,"),
    "an object": (lambda step: described(step, pickle.dumps(b"x")), ".metadata is not what"),
    "nothing": (lambda step: described(step, pickle.dumps(None)), ".metadata is not what"),
    "a memo": (lambda step: described(step, LARGE), ".metadata is not what"),
    "a length": (lambda step: placed(step, 0, 2**50), "it has no 1125899906842624 bytes"),
    "a place": (lambda step: placed(step, -1, 9), "it has no 9 bytes at -1"),
    "a dtype": (lambda step: as_before(step, {"x": DOUBLE}), "x is of complex128, which"),
}
# a tuple of one tuple twice, 40 deep: its hash, and its text, would have no end
NESTED = pickle.EMPTY_TUPLE + (pickle.BINPUT + b"\0" + pickle.BINGET + b"\0\x86") * 40
LAYOUT = b"ctorch.serialization\n_get_layout\n"
DAMAGES |= {
    f"nested: {case}": (partial(described, metadata=b"\x80\2" + data + pickle.STOP), ".metadata is")
    for case, data in {
        "a key": pickle.EMPTY_DICT + NESTED + b"N" + pickle.SETITEM,
        "keys": b"}(" + NESTED + b"N" + pickle.SETITEMS,
        "an argument": LAYOUT + NESTED + pickle.TUPLE1 + pickle.REDUCE,
        "a set": b"cbuiltins\nset\n](" + NESTED + pickle.APPENDS + pickle.TUPLE1 + pickle.REDUCE,
        "a new set": pickle.EMPTY_SET + b"(" + NESTED + pickle.ADDITEMS,
    }.items()
}
DAMAGES["nested: a shape"] = (lambda step: shaped(step), ".metadata is not what")
DOUBLE = torch.zeros(2, dtype=torch.complex128)


def shaped(step: Path) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for entry in metadata.state_dict_metadata.values():
        entry.size = pickle.loads(b"\x80\2" + NESTED + pickle.STOP)
    described(step, pickle.dumps(metadata))


def placed(step: Path, offset: int, length: int) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = offset, length
    described(step, pickle.dumps(metadata))


def test_a_damaged_one_is_told_of_and_left_and_the_others_are_converted(
    run: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(run.run_dir)
    tensors = tensors_of(folder, 6)
    for case, (harm, says) in DAMAGES.items():
        for step in (3, 6):
            as_before(checkpoint(folder, step), tensors)
        harm(checkpoint(folder, 3))
        before = (checkpoint(folder, 3) / MARKER).read_bytes()
        assert main(["convert", str(folder)]) == 1, case
        new, old = capsys.readouterr().out.splitlines()
        assert new == "step-00000006: converted" and says in old, (case, old)
        assert (checkpoint(folder, 3) / MARKER).read_bytes() == before
        assert (checkpoint(folder, 3) / ".metadata").exists(), case
