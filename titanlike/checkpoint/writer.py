"""Writes checkpoints: at once, or in the background from a copy in memory.

1. `start`: it is planned which rank writes what; the tensors are copied (staging.py); a thread writes
   them, by itself or through a process of its own (writer_process.py), and commits the checkpoint
   (save.py); then older ones are deleted (`superseded`).
2. `wait`: the next save waits for the one in progress: two never overlap.
3. A failed save is reported and its files are deleted, and training continues; the second failure
   in a row ends it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlike.checkpoint.discovery import step_name
from titanlike.checkpoint.integrity import delete_checkpoint
from titanlike.checkpoint.reader import error_line
from titanlike.checkpoint.save import (
    CachedSavePlan,
    PreparedSave,
    Tensors,
    prepare_save,
    write_checkpoint,
)
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_file import write_tensors
from titanlike.config.schema import Checkpoint
from titanlike.metrics import units
from titanlike.metrics.run_files import Events

if TYPE_CHECKING:
    from titanlike.checkpoint.staging import Copy, HostMemory
    from titanlike.checkpoint.writer_process import WriterProcess

MAX_FAILURES = 2  # saves in a row


@dataclass
class Save:
    folder: Storage
    state: dict[str, Any]  # for state.json
    model_only: bool = False
    begin: float = field(default_factory=time.perf_counter)
    future: Future[Any] = field(default_factory=Future)
    prepared: PreparedSave | None = None
    stall: float = 0.0  # seconds that training waited
    seconds: float = 0.0  # until it was committed
    bytes: int = 0
    deleted: list[int] = field(default_factory=list)  # steps of checkpoints that it superseded
    retention_error: str = ""
    reported: bool = False


class CheckpointWriter:
    """Writes a run's checkpoints. All methods but `poll`, `tidy`, `before_update` and `close` are
    collective."""

    def __init__(
        self,
        settings: Checkpoint,
        folder: Storage,
        group: dist.ProcessGroup,
        events: Events,
        is_late: Callable[[str], bool],
    ) -> None:
        """is_late: whether an entry is changed by nothing but an optimizer's step."""
        self._settings, self._folder = settings, folder
        self._group, self._events, self._is_late = group, events, is_late
        self._plan: CachedSavePlan | None = None  # of the last save of the run's state
        self._in_progress: Save | None = None
        self._copy: Copy[MetadataIndex] | None = None  # that may be in progress
        self._thread: ThreadPoolExecutor | None = None
        self._memory: HostMemory | None = None
        self._process: WriterProcess | None = None
        # on rank 0: validation losses of the committed checkpoints, by step; None where not validated
        self.saved: dict[int, float | None] = {}
        self.failures: list[str] = []  # since the last save that succeeded
        self.newest = 0  # step of the newest committed checkpoint; 0 for none

    def start(self, save: Save, tensors: Tensors, mode: str) -> None:
        """Save `tensors`; in the background after a copy, or at once."""
        prepared = prepare_save(tensors, None if save.model_only else self._plan, self._group)
        save.prepared, self._in_progress = prepared, save
        copy, write_file = None, write_tensors
        if mode == "async":
            prepared.tensors = {
                index: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for index, tensor in prepared.tensors.items()
            }
        elif mode != "sync":
            from titanlike.checkpoint import staging

            memory = self._memory = self._memory or staging.HostMemory(
                shared=mode == "async_process"
            )
            if mode == "async_process":
                from titanlike.checkpoint.writer_process import WriterProcess

                self._process = self._process or WriterProcess(memory, self._settings.timeout)
                self._process.start()
                write_file = self._process.write
            is_late = lambda index: self._is_late(index.fqn)  # noqa: E731
            copy = self._copy = staging.Copy(prepared.tensors, memory, is_late)
            prepared.tensors = copy.tensors

        def write() -> None:
            if copy is not None:
                copy.finish()
            files = write_checkpoint(save.folder, save.state, prepared, self._group, write_file)
            if files is None:  # another rank commits
                return
            save.seconds = time.perf_counter() - save.begin
            save.bytes = sum(size for size, _ in files.values())
            if not save.model_only:
                self.saved[save.state["step"]] = save.state["val_loss"]
                save.deleted, save.retention_error = self._delete_superseded()

        if mode == "sync":
            try:
                write()
                save.future.set_result(None)
            except OSError as error:  # on all ranks
                save.future.set_exception(error)
            self.wait()
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        save.future = self._thread.submit(write)
        save.stall = time.perf_counter() - save.begin

    def before_update(self) -> None:
        """Wait until the save in progress has its copy: parameters are about to change."""
        copy, self._copy = self._copy, None
        if copy is not None:
            begin = time.perf_counter()
            copy.before_update()
            if self._in_progress is not None:
                self._in_progress.stall += time.perf_counter() - begin

    def close(self) -> None:
        """Let go of thread, process and memory; after a failure, once the save in progress ends."""
        save = self._in_progress
        if save is not None and not save.future.done():
            save.future.add_done_callback(lambda _: self._release())
        else:
            self._release()

    def _release(self) -> None:
        if self._process is not None:
            self._process.close()
        if self._memory is not None:
            self._memory.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the save in progress, and report it.

        Raises OSError at the second failure in a row, on all ranks.
        """
        save, self._in_progress = self._in_progress, None
        if save is None:
            return
        limit = self._settings.timeout
        try:
            error = save.future.exception(timeout=limit)
        except TimeoutError:
            slow = f"it took more than checkpoint.timeout={limit:g} s"
            raise OSError(_reason(save, TimeoutError(slow))) from None
        save.stall = save.stall or time.perf_counter() - save.begin
        self._report(save)
        if error is None:
            self.failures.clear()
            if not save.model_only:
                self.newest = save.state["step"]
                self._plan = save.prepared.plan if save.prepared else None
            return
        self._plan = None
        self.failures.append(_reason(save, error))
        if len(self.failures) >= MAX_FAILURES:
            raise OSError(f"{self.failures[-1]}; failure {len(self.failures)} in a row")

    def poll(self) -> None:
        """Report a background save that has ended. Not collective."""
        if self._in_progress is not None and self._in_progress.future.done():
            self._report(self._in_progress)

    def _report(self, save: Save) -> None:
        """Log a save that has ended, once."""
        if save.reported or dist.get_rank() != 0:
            return
        save.reported = True
        step = save.state["step"]
        if (error := save.future.exception()) is not None:
            text = _reason(save, error)
            with contextlib.suppress(Exception):  # the next start deletes it
                delete_checkpoint(save.folder)  # first: events.jsonl may be on the same full disk
            self._events.log("save_failed", step, f"{text}; training continues without it")
            return
        self._events.log(
            "saved_model" if save.model_only else "saved",
            step,
            path=str(save.folder),
            bytes=save.bytes,
            seconds=save.seconds,
            stall_seconds=save.stall,
            let_go=save.deleted,
        )
        if save.retention_error:
            self._events.log("retention_failed", step, save.retention_error)

    def tidy(self) -> None:
        """Delete what is still superseded, as where a start was killed in between. On rank 0, after
        `wait`."""
        _, error = self._delete_superseded()
        if error:
            self._events.log("retention_failed", self.newest, error)

    def _delete_superseded(self) -> tuple[list[int], str]:
        """The steps that are deleted, and what went wrong. On rank 0, in the thread that saves."""
        deleted, problem = [], ""
        for step in superseded(self.saved, self._settings):
            try:
                delete_checkpoint(self._folder.at(step_name(step)))
            except Exception as error:  # the new one is complete all the same
                what = f"the checkpoint of step {step}"
                problem = f"{what} could not be deleted: {error}"
            else:
                del self.saved[step]
                deleted.append(step)
        return deleted, problem


def _reason(save: Save, error: BaseException) -> str:
    free = save.folder.parent.free()
    note = "" if free is None else f" ({units.size(free)} free)"
    return f"checkpoint {save.folder} could not be written{note}: {error_line(error)}"


def superseded(saved: Mapping[int, float | None], settings: Checkpoint) -> list[int]:
    """The steps that `keep`, `keep_every` and `keep_best` delete, oldest first; never the newest.

    saved: validation losses by step.
    """
    if settings.keep == 0:
        return []
    steps = sorted(saved)
    kept = {*steps[-settings.keep :]}
    if settings.keep_every:
        kept |= {step for step in steps if step % settings.keep_every == 0}
    validated = [
        (loss, step) for step, loss in saved.items() if loss is not None and isfinite(loss)
    ]
    # of equal ones the earlier is the best
    kept |= {step for _, step in sorted(validated)[: settings.keep_best]}
    return [step for step in steps if step not in kept]
