"""Writes checkpoints, synchronously or in the background from a copy in host memory.

1. `start`: tensors are copied (staging.py); a thread writes them and commits the checkpoint
   (`write_checkpoint`); then older ones are deleted (`superseded`).
2. `wait`: the next save waits for the one in progress, so that two never overlap.
3. A failed save is reported and its files are deleted, and training continues; the second failure
   in a row ends the run.

Each rank writes its own pieces and its own lines of the index; rank 0 joins them. It learns hashes
of the ranks' pieces, in a save of 1,024 ranks some seconds of its thread, to spread those that
several ranks have.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import compress
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from titanlike.core.checkpoint import state_dict
from titanlike.core.checkpoint.discovery import step_name
from titanlike.core.checkpoint.format import WORDS, SavedTensor, is_name
from titanlike.core.checkpoint.integrity import MODEL, OPTIMIZER, commit, delete_checkpoint
from titanlike.core.checkpoint.reader import raise_on_all_ranks
from titanlike.core.checkpoint.staging import Copy, HostMemory, write_pieces
from titanlike.core.checkpoint.storage import Storage, error_line
from titanlike.core.config.errors import Refused
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.device.accelerator import set_device
from titanlike.core.distributed.collectives import gather_objects, scatter_objects
from titanlike.core.distributed.placement import Blocks, StageState, blocks_of
from titanlike.core.metrics import units
from titanlike.core.metrics.run_files import Events
from titanlike.core.torch_private.accelerator import started

MAX_FAILURES = 2  # failed saves in a row that end a run
NO_TENSORS: Mapping[str, Tensor] = {}
Place = tuple[str, tuple[int, ...]]  # a piece: name and offsets


@dataclass
class Save:
    folder: Storage
    state: dict[str, Any]  # content of state.json
    begin: float
    model_only: bool
    future: Future[Any] = field(default_factory=Future)
    stall: float = 0.0  # seconds that training waited
    seconds: float = 0.0  # from begin to commit
    bytes: int = 0
    deleted: list[int] = field(default_factory=list)  # steps of superseded, deleted checkpoints
    retention_error: str = ""
    reported: bool = False


class CheckpointWriter:
    """Writes a run's checkpoints. All but `poll`, `before_update` and `close` are collective."""

    def __init__(
        self,
        settings: Checkpoint,
        folder: Storage,
        group: dist.ProcessGroup,
        events: Events,
        stage_states: list[StageState],
        digest: Callable[[state_dict.Tensors, dist.ProcessGroup], str] | None = None,
    ) -> None:
        """digest: computes a digest over what all ranks save, for state.json; collective."""
        self._digest = digest
        self._settings, self._folder, self._stage_states = settings, folder, stage_states
        self._group, self._events = group, events
        # entries that, like the optimizer's, change only in an optimizer step
        self._late = {MODEL + name for stage in stage_states for name, _ in stage.parameters()}
        self._in_progress: Save | None = None
        self._copy: Copy | None = None  # possibly in progress
        self._thread: ThreadPoolExecutor | None = None
        self._memory: HostMemory | None = None
        self._updates = 0
        # of the last save: `_keys`, and which of these pieces this rank writes
        self._assigned: tuple[np.ndarray, np.ndarray] | None = None
        # on rank 0: validation losses of the committed checkpoints, None where not validated
        self.saved: dict[int, float | None] = {}
        self.failures: list[str] = []  # since the last successful save
        self.newest = 0  # step of the newest committed checkpoint; 0 for none

    def check(self) -> None:
        """Raise Refused, on all ranks, if the model has what cannot be saved."""
        with raise_on_all_ranks(self._group, Refused):
            prepare_save(state_dict.model_tensors(self._stage_states))

    def start(
        self,
        folder: Storage,
        state: dict[str, Any],
        mode: str,
        begin: float,
        more: Mapping[str, Tensor] = NO_TENSORS,
        *,
        model_only: bool = False,
    ) -> None:
        """Save the run, or only its model; in the background after a copy, or synchronously.

        state: content of state.json; begin: `time.perf_counter()` since when training waits; more:
        further entries, which may be replicated on several ranks.
        """
        save = Save(folder, state, begin, model_only)
        if model_only:
            dtype = state_dict.DTYPES[self._settings.model_only]
            tensors = state_dict.model_tensors(self._stage_states, dtype)
        else:
            tensors = {**state_dict.run_tensors(self._stage_states), **more}
            tensors = state_dict.share_step(tensors, self._group)
            if self._digest is not None:
                state["digest"] = self._digest(tensors, self._group)
        with raise_on_all_ranks(self._group, Refused):
            prepared, copy = prepare_save(tensors), None
            keys, last = _keys(prepared.blocks), self._assigned
        self._in_progress = save
        as_before = torch.tensor(int(last is not None and np.array_equal(keys, last[0])))
        if self._group is not None:
            dist.all_reduce(as_before, dist.ReduceOp.MIN, group=self._group)
        if last is not None and as_before:  # replicas that another rank writes are not copied
            prepared = prepared.only(last[1])
        else:
            self._assigned = last = None
        if mode == "async":
            blocks = {
                place: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for place, tensor in prepared.blocks.items()
            }
            prepared = replace(prepared, blocks=blocks)
        elif mode != "sync":
            memory = self._memory = self._memory or HostMemory()

            def is_late(place: Place) -> bool:
                return place[0] in self._late or place[0].startswith(OPTIMIZER)

            copy = self._copy = Copy(prepared.blocks, memory, is_late)
            prepared = replace(prepared, blocks=copy.tensors)

        device = started()

        def write() -> None:
            if device is not None:
                # a new thread's current device is 0, where waiting for an event makes a context
                set_device(device)
            with raise_on_all_ranks(self._group):
                if copy is not None:
                    copy.finish()
            of_rank = prepared
            if last is None:
                mine = assigned(keys, self._group)
                self._assigned, of_rank = (keys, mine), prepared.only(mine)
            size = write_checkpoint(save.folder, save.state, of_rank, self._group)
            if size is None:  # another rank commits
                return
            save.seconds = time.perf_counter() - save.begin
            save.bytes = size
            if not save.model_only:
                self.saved[save.state["step"]] = save.state["val_loss"]
                save.deleted, save.retention_error = self._delete_superseded()

        if mode == "sync":
            try:
                write()
                save.future.set_result(None)
            except OSError as error:  # raised on all ranks
                save.future.set_exception(error)
            self.wait()
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        save.future = self._thread.submit(write)
        save.stall = time.perf_counter() - save.begin

    def before_update(self) -> None:
        """Wait until the save in progress has its copy, since parameters are about to change."""
        self._updates += 1
        first = self._memory is None and self._updates == 2  # optimizers have their state
        if first and self._settings.mode == "async_pinned" and self._settings.every:
            self._memory = HostMemory()
            tensors = state_dict.run_tensors(self._stage_states)
            self._memory.reserve(prepare_save(tensors).blocks.values())
        copy, self._copy = self._copy, None
        if copy is not None:
            begin = time.perf_counter()
            copy.before_update()
            if self._in_progress is not None:
                self._in_progress.stall += time.perf_counter() - begin

    def close(self) -> None:
        """Release thread and memory; after a failure, once the save in progress ends."""

        def release(_: object) -> None:
            if self._memory is not None:
                self._memory.close()
            if self._thread is not None:
                self._thread.shutdown(wait=False)

        save = self._in_progress
        if save is not None and not save.future.done():
            save.future.add_done_callback(release)
        else:
            release(None)

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
            return
        self.failures.append(_reason(save, error))
        if len(self.failures) >= MAX_FAILURES:
            raise OSError(f"{self.failures[-1]}; failure {len(self.failures)} in a row")

    def poll(self) -> None:
        """Report a background save that has ended. Not collective."""
        if self._in_progress is not None and self._in_progress.future.done():
            self._report(self._in_progress)

    def _report(self, save: Save) -> None:
        """Log a finished save, once."""
        if save.reported or dist.get_rank() != 0:
            return
        save.reported = True
        step = save.state["step"]
        if (error := save.future.exception()) is not None:
            text = _reason(save, error)
            with contextlib.suppress(Exception):  # if this fails, the next launch deletes it
                # before logging: events.jsonl may be on the same full disk
                delete_checkpoint(save.folder)
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
        """Delete checkpoints still superseded, as after a kill. On rank 0, after `wait`."""
        _, error = self._delete_superseded()
        if error:
            self._events.log("retention_failed", self.newest, error)

    def _delete_superseded(self) -> tuple[list[int], str]:
        """Delete superseded checkpoints; return their steps and an error text. On rank 0."""
        deleted, problem = [], ""
        for step in superseded(self.saved, self._settings):
            try:
                delete_checkpoint(self._folder.at(step_name(step)))
            except Exception as error:  # the new checkpoint is complete nevertheless
                problem = f"the checkpoint of step {step} could not be deleted: {error}"
            else:
                del self.saved[step]
                deleted.append(step)
        return deleted, problem


