"""Checkpoints that are not what was written: named, set aside, never trained on; and never fresh."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from support.cells import slow
from support.saved_runs import (
    a_run,
    checkpoint,
    events,
    numbers,
    reseal,
    train_all,
)
from support.world import RankError
from titanlike.checkpoint.discovery import committed
from titanlike.checkpoint.integrity import DAMAGED_MARKER, MARKER, DamagedCheckpoint, check_all
from titanlike.checkpoint.storage import Storage
from titanlike.config.schema import Config

LAYOUTS = {"one": (1, 1), "pp2": (2, 1), "dp2": (1, 2)}


@pytest.fixture(scope="module", params=["one", *slow("pp2", "dp2")])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that was cut off after step 8, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "")) / "run"
    config = a_run(folder, *LAYOUTS[request.param])
    assert train_all(config) == [""]
    assert len(numbers(folder)) == 8
    return config


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = a_run(folder)
    assert train_all(config) == [""]
    return config


def copy(config: Config, to: Path) -> Path:
    shutil.copytree(config.run_dir, to)
    return to


def going_on(config: Config, run_dir: Path, **checkpoint: Any) -> Config:
    settings = replace(config.checkpoint, **checkpoint)
    return replace(config, run_dir=str(run_dir), checkpoint=settings)


def flip(path: Path, position: int, bit: int = 6) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


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


def cases(folder: Path) -> list[tuple[str, str]]:
    """(file, damage): each of one file, and of the others what differs from file to file."""
    names = sorted(path.name for path in folder.iterdir())
    assert {MARKER, ".metadata", "files.json", "state.json", "__0_0.distcp"} <= {*names}
    return [(name, damage) for name in names for damage in DAMAGES]


def test_a_damaged_file_is_named_and_the_next_older_checkpoint_is_taken(
    saved: Config, tmp_path: Path
) -> None:
    """With the uninterrupted run's numbers to the end, bitwise. Each file, and each damage once."""
    every = cases(checkpoint(Path(saved.run_dir), 6))
    if saved.world_size > 1:
        chosen = [case for case in every if case[1] == "flipped in the middle"]
        chosen += [("__1_0.distcp", "removed")]
    else:
        files, kinds = sorted({name for name, _ in every} - {MARKER}), list(DAMAGES)
        most = range(max(len(files), len(kinds)))
        chosen = [(files[i % len(files)], kinds[i % len(kinds)]) for i in most]
    assert_older_is_taken(saved, [*chosen, (MARKER, "removed")], tmp_path)


@pytest.mark.slow
def test_whatever_is_damaged_in_whatever_way_the_next_older_checkpoint_is_taken(
    one: Config, tmp_path: Path
) -> None:
    assert_older_is_taken(one, cases(checkpoint(Path(one.run_dir), 6)), tmp_path)


def assert_older_is_taken(saved: Config, chosen: list[tuple[str, str]], tmp_path: Path) -> None:
    truth = numbers(Path(saved.run_dir))
    runs = {}
    for name, damage in chosen:
        run_dir = copy(saved, tmp_path / f"{name} {damage}")
        DAMAGES[damage](checkpoint(run_dir, 6) / name)
        (run_dir / "events.jsonl").unlink()
        runs[run_dir] = name, damage
    raised = train_all(*(going_on(saved, run_dir) for run_dir in runs), folder=tmp_path)
    for (run_dir, (name, damage)), error in zip(runs.items(), raised, strict=True):
        assert error == "", (name, damage)
        folder = checkpoint(run_dir, 6)
        kind = "leftover" if (name, damage) == (MARKER, "removed") else "damaged"
        [told] = events(run_dir, "damaged") + events(run_dir, "leftover")
        assert (told["event"], told["step"]) == (kind, 6), told
        assert str(folder) in told["text"] and name in told["text"], (name, damage)
        assert [event["step"] for event in events(run_dir, "resume")] == [3], (name, damage)
        assert numbers(run_dir) == truth, (name, damage)
        for path in committed(Storage(run_dir / "checkpoints")):
            check_all(path)
        assert sorted(os.listdir(run_dir / "checkpoints")) == ["step-00000003", "step-00000006"]
    output = (tmp_path / "rank0.out").read_text()
    assert output.count("is damaged") == len(runs) - 1
    assert output.count("its save was not completed") == 1


