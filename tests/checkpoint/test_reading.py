"""Tensors of a checkpoint are read into their own memory, and damage in any byte of them is found."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from support.models import tiny
from support.world import run_world
from titanlike.core.checkpoint import integrity, reader, storage
from titanlike.core.checkpoint.format import WORDS, Index, SavedTensor, checksum
from titanlike.core.checkpoint.integrity import CheckpointHeader, check_all, commit, open_header
from titanlike.core.checkpoint.reader import ShardReader, read
from titanlike.core.checkpoint.staging import write_pieces
from titanlike.core.checkpoint.storage import INDEX, MARKER, DamagedCheckpoint, Storage
from titanlike.core.checkpoint.writer import _keys, assign, prepare_save, write_checkpoint
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import Blocks
from titanlike.core.launch.watchdog import MOVING, Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.training.loop import train

ROWS, COLUMNS = 768, 1000
VALUES = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


@pytest.fixture
def header(tmp_path: Path) -> CheckpointHeader:
    """A tensor of 3 MB that two ranks have written, each its rows."""
    folder, saved = (
        Storage(tmp_path / "step-00000001"),
        SavedTensor("w", "float32", (ROWS, COLUMNS)),
    )
    folder.make()
    files = []
    for rank, half in enumerate(VALUES.chunk(2)):
        files += write_pieces(folder, rank, [(saved, (rank * ROWS // 2, 0), half)])
    state = {"step": 1, "progress": {}, "val_loss": None, "same": {}}
    commit(folder, files, state)
    return open_header(folder)


def own_memory(header: CheckpointHeader, target: Blocks) -> float:
    """Read a tensor; the share of the bytes that came into its own memory from the file."""
    held, counts = target.held, {True: 0, False: 0}
    original = storage.open_regular

    class Watched:
        def __init__(self, path: str) -> None:
            self.file = original(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def readinto(self, buffer: Any) -> int:
            size = self.file.readinto(buffer)
            at = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
            begin = held.untyped_storage().data_ptr()
            counts[begin <= at < begin + held.untyped_storage().nbytes()] += size
            return size

    with mock.patch.object(storage, "open_regular", Watched):
        read(header, {"w": target}, None)
    return counts[True] / (counts[True] + counts[False])


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "share"),
    [
        (slice(0, ROWS), slice(0, COLUMNS), torch.float32, 1.0),
        (slice(100, 650), slice(0, COLUMNS), torch.float32, 0.5),
        (slice(0, ROWS), slice(250, 750), torch.float32, 0.0),
        (slice(0, ROWS), slice(0, COLUMNS), torch.bfloat16, 0.0),
    ],
    ids=["as it was saved", "other rows", "columns", "another dtype"],
)
def test_a_contiguous_shard_is_read_directly_into_its_tensor(
    header: CheckpointHeader, rows: slice, columns: slice, dtype: torch.dtype, share: float
) -> None:
    """In one pass over the bytes, whose checksum is computed on the way."""
    wanted = VALUES[rows, columns].to(dtype)
    held = torch.full_like(wanted, -1)
    block = {(rows.start, columns.start): held}
    assert own_memory(header, Blocks(held, VALUES.shape, block)) == pytest.approx(share, abs=0.01)
    assert torch.equal(held, wanted)


def test_a_shard_reads_the_parts_that_it_needs(header: CheckpointHeader) -> None:
    """Of about a MiB each, with a checksum of their own."""
    counts = []
    original = storage.Storage.reader

    @contextlib.contextmanager
    def counted(self: Storage, name: str) -> Iterator[Any]:
        with original(self, name) as read_into:

            def read_some(begin: int, buffer: Any) -> int:
                counts.append(len(buffer))
                return read_into(begin, buffer)

            yield read_some

    held = torch.zeros(50, COLUMNS)
    with mock.patch.object(storage.Storage, "reader", counted):
        read(header, {"w": Blocks(held, VALUES.shape, {(400, 0): held})}, None)
    assert torch.equal(held, VALUES[400:450])
    assert sum(counts) == 262 * 4 * COLUMNS, "of 1.5 MB, one MiB in rows"


@pytest.mark.parametrize("url", ["memory://parts/step", ""])
def test_each_part_that_is_read_or_written_counts_as_progress(url: str, tmp_path: Path) -> None:
    """Also of an object store, where a piece of gigabytes is not one request."""
    folder, saved = Storage(url or str(tmp_path)), SavedTensor("w", "float32", VALUES.shape)
    folder.make()
    files = write_pieces(folder, 0, [(saved, (0, 0), VALUES)])
    assert folder.moved.count >= 3, "a MiB each"
    commit(folder, files, {"step": 1, "progress": {}, "val_loss": None, "same": {}})
    header, begin = open_header(folder), folder.moved.count
    with mock.patch.object(reader, "_AT_ONCE", 2**20):
        held = torch.zeros_like(VALUES)
        read(header, {"w": held}, None)
    assert torch.equal(held, VALUES)
    assert 3 <= folder.moved.count - begin <= 4
    begin = folder.moved.count
    check_all(folder)
    assert folder.moved.count - begin >= 3


def parts_counted(config: Config, worker: Worker) -> int:
    """A run; the parts of its checkpoints that the watchdog was told of."""
    told: list[tuple[Any, Any]] = []
    with mock.patch.object(Watchdog, "watch_steps", lambda _, *steps: told.append(steps)):
        train(config, worker)
    [count] = [count for count, phases in told if phases == MOVING]
    return count()


def test_the_watchdog_is_told_of_what_a_run_saves_resumes_and_starts_from(tmp_path: Path) -> None:
    saves = tiny(layers=1, steps=1, checkpoint=Checkpoint(every=0, last=True))
    start = Checkpoint(every=0, last=False, start_from=str(tmp_path / "run"))
    runs = [("run", saves), ("run", saves), ("started", replace(saves, checkpoint=start))]
    parts = [run_world(parts_counted, config, tmp_path / name)[0] for name, config in runs]
    assert all(count > 10 for count in parts), parts


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((1, 2**20 + 5), 5), ((3, 2**19), 6), ((2, 1, 3, 2**18 + 1), 12), ((2**19, 2), 4), ((), 1)],
)
def test_a_row_longer_than_a_checksums_bytes_has_several(
    shape: tuple[int, ...], parts: int, tmp_path: Path
) -> None:
    """Of an expert's matrix, or of all weights in one row: a byte is found in its MiB."""
    values = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    folder, saved = Storage(tmp_path / "step-00000001"), SavedTensor("w", "float32", shape)
    folder.make()
    state = {"step": 1, "progress": {}, "val_loss": None, "same": {}}
    commit(folder, write_pieces(folder, 0, [(saved, (0,) * len(shape), values)]), state)
    header = open_header(folder)
    [piece] = header.pieces()["w"]
    assert [part.bytes <= 2**20 for part in piece.parts()] == [True] * parts
    assert len(piece.sums) == 16 * parts
    held = torch.zeros_like(values)
    read(header, {"w": held}, None)
    assert torch.equal(held, values)
    if len(shape) > 1:  # a shard of the last dimension
        half = values[..., 1000:3000].contiguous()
        block = torch.zeros_like(half)
        at = (*[0] * (len(shape) - 1), 1000)
        read(header, {"w": Blocks(block, values.shape, {at: block})}, None)
        assert torch.equal(block, half)
    assert not piece._replace(sums=piece.sums + "0" * 16).has_all_sums


