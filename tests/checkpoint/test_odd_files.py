"""Files that no program of ours wrote, in the place of ours: one line that names them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import saved_runs
from support.saved_runs import checkpoint, reseal
from support.saved_state import load_each
from support.world import run_world
from titanlike.core.checkpoint.discovery import newest_complete, select_resume
from titanlike.core.checkpoint.format import checksum
from titanlike.core.checkpoint.integrity import read_state
from titanlike.core.checkpoint.storage import INDEX, MARKER, DamagedCheckpoint, Storage
from titanlike.core.config.schema import Config
from titanlike.core.launch.environment import RestartState
from titanlike.core.launch.failures import root_cause
from titanlike.core.launch.heartbeat import read_beats
from titanlike.core.launch.run_dir_lock import OWNER, RunDirOwner
from titanlike.core.metrics.run_files import Events, read_result
from titanlike.core.metrics.sinks import JsonlSink
from titanlike.core.metrics.summary import summarize
from titanlike.run import sweep as report
from titanlike.run.job import SWEEP_FILE
from titanlike.run.sweep import SweepRun
from titanlike.use.checkpoint_commands import main

saved, run = saved_runs.saved, saved_runs.run


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A read of a FIFO waits for ever."""

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    previous = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)  # the name of a socket is short
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "socket": a_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
}
FILES = ["state.json", INDEX, MARKER, "rank-00000.safetensors"]


