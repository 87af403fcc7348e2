"""Work on a checkpoint that is cut off at any moment: it is complete, or it does not count.

What is checked after each kill of a real run is in campaign.py, which can also be run by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.campaign import campaign
from support.cells import GRID, slow
from support.models import tiny
from support.world import run_world
from titanlike.core.checkpoint import integrity
from titanlike.core.checkpoint.discovery import committed, step_name
from titanlike.core.checkpoint.integrity import check_all
from titanlike.core.checkpoint.storage import DAMAGED_MARKER, MARKER, Storage
from titanlike.core.checkpoint.writer import prepare_save, write_checkpoint
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker


class Cut(BaseException):
    """The process is gone."""


class Moments:
    """Counts what changes the file system, and cuts it off at one of these moments."""

    def __init__(self) -> None:
        self.left, self.seen = -1, list[str]()  # -1 = not now
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        changes = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.mkdir")
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if self.left < 0 or not (writes or event in changes):
            return
        if self.left == 0:
            raise Cut
        self.left -= 1
        self.seen.append(f"{event} {Path(str(arguments[event == 'os.rename'])).name}")

    def cut(self, work: Callable[[], object], moment: int) -> bool:
        """Whether the work was cut off there; otherwise it is done."""
        self.left, self.seen = moment, []
        try:
            work()
        except BaseException as error:
            assert self.left == 0, error
            return True
        finally:
            self.left = -1
        return False


def a_save(folder: Storage, step: int) -> None:
    state = {"step": step, "progress": {}, "val_loss": None, "same": {}}
    tensors = {"model.w": torch.full((100,), float(step)), "rng.0.cpu": torch.get_rng_state()}
    write_checkpoint(folder.at(step_name(step)), state, prepare_save(tensors), None)


def test_an_interrupted_checkpoint_is_complete_or_ignored(tmp_path: Path) -> None:
    run_world(cut_everywhere, tiny(), tmp_path)


def cut_everywhere(config: Config, worker: Worker) -> None:
    moments = Moments()

    def every(name: str, begin: Callable[[Storage], object], work: Callable[[Storage], Any]) -> Any:
        """Cut it off at its first moment, at the second one, ..."""
        for moment in range(1000):
            folder = Storage(Path(config.run_dir) / name / str(moment))
            a_save(folder, 1)
            begin(folder)
            cut = moments.cut(lambda folder=folder: work(folder), moment)
            for path in committed(folder):
                check_all(path)
            assert folder.at(step_name(1)).exists(MARKER)
            newest = folder.at(step_name(2))
            if name == "mark":  # never a leftover, which a start deletes
                assert newest.exists(MARKER) or newest.exists(DAMAGED_MARKER)
            if not cut:
                assert moment > 1
                return committed(folder)[0].name, moments.seen
        raise AssertionError("it does not end")

    def save(folder: Storage) -> None:
        a_save(folder, 2)

    def mark(folder: Storage) -> None:
        integrity.mark_damaged(folder.at(step_name(2)), "a reason")

    def delete(folder: Storage) -> None:
        integrity.delete_checkpoint(folder.at(step_name(2)))

    def leftover(folder: Storage) -> None:
        save(folder)
        folder.at(step_name(2)).remove(MARKER)

    assert every("save", lambda _: None, save)[0] == step_name(2)
    assert every("again", leftover, save)[0] == step_name(2)
    assert every("mark", save, mark)[0] == step_name(1)
    newest, order = every("delete", save, delete)
    assert newest == step_name(1)
    assert order.index(f"os.remove {MARKER}") < order.index(f"shutil.rmtree {step_name(2)}")


def test_a_checkpoint_is_committed_after_all_files_are_synced(tmp_path: Path) -> None:
    """What is not synced is lost with the machine."""
    assert run_world(in_which_order, tiny(), tmp_path) == [True]


def in_which_order(config: Config, worker: Worker) -> bool:
    folder, fsync, rename = Path(config.run_dir), os.fsync, os.replace
    synced: set[int] = set()
    ends: list[str] = []

    def synced_now(handle: int) -> None:
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)
        ends.append(os.readlink(f"/proc/self/fd/{handle}"))

    def renamed(source: Any, target: Any) -> None:
        rename(source, target)
        inside = Path(target).parent
        if Path(target).name == MARKER:
            for path in inside.iterdir():
                assert path.stat().st_ino in synced, f"{path.name} is not on the disk"
            assert inside.stat().st_ino in synced
        else:
            synced.discard(inside.stat().st_ino)  # its entries have changed

    os.fsync, os.replace = synced_now, renamed
    a_save(Storage(folder), 1)
    assert ends[-1] == str(folder), "the folder of the checkpoint is not on the disk"
    return (folder / step_name(1) / MARKER).exists()


@pytest.mark.parametrize("mode", [*slow("async_pinned"), *slow("async", marks=GRID)])
def test_a_run_killed_during_a_save_loses_nothing(mode: str, tmp_path: Path) -> None:
    places = ("in a save", "before the commit", "half removed")
    found = campaign(tmp_path, 3, 0, ("one",), (mode,), places)
    assert {place for place, _ in found} == set(places)


@pytest.mark.grid
def test_a_hundred_random_kills_lose_nothing(tmp_path: Path) -> None:
    assert len(campaign(tmp_path, 100, 0)) == 100
