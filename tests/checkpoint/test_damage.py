"""Checkpoints that are not what was written: named, set aside, never trained on."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
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

from support.records import numbers
from support.saved_runs import a_run, checkpoint, events, flip, reseal, train_all
from support.saved_state import going_on, load_each
from support.world import run_world
from titanlike.core.checkpoint import integrity
from titanlike.core.checkpoint.format import Index, Piece, checksum
from titanlike.core.checkpoint.integrity import UNEQUAL, Damage, check_all, open_header, read_index
from titanlike.core.checkpoint.reader import ShardReader, read
from titanlike.core.checkpoint.storage import (
    DAMAGED_MARKER,
    INDEX,
    MARKER,
    STATE,
    DamagedCheckpoint,
    Storage,
)
from titanlike.core.config.schema import Config
from titanlike.use.checkpoint_commands import main


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


def flip_in(folder: Path, entry_name: str) -> str:
    """Flip a bit in the middle of a tensor's bytes; in which file."""
    piece = pieces_of(folder, entry_name)[-1]
    flip(folder / piece.file, piece.begin + piece.bytes // 2)
    return piece.file


def pieces_of(folder: Path, name: str) -> list[Piece]:
    return open_header(Storage(folder)).pieces([name])[name]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "flipped at the start": lambda path: flip(path, 0),
    "flipped in the middle": flip,
    "flipped at the end": lambda path: flip(path, -1),
    "removed": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
}
FILES = [MARKER, INDEX, "rank-00000.safetensors", "rank-00001.safetensors", STATE]


def test_a_damaged_file_is_named_and_an_older_checkpoint_loaded(
    saved: Config, tmp_path: Path
) -> None:
    """By all ranks, to the last bit. A start reads each byte of an intact checkpoint once."""
    damaged = set(FILES) - {MARKER, "rank-00000.safetensors"}
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
    """But headers, which no rank needs."""
    folder = checkpoint(Path(saved.run_dir), 6)
    index = read_index(Storage(folder))
    sizes = sum(size - header for size, (header, _) in index.files.values())
    # what FSDP does not shard, each rank reads, and it is in one file
    again = sum(
        pieces[0].bytes
        for name, pieces in index.pieces().items()
        if len(pieces) == 1 and not name.startswith("rng.")
    )
    read = sum(counts.get(name, 0) for counts in of_ranks for name in index.files)
    assert sizes <= read <= sizes + again
    whole = (folder / INDEX).stat().st_size
    assert of_ranks[0][INDEX] == 2 * whole and INDEX not in of_ranks[1], "selected, then read"


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


