"""Checkpoints that are not what was written: named, set aside, never trained on; and never
fresh."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from support.records import numbers
from support.saved_runs import a_run, checkpoint, events, reseal, train_all
from support.saved_state import going_on, load, load_each, opened, update
from support.world import run_world
from titanlike.checkpoint import integrity, state_dict
from titanlike.checkpoint.discovery import Progress
from titanlike.checkpoint.integrity import UNEQUAL, Damage, check_all, read_tensors
from titanlike.checkpoint.reader import ShardReader
from titanlike.checkpoint.storage import CHUNKS, DAMAGED_MARKER, MARKER, DamagedCheckpoint, Storage
from titanlike.config.schema import Config
from titanlike.launch.worker import Worker


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of two ranks that was cut off after step 8, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = a_run(folder, dp=2)
    assert train_all(config) == [""]
    (folder / "events.jsonl").unlink()
    return config


def copy(config: Config, to: Path) -> Path:
    shutil.copytree(config.run_dir, to)
    return to


def flip(path: Path, position: int, bit: int = 6) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def flip_in(folder: Path, entry_name: str) -> str:
    """Flip a bit in the middle of a tensor's bytes; in which file."""
    chunk = read_tensors(Storage(folder))[entry_name].chunks[-1]
    flip(folder / str(chunk.file), chunk.begin + chunk.length // 2)
    return str(chunk.file)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "flipped at the start": lambda path: flip(path, 0),
    "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "flipped at the end": lambda path: flip(path, -1),
    "removed": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
}
FILES = [MARKER, ".metadata", "__0_0.distcp", "__1_0.distcp", "files.json", CHUNKS, "state.json"]


def test_a_damaged_file_is_named_and_an_older_checkpoint_loaded(
    saved: Config, tmp_path: Path
) -> None:
    """By all ranks, to the last bit. A start reads each byte of an intact checkpoint once."""
    damaged = set(FILES) - {MARKER, "__0_0.distcp"}
    cases = [*((name, "flipped in the middle") for name in damaged), (MARKER, "removed")]
    runs = {}
    for name, damage in [*cases, ("", "nothing"), ("", "no step 6")]:
        run_dir = copy(saved, tmp_path / f"{name} {damage}")
        if name:
            DAMAGES[damage](checkpoint(run_dir, 6) / name)
        runs[name, damage] = going_on(saved, run_dir)
    shutil.rmtree(checkpoint(Path(runs["", "no step 6"].run_dir), 6))
    of_ranks = run_world(load_each, saved, tmp_path / "ranks", list(runs.values()))
    for found in of_ranks:
        loaded = dict(zip(runs, found, strict=True))
        intact, older = loaded.pop(("", "nothing")), loaded.pop(("", "no step 6"))
        assert (intact.step, older.step) == (6, 3) and intact.state != older.state
        for case, one in loaded.items():
            assert (one.error, one.step, one.state) == ("", 3, older.state), case
    assert_each_byte_was_read_once(
        [dict(zip(runs, found, strict=True))["", "nothing"].read for found in of_ranks], saved
    )
    output = (tmp_path / "ranks" / "rank0.out").read_text()
    for name, damage in loaded:
        run_dir = tmp_path / f"{name} {damage}"
        folder, gone = checkpoint(run_dir, 6), (name, damage) == (MARKER, "removed")
        [told] = events(run_dir, "damaged") + events(run_dir, "leftover")
        assert (told["event"], told["step"]) == ("leftover" if gone else "damaged", 6), told
        assert str(folder) in told["text"] and name in told["text"], (name, damage)
        assert told["text"] in output
        assert folder.exists() != gone and (folder / DAMAGED_MARKER).exists() != gone
        assert not (folder / MARKER).exists()
        check_all(Storage(checkpoint(run_dir, 3)))


def assert_each_byte_was_read_once(of_ranks: list[dict[str, int]], saved: Config) -> None:
    folder = checkpoint(Path(saved.run_dir), 6)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    # what FSDP does not shard, each rank reads, and it is in one file
    again = sum(
        tensor.chunks[0].length
        for name, tensor in read_tensors(Storage(folder)).items()
        if len(tensor.chunks) == 1 and not name.startswith("rng.")
    )
    read = sum(counts.get(name, 0) for counts in of_ranks for name in sizes)
    assert sum(sizes.values()) <= read <= sum(sizes.values()) + again
    for name in (".metadata", CHUNKS):
        assert of_ranks[0][name] == (folder / name).stat().st_size


