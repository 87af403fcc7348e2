"""Where checkpoints are kept: on any file system that fsspec knows, or refused before the start."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from support.saved_runs import a_run, events, numbers, train_all, train_each
from support.world import run_world
from titanlike.checkpoint.discovery import committed
from titanlike.checkpoint.integrity import check_all
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.writer import Saved, superseded
from titanlike.config.schema import Checkpoint, Config
from titanlike.job import check
from titanlike.launch.worker import Worker


@pytest.mark.slow
def test_a_run_goes_on_from_a_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kept elsewhere"
    truth = a_run(tmp_path / "truth", pp=2, steps=6)
    config = a_run(tmp_path / "run", pp=2, steps=6, folder=url, mode="async", keep=1)
    assert train_all(truth) == train_all(config) == [""]
    assert Storage(url).names() == ["step-00000006"]
    check_all(Storage(url).at("step-00000006"))
    further = [replace(one, steps=8) for one in (truth, config)]
    assert train_all(further[0]) == train_all(further[1]) == [""]
    [event] = events(tmp_path / "run", "resume")
    assert event["path"] == f"{url}/step-00000006"
    assert numbers(tmp_path / "run") == numbers(tmp_path / "truth")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_file_system_without_directories_or_renames_will_do(tmp_path: Path) -> None:
    """fsspec's memory, in one process; saves, retention, damage and going on, as on a disk."""
    run_dir = tmp_path / "run"
    config = a_run(run_dir, folder="memory://runs/a", keep=2)
    truth = a_run(tmp_path / "truth")
    assert train_all(truth) == [""]
    found = run_world(in_memory, config, run_dir)[0]
    assert found == ["step-00000003", "step-00000006"]
    assert [event["step"] for event in events(run_dir, "resume")] == [6, 3]
    [event] = events(run_dir, "damaged")
    assert event["step"] == 6 and "memory://runs/a/step-00000006" in event["text"]
    assert numbers(run_dir) == numbers(tmp_path / "truth")


def test_a_run_that_is_done_keeps_as_many_as_it_should_however_it_was_killed(
    tmp_path: Path,
) -> None:
    """It was killed once its last checkpoint was there, and older ones were still to be deleted:
    the next start has nothing to train."""
    config = a_run(tmp_path, steps=3, every=1, keep=0)
    again = replace(config, checkpoint=replace(config.checkpoint, keep=2))
    assert run_world(train_each, config, tmp_path, [config, again]) == [["", ""]]
    assert Storage(tmp_path / "checkpoints").names() == ["step-00000002", "step-00000003"]


def in_memory(config: Config, worker: Worker) -> list[str]:
    assert train_each(config, worker, [config, config]) == ["", ""]
    folder = Storage("memory://runs/a")
    newest = committed(folder)[0]
    [tensors] = [name for name in newest.names() if name.endswith(".distcp")]
    data = bytearray(newest.read(tensors))
    data[100] ^= 1
    newest.write(tensors, bytes(data))
    assert train_each(config, worker, [config]) == [""]
    for path in committed(folder):
        check_all(path)
    return folder.names()


def problem(config: Config) -> str:
    """What a start would be refused with, before a worker; one line."""
    [found] = check.problems(config)
    assert "\n" not in str(found)
    return str(found)


def test_a_folder_that_cannot_be_written_is_a_mistake_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url in (f"{tmp_path}/file/checkpoints", f"file://{tmp_path}/file/checkpoints", "/proc/a"):
        text = problem(a_run(tmp_path / "run", folder=url))
        assert text.startswith(f"checkpoint.folder={url}: cannot be written"), text
    assert check.problems(a_run(tmp_path / "run", folder=str(tmp_path / "new"))) == []
    assert not (tmp_path / "new").exists()  # the trial has left nothing


def test_a_file_system_that_answers_with_an_error_is_a_mistake_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("the bucket says no")

    monkeypatch.setattr(LocalFileSystem, "ls", refuse)
    text = problem(a_run(tmp_path / "run"))
    assert text.startswith("checkpoint=") and "the bucket says no" in text


def test_a_protocol_that_nobody_knows_or_whose_package_is_missing_is_named(tmp_path: Path) -> None:
    text = problem(a_run(tmp_path / "run", folder="s33://bucket/a"))
    assert text.startswith("checkpoint.folder=s33://bucket/a: ") and "s33" in text
    packages = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "oci": "ocifs"}
    absent = {name: package for name, package in packages.items() if find_spec(package) is None}
    if not absent:
        pytest.skip("every package is installed")
    for name, package in absent.items():
        assert package in problem(a_run(tmp_path / "run", folder=f"{name}://bucket/a"))


def test_the_memory_of_one_process_is_refused_for_two(tmp_path: Path) -> None:
    assert "one process" in problem(a_run(tmp_path / "run", dp=2, folder="memory://a"))
    assert check.problems(a_run(tmp_path / "run", folder="memory://a")) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = Storage(tmp_path)
    folder.write("state", b"old")
    with pytest.raises(TypeError):
        folder.write("state", "no bytes")  # type: ignore[arg-type]
    assert folder.read("state") == b"old"
    assert folder.names() == ["state"]


losses = st.none() | st.floats(0, 9) | st.sampled_from([float("nan"), float("inf")])


@given(
    st.dictionaries(st.integers(1, 60), losses, max_size=20),
    st.integers(0, 5),
    st.integers(0, 7),
    st.integers(0, 3),
)
def test_retention_keeps_what_was_asked_for_and_never_removes_the_newest(
    found: dict[int, float | None], keep: int, keep_every: int, keep_best: int
) -> None:
    saved = [Saved(step, val_loss) for step, val_loss in found.items()]
    settings = Checkpoint(keep=keep, keep_every=keep_every, keep_best=keep_best)
    gone = superseded(saved, settings)
    assert gone == sorted(set(gone)) and set(gone) <= set(found)
    left = sorted(set(found) - set(gone))
    if keep == 0:
        assert not gone
        return
    assert left[-keep:] == sorted(found)[-keep:]  # the newest among them
    assert not keep_every or not any(step % keep_every == 0 for step in gone)
    validated = {s: v for s, v in found.items() if v is not None and v < float("inf")}
    for step in validated.keys() & set(gone):
        better = [other for other, loss in validated.items() if loss <= validated[step]]
        assert len(set(better) - {step}) >= keep_best
    # and nothing else stays
    kept_for_loss = [s for s in left[:-keep] if not keep_every or s % keep_every]
    assert len(kept_for_loss) <= keep_best and set(kept_for_loss) <= set(validated)
    # what is let go now is not asked for later: one more checkpoint brings none of it back
    again = superseded([one for one in saved if one.step in left], settings)
    assert again == []