def of_state(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Changes state.json so that no checksum tells."""

    def harm(folder: Path) -> None:
        content = json.loads((folder / STATE).read_text())
        change(content)
        (folder / STATE).write_text(json.dumps(content))
        reseal(folder)

    return harm


def irregular(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").mkdir()


HEAD = "model.lm_head.weight"


def cut_while_it_is_read(folder: Path) -> None:
    rows = ShardReader.open("RUN", str(folder)).rows(HEAD, 1024)
    next(rows)
    piece = pieces_of(folder, HEAD)[0]
    os.truncate(folder / piece.file, piece.begin + piece.bytes // 2)
    deque(rows, maxlen=0)


def with_a_hole(folder: Path) -> None:
    """A tensor of more than 64 GiB that takes no place on the disk."""
    rows, width = 2**16 + 1, 2**20

    def change(index: dict[str, Any]) -> None:
        index["tensors"]["x"] = ["U8", [rows, width]]
        index["files"]["rank-00002.safetensors"] = [rows * width, [0, checksum(b"")]]
        piece = ["x", 0, [0, 0], [rows, width], "0" * 16 * rows]
        index["pieces"]["rank-00002.safetensors"] = [piece]

    (folder / "rank-00002.safetensors").touch()
    os.truncate(folder / "rank-00002.safetensors", rows * width)
    reseal(folder, change)


REASONS: dict[Damage, Callable[[Path], object]] = {
    Damage.MISSING: lambda folder: (folder / STATE).unlink(),
    Damage.IRREGULAR: irregular,
    Damage.SIZE: lambda folder: cut(folder / "rank-00000.safetensors"),
    Damage.CHECKSUM: lambda folder: flip_in(folder, HEAD),
    Damage.LACKS: of_state(lambda state: state.pop("same")),
    Damage.TYPE: of_state(lambda state: state.update(step="6")),
    Damage.STEP: of_state(lambda state: state.update(step=7)),
    Damage.VALUES: lambda folder: reseal(folder, without_head),
    Damage.SHORT: cut_while_it_is_read,
    Damage.SPARSE: with_a_hole,
}


def without_head(index: dict[str, Any]) -> None:
    for pieces in index["pieces"].values():
        pieces[:] = [piece for piece in pieces if piece[0] != HEAD]


def test_every_reason_for_an_incomplete_checkpoint_is_tested(saved: Config, tmp_path: Path) -> None:
    assert {*REASONS} == {*Damage}
    for damage, harm in REASONS.items():
        folder = checkpoint(copy(saved, tmp_path / damage.name), 6)
        with pytest.raises(DamagedCheckpoint) as found:
            harm(folder)
            check_all(Storage(folder))
            deque(ShardReader.open("RUN", str(folder)).rows(HEAD, 1024), maxlen=0)
        said = re.sub(r"\\\{.*?\\\}", ".*", re.escape(damage))
        if damage is Damage.VALUES:  # where only some are read; else every byte has to be known
            said, header = "has no piece for .*|has a piece of .*", open_header(Storage(folder))
            with pytest.raises(DamagedCheckpoint, match="has 0 of 2,048 values of a block of"):
                read(header, {HEAD: torch.empty(header.tensors[HEAD].shape)}, None)
        assert re.fullmatch(said, found.value.reason), (damage, found.value.reason)


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


def test_what_a_link_leads_to_is_neither_marked_nor_deleted(saved: Config, tmp_path: Path) -> None:
    """One to a sibling is passed over; one to an archive is read."""
    run_dir, archive = copy(saved, tmp_path / "run"), tmp_path / "archive" / "step-00000012"
    shutil.copytree(checkpoint(run_dir, 6), archive)
    checkpoint(run_dir, 9).symlink_to("step-00000006")
    checkpoint(run_dir, 12).symlink_to(archive)
    one = going_on(replace(saved, dp=1), run_dir)
    [[loaded]] = run_world(load_each, one, tmp_path / "one", [one])
    assert loaded.step == 6 and (checkpoint(run_dir, 6) / MARKER).exists()
    [told] = events(run_dir, "damaged")[1:]
    assert "step-00000012 could not be marked: it is a link" in told["text"]
    for step in (9, 12):
        integrity.delete_checkpoint(Storage(checkpoint(run_dir, step)))
        assert not checkpoint(run_dir, step).is_symlink()
    assert (archive / MARKER).exists() and not (archive / DAMAGED_MARKER).exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_and_can_be_restored(
    saved: Config, tmp_path: Path
) -> None:
    """A run that takes the older one has the losses of the uninterrupted run, to the last bit."""
    run_dir = copy(saved, tmp_path / "run")
    folder, truth = checkpoint(run_dir, 6), numbers(run_dir)
    piece = pieces_of(folder, "model.lm_head.weight")[-1]
    file = folder / flip_in(folder, "model.lm_head.weight")
    kept = file.read_bytes()
    short = replace(saved, steps=5)  # so that step 6 is not saved again
    assert train_all(going_on(short, run_dir)) == [""]
    assert numbers(run_dir) == truth[:5]
    assert not (folder / MARKER).exists() and file.read_bytes() == kept
    assert f"{file.name} does not match the checksum" in (folder / DAMAGED_MARKER).read_text()
    flip(file, piece.begin + piece.bytes // 2)
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
    cut(checkpoint(run_dir, 6) / "rank-00001.safetensors")
    for error in train_all(config, config):  # the same the next time, when both are marked
        assert "no complete checkpoint is left" in error and "step-00000003" in error
        assert "step-00000006" in error and "rename DAMAGED to COMMITTED" in error
        assert "step 0" not in error  # the run is there: no advice to begin another
    assert (run_dir / "metrics.jsonl").read_bytes() == kept


def test_damage_is_detected_when_another_layout_loads(saved: Config, tmp_path: Path) -> None:
    """Also in what no rank of it loads."""
    one = replace(saved, dp=1)
    damaged = ["rng.1.cpu", "optimizer.state.lm_head.weight.exp_avg"]
    runs = [going_on(one, copy(saved, tmp_path / name)) for name in ("intact", *damaged)]
    for name in damaged:
        flip_in(checkpoint(tmp_path / name, 6), name)
    [found] = run_world(load_each, one, tmp_path / "one", runs)
    assert [each.step for each in found] == [6, 3, 3]
    assert found[1].state == found[2].state != found[0].state


def test_sizes_are_checked_by_one_listing() -> None:
    """Also on a URL, where each question is a request."""
    folder = Storage("memory://listing/step-00000001")
    files = {f"rank-{rank:05d}.safetensors": (rank, (0, "")) for rank in range(100)}
    for name, (size, _) in files.items():
        folder.write(name, bytes(size))
    folder.write(STATE, b"{}")
    index = Index((2, ""), {}, files, b"")
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ls", "info", "exists"):
            original = getattr(MemoryFileSystem, name)

            def counted(self: Any, *args: Any, of: Any = original, **options: Any) -> Any:
                asked.append(of.__name__)
                return of(self, *args, **options)

            patch.setattr(MemoryFileSystem, name, counted)
        integrity.check_sizes(folder, index)
    assert asked == ["ls"]
    for name in ("rank-00007.safetensors", "absent"):
        with pytest.raises(DamagedCheckpoint, match=name):
            integrity.check_sizes(folder, replace(index, files=files | {name: (8, (0, ""))}))


# --- checkpoints that somebody planted ------------------------------------------------------------


def with_tensor(name: str, *entry: Any) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["tensors"].update({name: [*entry]})


def with_piece(place: int, value: Any) -> Callable[[dict[str, Any]], object]:
    """Changes an entry of the first rank's first piece."""

    def change(index: dict[str, Any]) -> None:
        index["pieces"]["rank-00000.safetensors"][0][place] = value

    return change


def overlapping(index: dict[str, Any]) -> None:
    """Both ranks have the first rows, and nobody the others; each byte is somewhere."""
    for pieces in index["pieces"].values():
        next(piece for piece in pieces if piece[0] == HEAD)[2] = [0, 0]


def renamed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["files"].update({name: index["files"].pop("rank-00000.safetensors")})


PLANTED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file elsewhere": (renamed("../../outside"), "names a file that is none of a checkpoint"),
    "an absolute file": (renamed("/etc/passwd"), "names a file that is none of a checkpoint"),
    "a name with escapes": (with_tensor("model.\x1b[2J", "F32", [0]), "has a tensor named 'model."),
    "a long name": (with_tensor("x" * 5000, "F32", [0]), "has a tensor named 'xxx"),
    "an odd dtype": (with_tensor("model.x", "float64_evil", [0]), "which is none of safetensors"),
    "a large shape": (with_tensor("model.x", "F32", [10**8, 10**7]), "of another size than its"),
    "a larger shape": (with_tensor("model.x", "F32", [10**400]), "a number has 401 digits"),
    "no values": (with_tensor("model.x", "F32", [0, 2**62, 2**62]), "has no shape of model.x"),
    "a negative shape": (with_tensor("model.x", "F32", [-1, 0]), "has no shape of model.x"),
    "a shape of texts": (with_tensor("model.x", "F32", ["a"]), "has no shape of model.x"),
    "dimensions": (with_tensor("model.x", "F32", [1] * 300_000), "has no shape of model.x"),
    "no dtype": (with_tensor("model.x", 1, 2), "does not describe model.x"),
    "another tensor": (with_piece(0, "model.x"), "that cannot be in rank-00000"),
    "a place before": (with_piece(1, -5), "that cannot be in rank-00000"),
    "a place behind": (with_piece(1, 10**12), "in bytes of rank-00000.safetensors that are not"),
    "offsets": (with_piece(2, [10**9, 0]), "that cannot be in rank-00000"),
    "no offsets": (with_piece(2, None), "that cannot be in rank-00000"),
    "sizes": (with_piece(3, [1]), "that cannot be in rank-00000"),
    "checksums": (with_piece(4, "00"), "has not all checksums of a piece"),
    "pieces that overlap": (overlapping, f"has pieces of {HEAD} that overlap"),
    "a large index": (lambda index: index.update(x="x" * 2**25), "index.json has more than "),
    "10,000 pieces": (
        lambda index: index["pieces"]["rank-00000.safetensors"].extend(
            index["pieces"]["rank-00000.safetensors"][:1] * 10_000
        ),
        "that are not its own",
    ),
    "30,000 files": (
        lambda index: index["files"].update(
            {f"rank-{n:06d}.safetensors": [0, [0, ""]] for n in range(30_000)}
        ),
        "is missing",
    ),
    "deep": (lambda index: index["files"].update(a=json.loads("[" * 900 + "]" * 900)), "none of a"),
}