def test_damage_to_any_file_is_detected(saved: Config, tmp_path: Path) -> None:
    folder = checkpoint(copy(saved, tmp_path / "run"), 6)
    assert sorted(os.listdir(folder)) == sorted(FILES)
    for name in FILES:
        whole = (folder / name).read_bytes()
        for damage, harm in DAMAGES.items():
            harm(folder / name)
            with pytest.raises(DamagedCheckpoint) as found:
                check_all(Storage(folder))
            assert str(folder) in str(found.value) and name in str(found.value), (name, damage)
            (folder / name).write_bytes(whole)
    check_all(Storage(folder))


def rewritten(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Changes state.json, files.json or .metadata so that no checksum tells."""

    def harm(folder: Path) -> None:
        module: Any = pickle if name == ".metadata" else json
        content = module.loads((folder / name).read_bytes())
        change(content)
        text = module.dumps(content)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        if name == "files.json":
            (folder / MARKER).write_text(integrity.checksum((folder / name).read_bytes()))
        else:
            reseal(folder)

    return harm


def irregular(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").mkdir()


HEAD = "model.lm_head.weight"


def unplaced(metadata: Any) -> None:
    del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == HEAD)]


def narrow(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata[HEAD].chunks[0]
    chunk.sizes = torch.Size([2 * chunk.sizes[0], chunk.sizes[1] // 2])


def cut_while_it_is_read(folder: Path) -> None:
    rows = ShardReader.open("RUN", str(folder)).rows(HEAD, 1024)
    next(rows)
    chunk = read_tensors(Storage(folder))[HEAD].chunks[0]
    os.truncate(folder / str(chunk.file), chunk.begin + chunk.length // 2)
    deque(rows, maxlen=0)


def no_tensor(folder: Path) -> None:
    chunk = read_tensors(Storage(folder))[HEAD].chunks[0]
    with open(folder / str(chunk.file), "r+b") as file:
        file.seek(chunk.begin)
        file.write(bytes(chunk.length))
    reseal(folder)


REASONS: dict[Damage, Callable[[Path], object]] = {
    Damage.MISSING: lambda folder: (folder / "state.json").unlink(),
    Damage.IRREGULAR: irregular,
    Damage.SIZE: lambda folder: cut(folder / "__0_0.distcp"),
    Damage.CHECKSUM: lambda folder: flip_in(folder, HEAD),
    Damage.FORM: rewritten("files.json", lambda files: files.update(a=[1])),
    Damage.UNREADABLE: rewritten(".metadata", lambda metadata: vars(metadata).clear()),
    Damage.UNLISTED: rewritten("files.json", lambda files: files.pop(".metadata")),
    Damage.OUTSIDE: rewritten("files.json", lambda files: files.update({"../a": [1, ""]})),
    Damage.LACKS: rewritten("state.json", lambda state: state.pop("same")),
    Damage.TYPE: rewritten("state.json", lambda state: state.update(step="6")),
    Damage.STEP: rewritten("state.json", lambda state: state.update(step=7)),
    Damage.VALUES: rewritten(
        ".metadata", lambda metadata: metadata.state_dict_metadata[HEAD].chunks.pop()
    ),
    Damage.NO_PLACE: rewritten(".metadata", unplaced),
    Damage.SHAPES: rewritten(".metadata", narrow),
    Damage.SHORT: cut_while_it_is_read,
    Damage.RECORD: no_tensor,
}


def test_every_reason_for_an_incomplete_checkpoint_is_tested(saved: Config, tmp_path: Path) -> None:
    assert {*REASONS} == {*Damage}
    for damage, harm in REASONS.items():
        folder = checkpoint(copy(saved, tmp_path / damage.name), 6)
        with pytest.raises(DamagedCheckpoint) as found:
            harm(folder)
            check_all(Storage(folder))
            reader = ShardReader.open("RUN", str(folder))
            deque(reader.rows(HEAD, 1024), maxlen=0)
        said = re.sub(r"\\\{.*?\\\}", ".*", re.escape(damage))
        assert re.fullmatch(said, found.value.reason), (damage, found.value.reason)
        if damage in (Damage.SHAPES, Damage.RECORD):
            with pytest.raises(DamagedCheckpoint, match=said):
                reader.whole(HEAD)


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_flipped_bit_is_detected(saved: Config, data: st.DataObject) -> None:
    folder = checkpoint(Path(saved.run_dir), 6)
    path = folder / data.draw(st.sampled_from(FILES))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    marker = (folder / MARKER).read_text().split()
    flip(path, position, bit)
    try:
        if path.name == MARKER and path.read_text(errors="replace").split() == marker:
            return  # a newline became another blank
        with pytest.raises(DamagedCheckpoint, match=path.name):
            check_all(Storage(folder))
    finally:
        flip(path, position, bit)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_and_can_be_restored(
    saved: Config, tmp_path: Path
) -> None:
    """A run that takes the older one has the losses of the uninterrupted run, to the last bit."""
    run_dir = copy(saved, tmp_path / "run")
    folder, truth = checkpoint(run_dir, 6), numbers(run_dir)
    file = folder / flip_in(folder, "model.lm_head.weight")
    kept = file.read_bytes()
    short = replace(saved, steps=5)  # so that step 6 is not saved again
    assert train_all(going_on(short, run_dir)) == [""]
    assert numbers(run_dir) == truth[:5]
    assert not (folder / MARKER).exists() and file.read_bytes() == kept
    assert f"{file.name} does not match the checksum" in (folder / DAMAGED_MARKER).read_text()
    assert flip_in(folder, "model.lm_head.weight") == file.name
    (folder / DAMAGED_MARKER).rename(folder / MARKER)
    one = replace(going_on(saved, run_dir), dp=1)
    [[loaded]] = run_world(load_each, one, tmp_path / "one", [one])
    assert loaded.step == 6


def test_a_run_whose_checkpoints_are_all_damaged_does_not_restart_at_step_1(
    saved: Config, tmp_path: Path
) -> None:
    run_dir = copy(saved, tmp_path / "run")
    config = replace(going_on(saved, run_dir), dp=1)
    kept = (run_dir / "metrics.jsonl").read_bytes()
    flip_in(checkpoint(run_dir, 3), "model.lm_head.weight")
    cut(checkpoint(run_dir, 6) / "__1_0.distcp")
    for error in train_all(config, config):  # the same the next time, when both are marked
        assert "no complete checkpoint is left" in error and "step-00000003" in error
        assert "step-00000006" in error and "--repair" in error
        assert "step 0" not in error  # the run is there: no advice to begin another
    assert (run_dir / "metrics.jsonl").read_bytes() == kept


def test_damage_is_detected_when_another_layout_loads(saved: Config, tmp_path: Path) -> None:
    """Also in what no rank of it loads; and in checkpoints of an older version, which have no
    checksums of pieces, and a step count of each parameter."""
    one = replace(saved, dp=1)
    damaged = ["rng.1.cpu", "optimizer.state.lm_head.weight.exp_avg"]
    runs = [going_on(one, copy(saved, tmp_path / name)) for name in ("intact", *damaged)]
    for name in damaged:
        flip_in(checkpoint(tmp_path / name, 6), name)
    old, found = run_world(load_old_ones, one, tmp_path / "old", runs)[0]
    assert [each.step for each in found] == [6, 3, 3]
    assert found[1].state == found[2].state != found[0].state
    assert [each.step for each in old] == [6, 3] and not any(each.error for each in old)


def load_old_ones(config: Config, worker: Worker, runs: list[Config]) -> Any:
    """What is loaded of checkpoints of an older version, whole and damaged; and of `runs`."""
    run, of_run = opened(config, worker)
    shared = state_dict.share_step
    state_dict.share_step = lambda tensors, group: tensors
    for step in (3, 6):
        of_run.save(Progress(step=step))
        update(run)
        reseal(checkpoint(worker.run_dir, step))  # without checksums of pieces
    state_dict.share_step = shared
    entries = read_tensors(Storage(checkpoint(worker.run_dir, 6)))
    own = "optimizer.state.lm_head.weight.step"
    assert own in entries and state_dict.SHARED_STEP not in entries
    again = copy(config, worker.run_dir.parent / "old and damaged")
    flip_in(checkpoint(again, 6), own)
    old = [load(run, going_on(config, folder), 1) for folder in (worker.run_dir, again)]
    return old, [load(run, one, 1) for one in runs]


def test_sizes_are_checked_by_one_listing() -> None:
    """Also on a URL, where each question is a request."""
    folder = Storage("memory://listing/step-00000001")
    files = {f"__{rank}_0.distcp": (rank, "") for rank in range(100)}
    for name, (size, _) in files.items():
        folder.write(name, bytes(size))
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
        with pytest.raises(DamagedCheckpoint, match=next(iter(change))):
            integrity.check_sizes(folder, files | change)


# --- checkpoints that somebody planted ------------------------------------------------------------


class Runs:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def plant(folder: Path, trace: Path, way: str) -> None:
    """Harm a checkpoint so that its code would create the file `trace`."""
    code, file = Runs(exec, f"open({str(trace)!r}, 'w').close()"), folder / ".metadata"
    metadata: Any = pickle.loads(file.read_bytes())
    # of a parameter that every rank loads
    index = next(i for i in metadata.storage_data if i.fqn == "model.model.norm.weight")
    info = metadata.storage_data[index]
    path = folder / info.relative_path
    if way == "a command":
        metadata = Runs(os.system, f"touch '{trace}'")
    elif way == "deep inside":
        metadata.planner_data = {"model.model.norm.weight": Runs(list, [code])}
    elif way == "a file elsewhere":
        metadata.storage_data[index] = replace(info, relative_path="../../outside")
    else:
        stream = io.BytesIO()
        torch.save(code, stream)
        data = stream.getvalue() if way == "a tensor's pickle" else pickle.dumps(code)
        place = {"offset": path.stat().st_size, "length": len(data)}
        path.write_bytes(path.read_bytes() + data)
        metadata.storage_data[index] = replace(info, **place)
        if way == "no tensor":  # DCP loads such an entry with pickle
            metadata.storage_data[MetadataIndex(index.fqn)] = metadata.storage_data[index]
            metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    file.write_bytes(pickle.dumps(metadata))


SAYS = {
    "a command": "asks for posix.system",
    "deep inside": "asks for builtins.exec",
    "no tensor": "it has no tensor model.model.norm.weight",
    "a tensor's pickle": "has no tensor at byte",
    "a file elsewhere": "names a file outside the folder, '../../outside'",
}


def test_a_damaged_checkpoint_given_by_path_is_refused_and_runs_no_code(
    saved: Config, tmp_path: Path
) -> None:
    """Damaged; or planted, with checksums that are right, for whoever plants it can compute them,
    too. It is another run's, and left as it is."""
    trace, one = tmp_path / "trace", replace(saved, dp=1)
    expected: list[tuple[str, Path, Config]] = []
    damaged = {name: name for name in FILES if name != MARKER}
    for case, says in {**damaged, **SAYS, "model.model.norm.weight": UNEQUAL}.items():
        folder = checkpoint(copy(saved, tmp_path / case), 6)
        if case in SAYS:
            plant(folder, trace, case)
            reseal(folder)
            check_all(Storage(folder))
        elif case in damaged:
            DAMAGES["flipped in the middle"](folder / case)
        else:
            flip_in(folder, case)
        for key in ("resume", "start_from")[: 2 - (case in damaged)]:
            new = going_on(one, tmp_path / "new" / f"{key} {case}", **{key: str(folder)})
            absent = (key, case) == ("start_from", "no tensor")  # it is not among the tensors
            expected.append(("model.norm.weight" if absent else says, folder, new))
    found = run_world(load_each, one, tmp_path / "ranks", [config for *_, config in expected])[0]
    for (says, folder, config), loaded in zip(expected, found, strict=True):
        assert says in loaded.error and str(folder) in loaded.error, (config.run_dir, loaded)
        assert (folder / MARKER).exists() and not (folder / DAMAGED_MARKER).exists(), folder
    assert not trace.exists()