def test_a_damaged_checkpoint_is_kept_for_a_look_and_may_be_given_back(
    one: Config, tmp_path: Path
) -> None:
    run_dir = copy(one, tmp_path / "run")
    folder = checkpoint(run_dir, 6)
    tensors = next(folder.glob("*.distcp"))
    flip(tensors, 1000)
    short = replace(one, steps=5)  # so that step 6 is not saved again
    assert train_all(going_on(short, run_dir)) == [""]
    assert not (folder / MARKER).exists()
    assert f"{tensors.name} does not match the checksum" in (folder / DAMAGED_MARKER).read_text()
    flip(tensors, 1000)
    (folder / DAMAGED_MARKER).rename(folder / MARKER)
    assert train_all(going_on(one, run_dir)) == [""]
    assert [event["step"] for event in events(run_dir, "resume")] == [3, 6]


@pytest.mark.slow
def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(one: Config, tmp_path: Path) -> None:
    for name, damage in cases(checkpoint(Path(one.run_dir), 6)):
        run_dir = copy(one, tmp_path / f"{name} {damage}")
        folder = checkpoint(run_dir, 6)
        DAMAGES[damage](folder / name)
    asked = {path.name: path for path in sorted(tmp_path.iterdir())}
    runs = [
        going_on(one, tmp_path / "new" / name, resume=str(checkpoint(source, 6)))
        for name, source in asked.items()
    ]
    for (case, source), run, error in zip(asked.items(), runs, train_all(*runs), strict=True):
        name = case.split()[0]
        assert error.startswith(("ValueError", "DamagedCheckpoint")), (case, error)
        assert str(checkpoint(source, 6)) in error and name in error, case
        assert "\n" not in error
        assert not (Path(run.run_dir) / "metrics.jsonl").exists()
        # it is another run's, which may still read it
        assert (checkpoint(source, 6) / MARKER).exists() or case == f"{MARKER} removed"