LARGE = [case for case in PLANTED if ",000 " in case]


@pytest.mark.parametrize(
    "cases",
    [[*(PLANTED.keys() - {*LARGE})], *(pytest.param([n], marks=pytest.mark.slow) for n in LARGE)],
)
def test_a_planted_index_is_one_line_of_damage(
    cases: list[str], saved: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With checksums that are right, for whoever plants it can compute them, too."""
    for case in cases:
        change, says = PLANTED[case]
        folder = checkpoint(copy(saved, tmp_path / case), 6)
        reseal(folder, change)
        with (folder / "rank-99999.safetensors").open("wb") as sparse:  # the index may be as large
            sparse.truncate(2**30)
        begin = time.process_time()
        for command in (["verify"], ["show"], ["list"], ["digest", str(folder)], ["consolidate"]):
            words = [*command, str(folder), *[str(tmp_path / "x")] * (command == ["consolidate"])]
            code = main(words)
            out, err = capsys.readouterr()
            assert code in (0, 1) and "\x1b" not in out + err, (case, words)
            assert err.count("\n") <= 1
            if command == ["verify"]:
                assert code == 1 and says in out, (case, out)
        assert time.process_time() < begin + 40, case
        shutil.rmtree(folder)


def test_a_sparse_file_is_not_read_whole(
    saved: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (MARKER, INDEX, STATE):
        folder = checkpoint(copy(saved, tmp_path / name), 6)
        os.truncate(folder / name, 40 * 2**30)
        assert main(["verify", str(folder)]) == 1
        assert f"{name} has " in capsys.readouterr().out


def test_a_damaged_checkpoint_given_by_path_is_refused(saved: Config, tmp_path: Path) -> None:
    """It is another run's, and left as it is."""
    one = replace(saved, dp=1)
    expected: list[tuple[str, Path, Config]] = []
    damaged = {name: name for name in FILES if name != MARKER}
    planted = {case: says for case, (_, says) in [*PLANTED.items()][:3]}
    for case, says in {**damaged, **planted, "model.model.norm.weight": UNEQUAL}.items():
        folder = checkpoint(copy(saved, tmp_path / case), 6)
        if case in planted:
            reseal(folder, PLANTED[case][0])
        elif case in damaged:
            DAMAGES["flipped in the middle"](folder / case)
        else:
            flip_in(folder, case)
        for key in ("resume", "start_from")[: 2 - (case in damaged)]:
            new = going_on(one, tmp_path / "new" / f"{key} {case}", **{key: str(folder)})
            expected.append((says, folder, new))
    found = run_world(load_each, one, tmp_path / "ranks", [config for *_, config in expected])[0]
    for (says, folder, config), loaded in zip(expected, found, strict=True):
        assert says in loaded.error and str(folder) in loaded.error, (config.run_dir, loaded)
        assert (folder / MARKER).exists() and not (folder / DAMAGED_MARKER).exists(), folder