def _reason(save: Save, error: BaseException) -> str:
    free = save.folder.parent.free()
    note = "" if free is None else f" ({units.size(free)} free)"
    return f"checkpoint {save.folder} could not be written{note}: {error_line(error)}"


def superseded(saved: Mapping[int, float | None], settings: Checkpoint) -> list[int]:
    """Return the steps that `keep`, `keep_every` and `keep_best` delete, oldest first; never the
    newest.

    saved: step -> validation loss.
    """
    if settings.keep == 0:
        return []
    steps = sorted(saved)
    retained = {*steps[-settings.keep :]}
    if settings.keep_every:
        retained |= {step for step in steps if step % settings.keep_every == 0}
    validated = [
        (loss, step) for step, loss in saved.items() if loss is not None and isfinite(loss)
    ]
    # among equal losses the earlier step counts as better
    retained |= {step for _, step in sorted(validated)[: settings.keep_best]}
    return [step for step in steps if step not in retained]


# --- one save on all ranks ------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparedSave:
    """The pieces that this rank has."""

    tensors: dict[str, SavedTensor]
    blocks: dict[Place, Tensor]

    def only(self, mine: np.ndarray) -> PreparedSave:
        """Return those that this rank writes. mine: bool [pieces]."""
        return replace(self, blocks=dict(compress(self.blocks.items(), mine)))