def test_an_index_of_more_than_its_files_need_is_refused_before_it_is_parsed(
    tmp_path: Path,
) -> None:
    folder, saved = Storage(tmp_path), SavedTensor("w", "float32", (2,))
    files = write_pieces(folder, 0, [(saved, (0,), torch.ones(2))])
    commit(folder, files, {"step": 1, "progress": {}, "val_loss": None, "same": {}})
    more = "".join(f' "{n}": ["F32", [0]],\n' for n in range(100_000)).encode()
    text = folder.read(INDEX).replace(b'"tensors": {\n', b'"tensors": {\n' + more)
    folder.write(INDEX, text)
    folder.write(MARKER, checksum(text).encode() + b"\n")
    with (
        mock.patch.object(integrity, "parse_index", side_effect=AssertionError("it is parsed")),
        pytest.raises(DamagedCheckpoint, match=r"index.json has more than 1,[01]\d\d,\d{3} bytes"),
    ):
        open_header(folder)


def test_damage_in_any_byte_of_a_large_tensor_is_detected(header: CheckpointHeader) -> None:
    """In the first and last values, and where the file ends early."""
    piece = header.pieces()["w"][1]
    path = Path(str(header.folder)) / piece.file
    whole, end = path.read_bytes(), piece.begin + piece.bytes
    assert end == len(whole)
    for place in (piece.begin, piece.begin + 2**20, (piece.begin + end) // 2, end - 1, None):
        damaged = bytearray(whole)
        if place is None:
            damaged = damaged[: end - 1000]
        else:
            damaged[place] ^= 64
        path.write_bytes(damaged)
        says = "ends too early" if place is None else "does not match the checksum"
        with pytest.raises(DamagedCheckpoint, match=says):
            read(header, {"w": torch.zeros_like(VALUES)}, None)
        with pytest.raises(DamagedCheckpoint, match=says):
            deque(ShardReader(header).rows("w", 2**16), maxlen=0)


DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
NONE_OF_SAFETENSORS = (
    "complex128 complex32 float4 float8_e8m0fnu bits bcomplex qint quint int1 int2 "
)
NONE_OF_SAFETENSORS += "int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"


def test_every_dtype_is_saved_and_loaded_or_refused(tmp_path: Path) -> None:
    """Scalars, too, and tensors without elements."""
    tensors, refused = dict[str, Any](), set()
    for dtype in {*DTYPES}:
        name = str(dtype).removeprefix("torch.")
        if name not in WORDS:
            refused.add(name)
            with pytest.raises(ValueError, match=f"a is of {name}, which safetensors cannot hold"):
                prepare_save({"a": torch.empty(0, dtype=dtype)})
            continue
        values = torch.arange(6).to(dtype)
        tensors |= {
            name: values.view(2, 3),
            f"{name}.scalar": values[1],
            f"{name}.none": values[:0],
        }
    tensors["conjugated"] = torch.tensor([1 + 2j]).conj()
    for name in ("a\nb", "a" * 1001):
        with pytest.raises(ValueError, match="has a name that cannot be saved"):
            prepare_save({name: torch.zeros(1)})
    odd = NONE_OF_SAFETENSORS.split()
    assert all(any(name.startswith(one) for one in odd) for name in refused), refused
    folder = Storage(tmp_path / "step-00000001")
    state = {"step": 1, "progress": {}, "val_loss": None, "same": {}}
    write_checkpoint(folder, state, prepare_save(tensors), None)
    reader = ShardReader(open_header(folder))
    large = replace(reader.header, tensors={"a": SavedTensor("a", "uint8", (2**60,))})
    with pytest.raises(ValueError, match="a: .*alloc"):
        ShardReader.whole(mock.Mock(header=large), "a")
    for name, tensor in tensors.items():
        found = reader.whole(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert found.view(-1).tolist() == tensor.reshape(-1).tolist(), name


def test_many_pieces_are_a_partition_or_refused() -> None:
    """Blocks of a cube, in seconds; one that is moved is in another."""
    places = [(x, y, z) for z in range(0, 30, 3) for x in range(0, 200, 2) for y in range(20)]
    pieces = [["w", 6 * n, at, (2, 1, 3), "0" * 16] for n, at in enumerate(places)]
    for moved in (False, True):
        pieces[7][2] = pieces[8][2] if moved else pieces[7][2]
        text = f'"rank-00000.safetensors": {json.dumps(pieces)}'.encode()
        files = {"rank-00000.safetensors": (120_000, (0, ""))}
        index = Index((0, ""), {"w": SavedTensor("w", "uint8", (200, 20, 30))}, files, text)
        with (
            pytest.raises(ValueError, match="w that overlap") if moved else contextlib.nullcontext()
        ):
            assert len(index.pieces()["w"]) == 20_000
    with pytest.raises(ValueError, match="the pieces of rank-00000.safetensors twice"):
        replace(index, text=text + b"\n" + text).pieces([])


def test_pieces_of_several_ranks_are_spread(tmp_path: Path) -> None:
    """Each once; in little time and without the others' names for thousands of pieces."""
    shared = {("a", (n, 0)): torch.zeros(n % 7 + 1) for n in range(100)}
    of_ranks = [{(f"own {rank}", (0,)): torch.zeros(rank), **shared} for rank in range(8)]
    writes = assign([_keys(blocks) for blocks in of_ranks])
    written = [
        (place, block.nbytes, rank)
        for rank, blocks in enumerate(of_ranks)
        for (place, block), mine in zip(blocks.items(), writes[rank], strict=True)
        if mine
    ]
    assert len(written) == len({place for place, *_ in written}) == 108
    loads = [sum(size for _, size, rank in written if rank == one) for one in range(8)]
    assert max(loads) - min(loads) <= 28
