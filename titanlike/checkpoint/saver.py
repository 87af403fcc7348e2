"""A run's checkpoints, as training uses them: go on, save, go back.

1. `resume`: rank 0 looks for the newest whole checkpoint (find.py); all ranks check its files, each
   some of them; a damaged one is named and set aside, and the next older one is looked at.
2. `save`: the tensors are written (store.py, dcp_files.py), then the checkpoint is made to count
   (whole.py), then older ones are let go (retention.py). In the asynchronous modes a copy in memory
   is written by a thread, and the next save waits for it: two never overlap.
3. A save that fails is reported, its leftovers are removed, and the run goes on; the second failure
   in a row ends it, and so does one that is the last.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from titanlike.checkpoint import store
from titanlike.checkpoint.dcp_files import Writer
from titanlike.checkpoint.find import (
    committed,
    difference,
    find,
    must_be_the_same,
    step_name,
    step_of,
    storage_of,
    unfinished,
)
from titanlike.checkpoint.retention import Saved, superseded
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.warm_start import warm_start
from titanlike.checkpoint.whole import (
    MARKER,
    Damaged,
    Manifest,
    check_sums,
    read_manifest,
    read_state,
    reject,
    revoke,
)
from titanlike.config.schema import Config
from titanlike.data.sources import Data
from titanlike.metrics import units
from titanlike.metrics.events import Events
from titanlike.optim.stage_state import StageState

MOST_FAILURES = 2  # saves in a row


@dataclass(frozen=True)
class Progress:
    """How far a run is: what a checkpoint keeps besides tensors."""

    step: int = 0
    value: float | None = None  # last validation loss, or loss
    left_out: int = 0  # batches that rollbacks have jumped over
    guard: dict[str, Any] = field(default_factory=dict)  # see guard.Guard.state


@dataclass
class _Save:
    """One save on its way."""

    folder: Storage
    state: dict[str, Any]
    begin: float  # time.perf_counter()
    kept: Saved | None  # for retention; None where it does not count for that
    future: Future[Any] = field(default_factory=Future)
    let_go: Callable[[_Save], None] | None = None
    stall: float = 0.0  # seconds that training waited for it
    seconds: float = 0.0  # until it counted
    bytes: int = 0
    gone: list[int] = field(default_factory=list)  # steps of checkpoints that it superseded
    trouble: str = ""  # with removing those
    reported: bool = False

    def committed(self, files: Manifest) -> None:
        """It counts. On rank 0, in the saving thread."""
        self.seconds = time.perf_counter() - self.begin
        self.bytes = sum(size for size, _ in files.values())
        if self.let_go is not None:
            self.let_go(self)


class Saver:
    """Saves and loads the checkpoints of one run. All methods but `poll` are collective."""

    def __init__(self, parts: list[StageState], config: Config, data: Data, events: Events) -> None:
        self._parts, self._config, self._data = parts, config, data
        self._settings, self._events = config.checkpoint, events
        self._folder = storage_of(config)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # DCP's plans are objects, which nccl would carry through GPU memory; and a background
        # save needs a group of its own
        self._group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=self._settings.timeout)
        )
        self._stager: BlockingAsyncStager | None = None
        self._saved: dict[int, Saved] = {}  # what counts in the folder; on rank 0
        self._under_way: _Save | None = None
        self._failures: list[str] = []  # since the last save that succeeded
        self.newest = 0  # step of the newest checkpoint that counts; 0 for none

    # --- going on ----------------------------------------------------------------------------

    def resume(self) -> Progress:
        """Load what the config says to go on from, or to start from.

        Raises ValueError when another rank cannot see the checkpoint, when it was made with other
        data or another model, and when none is whole though there should be one.
        """
        path = self._first_whole(self._choose)
        if path is None:
            if self._settings.start_from:
                text = warm_start(self._settings, self._parts, self._group)
                self._events.log("warm_start", 0, text)
            return Progress()
        return self._load(path)

    def go_back(self) -> Progress | None:
        """Load the newest whole checkpoint of this run; None where there is none."""
        self._settle()
        path = self._first_whole(self._newest_own)
        return None if path is None else self._load(path)

    def way_back(self) -> str:
        """From where a run that diverged can go on, in words, once what is under way is saved."""
        with contextlib.suppress(OSError):
            self._settle()
        if not self.newest:
            return "there is no checkpoint yet: write a smaller optimizer.lr or a longer lr.warmup"
        path = self._folder.at(step_name(self.newest))
        return (
            f"the last good checkpoint is {path}: start again from it with a smaller optimizer.lr"
        )

    def _first_whole(self, choose: Callable[[set[str]], Storage | None]) -> Storage | None:
        """Of the checkpoints that rank 0 chooses one after another, the first that is whole.

        A damaged one of the run's own is set aside; another one was asked for by name: ValueError.
        """
        rejected: set[str] = set()
        while True:
            chosen = [""]
            if self._rank == 0:
                chosen = [str(choose(rejected) or "")]
            dist.broadcast_object_list(chosen, src=0, group=self._group)
            if not chosen[0]:
                return None
            path = Storage(chosen[0])
            damage = self._look_closely(path)
            if damage is None:
                return path
            if str(path.parent) != str(self._folder) or str(path) in rejected:
                raise ValueError(f"{damage}; write the path of another checkpoint")
            rejected.add(str(path))
            self._set_aside(path, damage)

    def _newest_own(self, rejected: set[str]) -> Storage | None:
        own = [path for path in committed(self._folder) if str(path) not in rejected]
        return own[0] if own else None

    def _choose(self, rejected: set[str]) -> Storage | None:
        """What the config means; clears away what a killed save has left. On rank 0."""
        found = find(self._config, rejected)
        for damage in found.damaged:
            self._set_aside(damage.folder, str(damage))
        for path in unfinished(self._folder):
            self._events.log(
                "leftover",
                step_of(path),
                f"{path} has no {MARKER}: its save was not completed; removed",
            )
            revoke(path)
        for path in committed(self._folder):
            with contextlib.suppress(Damaged):
                val_loss = read_state(path)["val_loss"]
                self._saved[step_of(path)] = Saved(step_of(path), val_loss)
        return found.path

    def _look_closely(self, path: Storage) -> str | None:
        """What is wrong with a checkpoint's files. Each rank reads some of them."""
        if not path.exists(MARKER):
            raise ValueError(
                f"rank {self._rank} does not see {path}, which rank 0 goes on from; "
                "write a run_dir on a file system that all machines share"
            )
        mine = ""
        try:
            files = read_manifest(path)
            check_sums(path, files, sorted(files)[self._rank :: self._world_size])
        except Damaged as damage:
            mine = str(damage)
        found: list[str] = [""] * self._world_size
        dist.all_gather_object(found, mine, group=self._group)
        return next((text for text in found if text), None)

    def _set_aside(self, path: Storage, damage: str) -> None:
        self._events.log("damaged", step_of(path), f"{damage}; looking for an older one")
        if self._rank == 0:
            try:
                reject(path, damage)
            except OSError as error:  # it is then found damaged at each start
                self._events.log("damaged", step_of(path), f"{path} could not be marked: {error}")
            self._saved.pop(step_of(path), None)

    def _load(self, path: Storage) -> Progress:
        if text := difference(path, self._config):
            raise ValueError(text)
        state = read_state(path)
        sequences = state["sequences"]
        if sequences != len(self._data.train):
            raise ValueError(
                f"data: {path} was trained on {sequences} sequences, and there are "
                f"{len(self._data.train)} now; give it the same data, or another run_dir"
            )
        store.load_run(path, self._parts, self._group)
        self.newest = state["step"]
        self._events.log("resume", self.newest, path=str(path), world_size=self._world_size)
        return Progress(**state["progress"])

    # --- saving ------------------------------------------------------------------------------

    def save(self, progress: Progress, val_loss: float | None = None) -> float:
        """Write the checkpoint of a step, or begin to; returns the seconds that training waited.

        Raises OSError at the second failure in a row.
        """
        begin = time.perf_counter()
        self._settle()
        if progress.step != self.newest:
            folder = self._folder.at(step_name(progress.step))
            one = Saved(progress.step, val_loss)
            save = _Save(folder, self._state(progress, val_loss), begin, one)
            self._start(save, store.run_tensors(self._parts), self._settings.mode)
        return time.perf_counter() - begin

    def poll(self) -> None:
        """Report a background save that has ended. Not collective."""
        if self._under_way is not None and self._under_way.future.done():
            self._report(self._under_way)

    def finish(self, progress: Progress, *, done: bool) -> None:
        """Complete all saves; of a run that is done, save the model alone where that is asked for.

        Raises OSError if the last one failed.
        """
        self._settle()
        if done and self._settings.model_only != "none":
            dtype = store.DTYPES[self._settings.model_only]
            folder = self._folder.at(f"model-{progress.step:08d}")
            save = _Save(folder, self._state(progress, None), time.perf_counter(), None)
            self._start(save, store.model_tensors(self._parts, dtype), "sync")
        if self._failures:
            raise OSError(self._failures[-1])

    def _start(self, save: _Save, tensors: store.Tensors, mode: str) -> None:
        """Save `tensors`; in the background after a copy, or at once."""
        where = {
            "storage_writer": Writer(save.folder, save.state, save.committed),
            "process_group": self._group,
        }
        if save.kept is not None and self._rank == 0:
            save.let_go = self._let_go
        self._under_way = save
        if mode == "sync":
            try:
                dcp.save(dict(tensors), **where)
                save.future.set_result(None)
            except CheckpointException as error:  # a BaseException; on all ranks
                save.future.set_exception(error)
            self._settle()
            return
        if mode == "async" or self._stager is None:
            self._stager = BlockingAsyncStager()
            if mode == "async_pinned" and not torch.cuda.is_available():
                # torch would pin the buffers that it keeps, which takes a GPU: give it others
                self._stager.state_dict_cache = self._stager.stage(tensors)
            self._stager.cache_staged_state_dict = mode == "async_pinned"
        save.future = dcp.async_save(dict(tensors), async_stager=self._stager, **where)
        save.stall = time.perf_counter() - save.begin

    def _settle(self) -> None:
        """Wait for the save that is under way, and say what came of it.

        Raises OSError at the second failure in a row, on all ranks.
        """
        save, self._under_way = self._under_way, None
        if save is None:
            return
        error = save.future.exception(timeout=self._settings.timeout)
        save.stall = save.stall or time.perf_counter() - save.begin
        self._report(save)
        if error is None:
            self._failures.clear()
            if save.kept is not None:
                self.newest = save.kept.step
            return
        self._failures.append(_why(save, error))
        if len(self._failures) >= MOST_FAILURES:
            raise OSError(f"{self._failures[-1]}; that was failure {len(self._failures)} in a row")

    def _report(self, save: _Save) -> None:
        """Tell of a save that has ended, once."""
        if save.reported or self._rank != 0:
            return
        save.reported = True
        step = save.state["step"]
        if (error := save.future.exception()) is not None:
            text = _why(save, error)
            with contextlib.suppress(Exception):  # whoever starts next clears it away
                revoke(save.folder)  # first: events.jsonl may be on the disk that it fills
            self._events.log("save_failed", step, f"{text}; the run goes on without it")
            return
        self._events.log(
            "saved" if save.kept else "saved_model",
            step,
            path=str(save.folder),
            bytes=save.bytes,
            seconds=save.seconds,
            stall_seconds=save.stall,
            let_go=save.gone,
        )
        if save.trouble:
            self._events.log("retention_failed", step, save.trouble)

    def _let_go(self, save: _Save) -> None:
        """Remove the checkpoints that this one supersedes. On rank 0, in the saving thread."""
        assert save.kept is not None
        self._saved[save.kept.step] = save.kept
        for step in superseded(list(self._saved.values()), self._settings):
            try:
                revoke(self._folder.at(step_name(step)))
            except Exception as error:  # the new one counts all the same
                save.trouble = f"the checkpoint of step {step} could not be removed: {error}"
                continue
            del self._saved[step]
            save.gone.append(step)

    def _state(self, progress: Progress, val_loss: float | None) -> dict[str, Any]:
        config = self._config
        return {
            "step": progress.step,
            "progress": asdict(progress),
            "val_loss": val_loss,
            "run_dir": str(Path(config.run_dir).absolute()),
            "world_size": self._world_size,
            "layout": {key: getattr(config, key) for key in ("pp", "dp", "replicate")}
            | {"schedule": config.schedule.name, "split": config.split.name},
            "same": must_be_the_same(config),
            "sequences": len(self._data.train),
            "torch": torch.__version__,
        }


def _why(save: _Save, error: BaseException) -> str:
    free = save.folder.parent.free()
    room = "" if free is None else f" ({units.size(free)} are free there)"
    return f"checkpoint {save.folder} could not be written{room}: {store.first_line(error)}"