def prepare_save(tensors: Mapping[str, Tensor | Blocks]) -> PreparedSave:
    """Return what this rank has of these entries. Raises Refused for what cannot be saved."""
    described, blocks = {}, dict[Place, Tensor]()
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in WORDS or not is_name(name):
            odd = f"is of {dtype}, which safetensors cannot hold"
            odd = odd if is_name(name) else "has a name that cannot be saved"
            fix = "checkpoint.every=0 checkpoint.last=false checkpoint.model_only=none"
            raise Refused("checkpoint", "", f"{name:.80} {odd}", fix)
        described[name] = SavedTensor(name, dtype, tuple(tensor.shape))
        for offsets, block in blocks_of(tensor).items():
            if block.numel() or not described[name].numel:
                blocks[name, tuple(offsets) if block.numel() else (0,) * block.dim()] = block
    return PreparedSave(described, blocks)


def write_checkpoint(
    folder: Storage,
    state: dict[str, Any],
    save: PreparedSave,
    group: dist.ProcessGroup | None,
) -> int | None:
    """Write a checkpoint and commit it; return its size in bytes on rank 0. Collective.

    state: content of state.json; save: what this rank writes. A save that fails on any rank fails
    on all: raises OSError.
    """
    rank, size = 0 if group is None else dist.get_rank(group), None
    # 1. rank 0 creates the folder
    with raise_on_all_ranks(group):
        if rank == 0:
            # left by a killed save, or by a run that restarted from an earlier step
            delete_checkpoint(folder)
            folder.make()
    # 2. each rank writes its files
    with raise_on_all_ranks(group):
        blocks = save.blocks.items()
        pieces = ((save.tensors[name], offsets, block) for (name, offsets), block in blocks)
        written = write_pieces(folder, rank, pieces)
    # 3. rank 0 writes the index and commits
    of_ranks = gather_objects(written, group)
    with raise_on_all_ranks(group):
        if rank == 0:
            size = commit(folder, [file for files in of_ranks for file in files], state)
    return size


def _keys(blocks: Mapping[Place, Tensor]) -> np.ndarray:
    """Return two hashes of each piece's place, and its bytes: uint64 [pieces, 3]. Of 1,024 ranks
    with a thousand pieces each 24 MB; names and offsets would be a minute of pickling."""
    digests = (xxhash.xxh3_128_digest(repr(place).encode()) for place in blocks)
    keys = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
    sizes = np.array([block.nbytes for block in blocks.values()], np.uint64)
    return np.concatenate([keys, sizes[:, None]], 1)


def assigned(keys: np.ndarray, group: dist.ProcessGroup | None) -> np.ndarray:
    """Return which of its pieces this rank writes: bool [pieces]. Collective."""
    of_ranks, writes = gather_objects(keys, group), list[np.ndarray]()
    with raise_on_all_ranks(group):
        if group is None or dist.get_rank(group) == 0:
            writes = assign(of_ranks)
    return scatter_objects(writes, group)


def assign(keys: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return, for each rank, which of its pieces it writes: bool [pieces]. A piece of several ranks
    is written by the one that has least to write, the largest pieces first. keys: see `_keys`."""
    ranks = np.repeat(np.arange(len(keys)), [len(each) for each in keys])
    first, second, sizes = np.concatenate(keys).T
    order = np.lexsort((second, first))
    same = (first[order][1:] == first[order][:-1]) & (second[order][1:] == second[order][:-1])
    begins = np.flatnonzero(np.concatenate([[True], ~same])) if len(order) else np.zeros(0, int)
    ends = np.append(begins[1:], len(order))
    several = ends - begins > 1  # chosen by numpy: a loop over millions takes seconds
    writes, alone = np.zeros(len(order), bool), order[begins[~several]]
    writes[alone] = True
    load = np.bincount(ranks[alone], sizes[alone], len(keys))
    shared = [order[b:e] for b, e in zip(begins[several], ends[several], strict=True)]
    for copies in sorted(shared, key=lambda copies: -int(sizes[copies[0]])):
        chosen = copies[np.argmin(load[ranks[copies]])]
        writes[chosen] = True
        load[ranks[chosen]] += sizes[chosen]
    return np.split(writes, np.cumsum([len(each) for each in keys])[:-1])