@pytest.mark.parametrize("layout", [*slow("one"), "dp2"])
def test_a_run_without_a_whole_checkpoint_does_not_begin_afresh(
    layout: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = a_run(run_dir, *LAYOUTS[layout])
    train_all(config)
    kept = (run_dir / "metrics.jsonl").read_bytes()
    flip(next(checkpoint(run_dir, 3).glob("*.distcp")), 500)
    cut(next(checkpoint(run_dir, 6).glob("*.distcp")))
    for _ in range(2):  # the same the next time, when both are marked
        try:
            [error] = train_all(config)
        except RankError as other:
            error = str(other)
        assert "no complete checkpoint is left" in error and "step-00000003" in error
        assert "step-00000006" in error and "--repair" in error
        assert "step 0" not in error  # the run is there: no advice to begin another
        assert (run_dir / "metrics.jsonl").read_bytes() == kept


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_flipped_bit_is_found(one: Config, data: st.DataObject) -> None:
    folder = checkpoint(Path(one.run_dir), 6)
    path = folder / data.draw(st.sampled_from(sorted(os.listdir(folder))))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    flip(path, position, bit)
    try:
        if path.name == MARKER and path.read_text(errors="replace").split() == marker(folder):
            return  # a newline became another blank
        with pytest.raises(DamagedCheckpoint) as damage:
            check_all(Storage(folder))
        assert str(folder) in str(damage.value) and path.name in str(damage.value)
    finally:
        flip(path, position, bit)


def marker(folder: Path) -> list[str]:
    from titanlike.checkpoint.integrity import checksum

    return [checksum((folder / "files.json").read_bytes())]


# --- checkpoints that somebody planted -------------------------------------------------------


class Runs:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def planted(folder: Path, trace: Path) -> dict[str, Callable[[], None]]:
    """Ways to harm a checkpoint whose code would create the file `trace`."""
    shell, code = f"touch '{trace}'", f"open({str(trace)!r}, 'w').close()"
    described = folder / ".metadata"

    def describe(metadata: Any) -> None:
        described.write_bytes(pickle.dumps(metadata))

    def changed(change: Callable[[Any], None]) -> None:
        metadata = pickle.loads(described.read_bytes())
        change(metadata)
        describe(metadata)

    def nested(metadata: Any) -> None:
        metadata.planner_data = {"model.head.weight": Runs(list, [Runs(exec, code)])}

    def no_tensor(metadata: Any) -> None:
        """DCP loads such an entry with pickle."""
        append_pickle(metadata, pickle.dumps(Runs(exec, code)))
        index = entry(metadata)
        metadata.storage_data[MetadataIndex(index.fqn)] = metadata.storage_data[index]
        metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()

    def tensor(metadata: Any) -> None:
        stream = io.BytesIO()
        torch.save(Runs(exec, code), stream)
        append_pickle(metadata, stream.getvalue())

    def append_pickle(metadata: Any, data: bytes) -> None:
        index = entry(metadata)
        info = metadata.storage_data[index]
        path = folder / info.relative_path
        place = {"offset": path.stat().st_size, "length": len(data)}
        path.write_bytes(path.read_bytes() + data)
        metadata.storage_data[index] = replace(info, **place)

    def outside(metadata: Any) -> None:
        index = entry(metadata)
        info = metadata.storage_data[index]
        metadata.storage_data[index] = replace(info, relative_path="../../outside")

    return {
        "a command": lambda: describe(Runs(os.system, shell)),
        "eval": lambda: describe(Runs(eval, code.replace(".close()", ""))),
        "deep inside": lambda: changed(nested),
        "no tensor": lambda: changed(no_tensor),
        "a tensor's pickle": lambda: changed(tensor),
        "a file elsewhere": lambda: changed(outside),
    }


def entry(metadata: Any) -> Any:
    """The parameter that every layout loads."""
    [index] = [i for i in metadata.storage_data if i.fqn == "model.head.weight"]
    return index


SAYS = {
    "a command": "asks for posix.system",
    "eval": "asks for builtins.eval",
    "deep inside": "asks for builtins.exec",
    "no tensor": "model.head.weight is not a tensor there",
    "a tensor's pickle": "could not be read",
    "a file elsewhere": "names a file outside the folder, '../../outside'",
}


@pytest.mark.parametrize("how", ["resume", "start_from"])
def test_a_planted_checkpoint_is_refused_by_name_and_runs_nothing(
    one: Config, how: str, tmp_path: Path
) -> None:
    """Its checksums are right: whoever plants it can compute them, too."""
    trace = tmp_path / "trace"
    runs = []
    for way in SAYS:
        folder = checkpoint(copy(one, tmp_path / way), 6)
        planted(folder, trace)[way]()
        reseal(folder)
        check_all(Storage(folder))
        runs.append(going_on(one, tmp_path / "new" / way, **{how: str(folder)}))
    for (way, says), error in zip(SAYS.items(), train_all(*runs), strict=True):
        if (how, way) == ("start_from", "no tensor"):
            says = "head.weight"  # not among the tensors that are there
        assert says in error and str(checkpoint(tmp_path / way, 6)) in error, (way, error)
        assert "\n" not in error, way
    assert not trace.exists()


def test_the_planted_checkpoints_would_run_code_in_plain_torch(one: Config, tmp_path: Path) -> None:
    """What the test above tries is real: DCP's own reader runs it."""
    import torch.distributed.checkpoint as dcp

    for way in ("a command", "eval", "deep inside", "no tensor"):
        trace = tmp_path / f"trace {way}"
        folder = checkpoint(copy(one, tmp_path / way), 6)
        planted(folder, trace)[way]()
        try:
            dcp.load({"model.head.weight": object()}, checkpoint_id=str(folder), no_dist=True)
        except BaseException as error:  # CheckpointException is one
            assert isinstance(error, (Exception, dcp.api.CheckpointException))
        assert trace.exists(), way


def test_what_no_program_wrote_is_one_line_too(one: Config, tmp_path: Path) -> None:
    """Consistent checksums over nonsense."""
    nonsense = {"state.json": ["[]", "{}", "no JSON"], ".metadata": ["", "nonsense", "\x80\x04N."]}
    runs = []
    for name, texts in nonsense.items():
        for number, text in enumerate(texts):
            folder = checkpoint(copy(one, tmp_path / f"{name} {number}"), 6)
            (folder / name).write_bytes(text.encode("latin-1"))
            reseal(folder)
            new = tmp_path / "new" / f"{name} {number}"
            runs.append(going_on(one, new, resume=str(folder)))
    for run, error in zip(runs, train_all(*runs), strict=True):
        name = Path(run.run_dir).name.split()[0]
        assert run.checkpoint.resume in error and name in error and "\n" not in error, error
