"""Where checkpoints are kept: on any file system that fsspec knows, or refused before the start."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from support.saved_runs import a_run, events, train_or_refuse
from support.saved_state import fill, load, local, opened, tensors
from support.world import run_world
from titanlike.core.checkpoint import storage
from titanlike.core.checkpoint.discovery import (
    Progress,
    committed,
    newest_complete,
    resolve,
    step_name,
)
from titanlike.core.checkpoint.integrity import check_all, commit
from titanlike.core.checkpoint.storage import Storage
from titanlike.core.checkpoint.writer import superseded
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import close_mesh
from titanlike.core.launch.worker import Worker
from titanlike.run import checks as check

FILE = "rank-00000.safetensors"


def test_any_file_system_of_fsspec_keeps_checkpoints(tmp_path: Path) -> None:
    """Saves, retention, damage, going on, as on a disk; memory:// has no directories, renames."""
    for url in ("memory://runs/a", f"file://{tmp_path}/kept elsewhere"):
        config = a_run(tmp_path / "run", folder=url, keep=2, mode="async")
        run_world(save_and_go_on, config, tmp_path / "run")
        assert not (tmp_path / "run" / "checkpoints").exists()


def save_and_go_on(config: Config, worker: Worker) -> None:
    folder, (run, checkpointer) = Storage(config.checkpoint.folder), opened(config, worker)
    for step in (1, 2, 3):
        fill(run, step)
        checkpointer.save(Progress(step=step))
        checkpointer.before_update()
    checkpointer.finish(Progress(step=3), done=True)
    checkpointer.close()
    assert folder.names() == ["step-00000002", "step-00000003"]
    newest = folder.at("step-00000003")
    with newest.reader(FILE) as read_into:
        data = bytearray(newest.size(FILE))
        read_into(0, data)
    data[-100] ^= 1
    newest.write(FILE, bytes(data))
    assert load(run, config, 0).step == 2
    assert all((local(tensor) == 2).all() for _, tensor, _ in tensors(run))
    [event] = events(worker.run_dir, "damaged")[-1:]
    assert event["step"] == 3 and str(newest) in event["text"]
    assert events(worker.run_dir, "resume")[-1]["path"] == str(folder.at("step-00000002"))
    for path in committed(folder):
        check_all(path)
    close_mesh()


def test_the_latest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    """Also where the alphabet has another order."""
    state = {"progress": {}, "val_loss": None, "same": {}}
    folder = Storage(tmp_path)
    for step in (99_999_999, 100_000_000):
        own = folder.at(step_name(step))
        commit(own, [], {"step": step, **state})
    folder.at(step_name(100_000_001)).write("state.json", b"{}")  # its save was cut off
    for found in (
        newest_complete(folder).path,
        resolve("RUN", str(tmp_path)),
        committed(folder)[0],
    ):
        assert str(found) == str(folder.at("step-100000000"))


def test_retention_holds_after_any_kill(tmp_path: Path) -> None:
    """It was killed once its last checkpoint was there, and older ones were still to be deleted:
    the next start has nothing to train."""
    config = a_run(tmp_path, steps=3, every=1, keep=0)
    again = replace(config, checkpoint=replace(config.checkpoint, keep=2))
    assert run_world(train_or_refuse, config, tmp_path, [config, again]) == [["", ""]]
    assert Storage(tmp_path / "checkpoints").names() == ["step-00000002", "step-00000003"]


def test_an_unusable_folder_is_a_config_error_before_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    inside = f"{tmp_path}/file/checkpoints"
    packages = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "oci": "ocifs"}
    absent = {name: package for name, package in packages.items() if find_spec(package) is None}
    memory: dict[str, Any] = {"folder": "memory://a"}
    rows: list[tuple[dict[str, Any], str]] = [
        *(
            ({"folder": url}, "cannot be written")
            for url in (inside, f"file://{inside}", "/proc/a")
        ),
        *(
            ({"folder": url}, "are kept in a local folder, or by one of file, memory, s3, ")
            for url in ("s33://bucket/a", "http://127.0.0.1:9/a", "reference::file:///a.json")
        ),
        ({"folder": "simplecache::s3://bucket/a"}, "are kept in a local folder"),
        ({"folder": "file:///a::memory://b"}, "are kept in a local folder"),
        *(({"folder": f"{name}://bucket/a"}, package) for name, package in absent.items()),
        (memory | {"dp": 2}, "one process"),
    ]
    for changes, says in rows:
        [problem] = check.problems(a_run(tmp_path / "run", **changes))
        assert str(problem).startswith("checkpoint.") and says in str(problem), changes
        assert "\n" not in str(problem)
    new = tmp_path / "new"
    assert check.problems(a_run(tmp_path / "run", folder=str(new))) == [] and not new.exists()
    assert check.problems(a_run(tmp_path / "run", **memory)) == []

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("the bucket says no")

    monkeypatch.setattr(storage, "_PAUSES", (0.0,))
    monkeypatch.setattr(LocalFileSystem, "ls", refuse)
    [problem] = check.problems(a_run(tmp_path / "run"))
    assert str(problem).startswith("checkpoint=") and "the bucket says no" in str(problem)


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
    settings = Checkpoint(keep=keep, keep_every=keep_every, keep_best=keep_best)
    gone = superseded(found, settings)
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
    again = superseded({step: found[step] for step in left}, settings)
    assert again == []
