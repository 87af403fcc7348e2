"""A start reads each byte once, and finds what is wrong while it loads; also in another layout, and
in checkpoints of an older version."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from support.cells import slow
from support.saved_runs import a_run, checkpoint, events, numbers, reseal, train_all, train_each
from support.world import run_world
from titanlike.checkpoint import checkpointer, integrity, state_dict, storage
from titanlike.checkpoint.piece_sums import PIECES
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import read_entries
from titanlike.config.schema import Config
from titanlike.launch.worker import Worker


def train_and_count(config: Config, worker: Worker) -> dict[str, int]:
    """Bytes that this rank reads from each file of the checkpoint of step 6, once the run begins."""
    counts: dict[str, int] = {}
    original = storage.open_regular

    class Counted(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            name = Path(self.name).name
            counts[name] = counts.get(name, 0) + len(data)
            return data

    def counted(path: str, *args: Any) -> Any:
        file = original(path, *args)
        return Counted(file.detach()) if "step-00000006" in str(path) else file

    storage.open_regular = counted
    assert train_each(config, worker, [config]) == [""]
    return counts


@pytest.mark.parametrize("layout", ["dp2", *slow("one", "pp2")])
def test_each_byte_of_a_tensor_is_read_once(layout: str, tmp_path: Path) -> None:
    config = a_run(tmp_path / "run", *{"one": (1, 1), "pp2": (2, 1), "dp2": (1, 2)}[layout])
    assert train_all(config) == [""]
    folder = checkpoint(tmp_path / "run", 6)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    of_ranks = run_world(train_and_count, config, tmp_path / "run")
    # what is not sharded (the small vectors of FSDP are) is in one file, and every rank of a stage
    # needs it; every rank of all stages needs the count of steps
    lengths = {
        entry.name: entry.shards[0].length
        for entry in read_entries(Storage(folder))
        if len(entry.shards) == 1 and not entry.name.startswith("rng.")
    }
    again = (config.dp - 1) * sum(lengths.values()) + (config.pp - 1) * lengths[
        state_dict.SHARED_STEP
    ]
    read = sum(counts.get(name, 0) for counts in of_ranks for name in sizes)
    assert sum(sizes.values()) <= read <= sum(sizes.values()) + again
    for name in (".metadata", PIECES):
        assert of_ranks[0][name] == (folder / name).stat().st_size


def flip_in(folder: Path, entry_name: str) -> None:
    """A bit in the middle of an entry's bytes."""
    [entry] = [e for e in read_entries(Storage(folder)) if e.name == entry_name]
    shard = entry.shards[-1]
    path = folder / str(shard.file)
    data = bytearray(path.read_bytes())
    data[shard.begin + shard.length // 2] ^= 1
    path.write_bytes(data)


KINDS = ("model.head.weight", "optimizer.state.head.weight.exp_avg", "rng.0.cpu")


@pytest.mark.slow
def test_damage_is_found_while_another_layout_loads(tmp_path: Path) -> None:
    """Also in what no rank of it loads; and nothing of the damaged checkpoint is trained on."""
    source = a_run(tmp_path / "source")
    assert train_all(source) == [""]
    truth = a_run(tmp_path / "truth", 1, 2)
    damaged = {}
    for kind in KINDS:
        run_dir = copied(source, tmp_path / kind)
        flip_in(checkpoint(run_dir, 6), kind)
        damaged[kind] = replace(truth, run_dir=str(run_dir))
    expected = replace(truth, run_dir=str(copied(source, tmp_path / "expected")))
    (checkpoint(Path(expected.run_dir), 6) / "COMMITTED").unlink()
    assert train_all(expected, *damaged.values(), folder=tmp_path) == [""] * (1 + len(KINDS))
    for kind, config in damaged.items():
        run_dir = Path(config.run_dir)
        told = events(run_dir, "damaged")
        assert [event["step"] for event in told] == [6], kind
        assert "__0_0.distcp does not match the checksum that was written" in told[0]["text"]
        assert [event["step"] for event in events(run_dir, "resume")] == [3], kind
        assert numbers(run_dir) == numbers(Path(expected.run_dir)), kind


def copied(config: Config, to: Path) -> Path:
    shutil.copytree(config.run_dir, to)
    (to / "events.jsonl").unlink()
    return to


def train_as_before(config: Config, worker: Worker) -> list[str]:
    """By a version that wrote a step count for each parameter."""
    checkpointer.state_dict.share_step = lambda tensors, group: tensors
    return train_each(config, worker, [config])


def test_a_checkpoint_of_an_older_version_loads_and_its_damage_is_found(tmp_path: Path) -> None:
    """Without checksums of pieces, and with a step count of each parameter."""
    config = a_run(tmp_path / "run")
    assert run_world(train_as_before, config, tmp_path / "run") == [[""]]
    for step in (3, 6):
        reseal(checkpoint(tmp_path / "run", step))
    names = [entry.name for entry in read_entries(Storage(checkpoint(tmp_path / "run", 6)))]
    assert "optimizer.state.head.weight.step" in names and state_dict.SHARED_STEP not in names
    truth = numbers(tmp_path / "run")
    damaged = replace(config, run_dir=str(copied(config, tmp_path / "damaged")))
    flip_in(checkpoint(tmp_path / "damaged", 6), "optimizer.state.head.weight.step")
    (tmp_path / "run" / "events.jsonl").unlink()
    assert train_all(config, damaged) == ["", ""]
    assert [event["step"] for event in events(tmp_path / "run", "resume")] == [6]
    assert [event["step"] for event in events(tmp_path / "damaged", "resume")] == [3]
    assert numbers(tmp_path / "run") == truth == numbers(tmp_path / "damaged")


def test_sizes_are_checked_by_one_listing(tmp_path: Path) -> None:
    """Also on a URL, where each question is a request."""
    folder = Storage("memory://listing/step-00000001")
    files = {}
    for rank in range(100):
        folder.write(f"__{rank}_0.distcp", bytes(rank))
        files[f"__{rank}_0.distcp"] = (rank, "")
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ls", "info", "exists"):
            original = getattr(MemoryFileSystem, name)

            def counted(self: Any, *args: Any, of: Any = original, **options: Any) -> Any:
                asked.append(of.__name__)
                return of(self, *args, **options)

            patch.setattr(MemoryFileSystem, name, counted)
        integrity.check_sizes(folder, files)
    assert asked == ["ls"]
    for change in ({"__7_0.distcp": (8, "")}, {"absent": (0, "")}):
        with pytest.raises(integrity.DamagedCheckpoint, match=next(iter(change))):
            integrity.check_sizes(folder, files | change)
