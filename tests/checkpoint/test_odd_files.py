"""Files that no program of ours wrote, in the place of ours: one line that names them, never a hang."""

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
from support.saved_runs import checkpoint, events, numbers, reseal, train_all
from titanlike.checkpoint.commands import main
from titanlike.checkpoint.discovery import newest_complete
from titanlike.checkpoint.integrity import MARKER, DamagedCheckpoint, read_state
from titanlike.checkpoint.resume import select_resume
from titanlike.checkpoint.storage import Storage
from titanlike.config.schema import Config
from titanlike.launch.failures import root_cause
from titanlike.launch.heartbeat import read_beats
from titanlike.launch.restart_state import RestartState
from titanlike.launch.run_dir_owner import FILE as OWNER
from titanlike.launch.run_dir_owner import Owner
from titanlike.metrics.events import Events
from titanlike.metrics.result import read_result
from titanlike.metrics.sinks import JsonlSink
from titanlike.metrics.summary import summarize
from titanlike.sweeps import report
from titanlike.sweeps.plan import FILE as PLAN
from titanlike.sweeps.plan import Job, Plan, read_plan, write_plan

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
FILES = ["state.json", "files.json", MARKER, ".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(
    run: Config, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By list, verify and a start, which takes the older checkpoint."""
    path = checkpoint(Path(run.run_dir), 6)
    (path / name).unlink()
    SPECIAL[kind](path / name)
    uncommitted = (name, kind) == (MARKER, "dangling")
    assert main(["list", run.run_dir]) == 0
    assert ("incomplete" if uncommitted else "damaged") in capsys.readouterr().out
    assert main(["verify", run.run_dir]) == (0 if uncommitted else 1)
    assert name in capsys.readouterr().out
    selection = select_resume(run)
    assert selection.path is not None and selection.path.name == "step-00000003"
    assert [damage.file for damage in selection.damaged] == [name] * (not uncommitted)


def test_a_start_marks_or_deletes_what_is_no_file_and_goes_on(
    saved: Config, tmp_path: Path
) -> None:
    truth = numbers(Path(saved.run_dir))
    runs = []
    for name, kind in (("state.json", "FIFO"), (MARKER, "FIFO"), (MARKER, "folder")):
        folder = tmp_path / f"{name} {kind}"
        shutil.copytree(saved.run_dir, folder)
        (checkpoint(folder, 6) / name).unlink()
        SPECIAL[kind](checkpoint(folder, 6) / name)
        runs.append(replace(saved, run_dir=str(folder)))
    assert train_all(*runs) == [""] * len(runs)
    for one in runs:
        assert [event["step"] for event in events(Path(one.run_dir), "resume")] == [3]
        assert numbers(Path(one.run_dir)) == truth


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


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["state.json", "files.json", ".metadata"])
def test_odd_contents_with_right_checksums_are_damage(
    run: Config, name: str, odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(Path(run.run_dir), 6)
    (path / name).write_bytes(ODD[odd])
    if name == "files.json":
        from titanlike.checkpoint.integrity import checksum

        (path / MARKER).write_text(checksum(ODD[odd]))
    else:
        reseal(path)
    assert main(["verify", run.run_dir]) == 1
    assert name in capsys.readouterr().out
    assert main(["list", run.run_dir]) == 0
    if name != ".metadata":  # which a start reads with the tensors
        assert f"{name} " in capsys.readouterr().out
        assert [damage.file for damage in select_resume(run).damaged] == [name]


def test_a_garbled_metadata_lets_the_start_take_the_older_checkpoint(run: Config) -> None:
    folder = Path(run.run_dir)
    (checkpoint(folder, 6) / ".metadata").write_bytes(b"garbled")
    reseal(checkpoint(folder, 6))
    assert train_all(run) == [""]
    [event] = events(folder, "damaged")
    assert ".metadata" in event["text"]
    assert [event["step"] for event in events(folder, "resume")] == [3]


STEPS = ["2", "-3", "7", "1e30", "6.0", "1" + "0" * 30, '"6"', "true", "NaN", "null", "[6]", "{}"]


@pytest.mark.parametrize("step", STEPS)
def test_the_state_of_another_step_is_not_whole(run: Config, step: str) -> None:
    path = checkpoint(Path(run.run_dir), 6)
    text = (path / "state.json").read_text().replace('"step": 6,', f'"step": {step},', 1)
    (path / "state.json").write_text(text)
    reseal(path)
    [damage] = newest_complete(Storage(path.parent)).damaged
    assert damage.file == "state.json" and len(str(damage)) < 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_value_in_the_state_is_read_or_is_damage(
    saved: Config, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    path = checkpoint(Path(saved.run_dir), 6)
    kept = {name: (path / name).read_bytes() for name in ("state.json", "files.json", MARKER)}
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
    "logs/rank0.heartbeat": lambda folder: read_beats(folder, 1),
    "logs/rank0.error.json": lambda folder: root_cause(folder),
    "restart.json": lambda folder: RestartState(folder / "restart.json").count_start(),
    PLAN: lambda folder: read_plan(folder),
}
NAMED = ("result.json", PLAN)  # a reader needs what is in these


def odd_file(path: Path, odd: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if odd in SPECIAL:
        SPECIAL[odd](path)
    else:
        path.write_bytes(ODD[odd])


@pytest.mark.parametrize("odd", [*ODD, *SPECIAL])
@pytest.mark.parametrize("name", RECORDS)
def test_an_odd_file_of_a_run_is_named_or_passed_over(name: str, odd: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    odd_file(tmp_path / name, odd)
    if name in NAMED and odd != "dangling":
        with pytest.raises(ValueError, match=name):
            RECORDS[name](tmp_path)
        return
    try:
        RECORDS[name](tmp_path)
    except OSError as error:
        assert odd in SPECIAL and name == "metrics.jsonl" and name in str(error)


@pytest.mark.parametrize("odd", [*ODD, *SPECIAL])
def test_an_odd_owner_file_does_not_stop_a_run(odd: str, tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    odd_file(tmp_path / OWNER, odd)
    owner.check()


@pytest.mark.parametrize("odd", sorted(SPECIAL.keys() - {"dangling", "device"}))
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_what_is_no_file_is_not_written_to(name: str, odd: str, tmp_path: Path) -> None:
    SPECIAL[odd](tmp_path / name)
    with pytest.raises(OSError, match=name):
        if name == "metrics.jsonl":
            JsonlSink(tmp_path / name)
        else:
            Events(tmp_path, print).log("saved", 1)


@pytest.mark.parametrize("odd", [*ODD, *SPECIAL])
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "config.yaml"])
def test_the_table_of_a_sweep_survives_an_odd_file_of_a_job(
    name: str, odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path, Plan("train", "loss", jobs=[Job(0, "0", ["lr=1"], ["lr=1"])]))
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    odd_file(tmp_path / "0" / name, odd)
    code = report.main([str(tmp_path), "--no-picture"])
    captured = capsys.readouterr()
    assert code == 1 or (code == 2 and name in captured.err and len(captured.err.splitlines()) == 1)
    if name == "result.json" and odd != "dangling":
        assert name in (tmp_path / "sweep.csv").read_text()


fields = st.sampled_from(
    [
        "number",
        "folder",
        "overrides",
        "swept",
        "skipped",
        "status",
        "value",
        "error",
        "step",
        "loss",
    ]
)


@given(st.dictionaries(fields, json_values))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_object_in_the_files_of_a_sweep_is_a_row_or_a_word(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], record: Any
) -> None:
    folder = tmp_path_factory.mktemp("sweep")
    write_plan(folder, Plan("train", "loss", jobs=[Job(0, "0", ["lr=1"], ["lr=1"])]))
    line = json.dumps(record) + "\n"
    with (folder / PLAN).open("a") as file:
        file.write(line)
    (folder / "0").mkdir()
    (folder / "0" / "result.json").write_text(line)
    (folder / "0" / "metrics.jsonl").write_text(line * 2)
    assert report.main([str(folder), "--no-picture"]) in (0, 1)
    capsys.readouterr()