def test_only_regular_files_are_opened(
    run: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By list, verify and a start, which takes the older checkpoint."""
    path = checkpoint(Path(run.run_dir), 6)
    cases = [(name, "FIFO") for name in FILES] + [("state.json", kind) for kind in SPECIAL]
    for name, kind in [*cases, (MARKER, "dangling")]:
        (path / name).rename(tmp_path / "kept")
        SPECIAL[kind](path / name)
        uncommitted = (name, kind) == (MARKER, "dangling")
        assert main(["list", run.run_dir]) == 0
        assert ("incomplete" if uncommitted else "damaged") in capsys.readouterr().out
        assert main(["verify", run.run_dir]) == (0 if uncommitted else 1)
        assert name in capsys.readouterr().out
        selection = select_resume(run)
        assert selection.path is not None and selection.path.name == "step-00000003"
        assert [damage.file for damage in selection.damaged] == [name] * (not uncommitted)
        shutil.rmtree(path / name) if kind == "folder" else (path / name).unlink()
        (tmp_path / "kept").rename(path / name)


def test_a_garbled_checkpoint_is_marked_or_deleted_and_the_run_resumes(
    saved: Config, tmp_path: Path
) -> None:
    runs = []
    cases = [("state.json", "FIFO"), (MARKER, "FIFO"), (MARKER, "folder"), (INDEX, "zeros")]
    for name, kind in cases:
        folder = shutil.copytree(saved.run_dir, tmp_path / f"{name} {kind}")
        odd_file(checkpoint(folder, 6) / name, kind)
        if kind in ODD:
            (checkpoint(folder, 6) / MARKER).write_text(checksum(ODD[kind]))
        runs.append(replace(saved, run_dir=str(folder)))
    for loaded in run_world(load_each, saved, tmp_path / "ranks", runs)[0]:
        assert (loaded.step, loaded.error) == (3, "")


ODD: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[]",
    "a string": b'"state"',
    "a number": b"1e999",
    "NaN": b"NaN",
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "huge number": b'{"step": ' + b"9" * 10_000 + b"}",
    "cut": b'{"step": 6,',
    "not UTF-8": b'{"step": "\xff"}',
    "a BOM": b"\xef\xbb\xbf{}",
    "UTF-16": '{"step": 6}'.encode("utf-16"),
    "a key twice": b'{"step": 6, "step": 6}',
    "zeros": b"\0" * 100,
}


def odd_file(path: Path, odd: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if odd in SPECIAL:
        SPECIAL[odd](path)
    else:
        path.write_bytes(ODD[odd])


STEPS = ["2", "-3", "7", "1e30", "6.0", "1" + "0" * 30, '"6"', "true", "NaN", "null", "[6]", "{}"]


@pytest.mark.parametrize("name", ["state.json", INDEX])
def test_invalid_contents_with_valid_checksums_are_damage(
    run: Config, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the state of another step."""
    path = checkpoint(Path(run.run_dir), 6)
    contents = [*ODD.values()]
    if name == "state.json":
        whole = (path / name).read_bytes()
        contents += [whole.replace(b'"step": 6,', f'"step": {x},'.encode(), 1) for x in STEPS]
        deep, digits = b"[" * 900 + b"]" * 900, b"9" * 401
        contents += [
            whole.replace(b'"val_loss": null', b'"val_loss": ' + x) for x in (deep, digits)
        ]
    for content in contents:
        (path / name).write_bytes(content)
        if name == INDEX:
            (path / MARKER).write_text(checksum(content))
        else:
            reseal(path)
        assert main(["verify", str(path)]) == 1, content[:50]
        assert name in capsys.readouterr().out
        [damage] = newest_complete(Storage(path.parent)).damaged
        assert damage.file == name and len(str(damage)) < 400


def test_a_state_may_lack_what_a_run_does_not_need(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(Path(run.run_dir), 6)
    state = json.loads((path / "state.json").read_text()) | {"layout": {"pp": 2}}
    del state["run_dir"]
    (path / "state.json").write_text(json.dumps(state))
    reseal(path)
    assert main(["list", str(path)]) == main(["show", str(path)]) == 0
    assert "(pp2, split None)" in capsys.readouterr().out.replace("pp2 ", "pp2")
    elsewhere = replace(run.checkpoint, folder=str(path.parent))
    found = select_resume(replace(run, run_dir="elsewhere", checkpoint=elsewhere))
    assert str(found.path) == str(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_value_in_the_saved_state_is_loaded_or_reported_as_damage(
    saved: Config, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    path = checkpoint(Path(saved.run_dir), 6)
    kept = {name: (path / name).read_bytes() for name in ("state.json", INDEX, MARKER)}
    try:
        state = json.loads(kept["state.json"])
        keys = [(key,) for key in state]
        keys += [(key, inner) for key in ("progress", "layout") for inner in state[key]]
        *outer, key = data.draw(st.sampled_from(keys))
        (state[outer[0]] if outer else state)[key] = data.draw(json_values)
        (path / "state.json").write_text(json.dumps(state))
        reseal(path)
        assert main(["list", str(path)]) == 0
        assert main(["show", str(path)]) in (0, 1)
        with suppress(DamagedCheckpoint):
            found = read_state(Storage(path))
            assert found["step"] == 6 or "format" in state
    except ValueError as error:
        assert "later" in str(error)
    finally:
        for name, content in kept.items():
            (path / name).write_bytes(content)
        capsys.readouterr()


# --- files of a run and of a sweep -----------------------------------------------------------

RECORDS: dict[str, Callable[[Path], Any]] = {
    "result.json": lambda folder: read_result(folder),
    "metrics.jsonl": lambda folder: summarize(folder),
    "events.jsonl": lambda folder: summarize(folder),
    "logs/rank0.heartbeat": lambda folder: read_beats(folder, range(1)),
    "logs/rank0.error.json": lambda folder: root_cause(folder),
    "restart.json": lambda folder: RestartState(folder / "restart.json").count_start(),
}
NAMED = ("result.json",)  # a reader needs what is in it


@pytest.mark.parametrize("name", RECORDS)
def test_an_unexpected_file_in_a_run_is_named_or_skipped(name: str, tmp_path: Path) -> None:
    for odd in (*ODD, *SPECIAL):
        folder = tmp_path / odd
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        odd_file(folder / name, odd)
        if name in NAMED and odd != "dangling":
            with pytest.raises(ValueError, match=name):
                RECORDS[name](folder)
            continue
        try:
            RECORDS[name](folder)
        except OSError as error:
            assert odd in SPECIAL and name == "metrics.jsonl" and name in str(error)


def test_a_garbled_owner_file_does_not_stop_a_run(tmp_path: Path) -> None:
    for odd in (*ODD, *SPECIAL):
        (tmp_path / odd).mkdir()
        owner = RunDirOwner(tmp_path / odd)
        odd_file(tmp_path / odd / OWNER, odd)
        owner.check()


def test_special_files_are_not_written_to(tmp_path: Path) -> None:
    for odd in SPECIAL.keys() - {"dangling", "device"}:
        (tmp_path / odd).mkdir()
        for name in ("metrics.jsonl", "events.jsonl"):
            SPECIAL[odd](tmp_path / odd / name)
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            JsonlSink(tmp_path / odd / "metrics.jsonl")
        with pytest.raises(OSError, match=r"events\.jsonl"):
            Events(tmp_path / odd, print).log("saved", 1)


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "config.yaml"])
def test_the_sweep_table_survives_a_garbled_job_file(name: str, tmp_path: Path) -> None:
    for odd in (*ODD, *SPECIAL):
        sweep = a_sweep(tmp_path / odd)
        (sweep / "0" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        odd_file(sweep / "0" / name, odd)
        assert "0 of 1 done" in "\n".join(table(sweep)), odd
        if name == "result.json" and odd != "dangling":
            assert name in str(SweepRun(sweep).rows()[0].error)


def test_the_list_of_a_sweeps_jobs_is_read_as_far_as_it_is_one(tmp_path: Path) -> None:
    for odd in (*ODD, *SPECIAL):
        (tmp_path / odd).mkdir()
        odd_file(tmp_path / odd / SWEEP_FILE, odd)
        if odd in SPECIAL and odd != "dangling":
            with pytest.raises(ValueError, match=SWEEP_FILE):
                report.read_jobs(tmp_path / odd)
        else:
            assert report.read_jobs(tmp_path / odd) == {}


def a_sweep(folder: Path) -> Path:
    (folder / "0").mkdir(parents=True)
    report.add_job(folder, 0, ["lr=1"])
    return folder


def table(folder: Path) -> list[str]:
    return report.sweep_lines(SweepRun(folder).rows(), "loss", None, [], ["again"])


WORDS = ["number", "overrides", "status", "value", "error", "step", "loss"]


@given(st.dictionaries(st.sampled_from(WORDS), json_values))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_json_in_a_sweep_file_becomes_a_row_or_an_error_message(
    tmp_path_factory: pytest.TempPathFactory, record: Any
) -> None:
    folder = a_sweep(tmp_path_factory.mktemp("sweeps") / "sweep")
    line = json.dumps(record) + "\n"
    with (folder / SWEEP_FILE).open("a") as file:
        file.write(line)
    (folder / "0" / "result.json").write_text(line)
    (folder / "0" / "metrics.jsonl").write_text(line * 2)
    assert table(folder)
