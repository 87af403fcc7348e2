"""Writes checkpoints, synchronously or in the background from a copy in host memory.

1. `start`: ranks plan who writes what; tensors are copied (staging.py); a thread writes them,
   itself or through a separate process, and commits the checkpoint (`write_checkpoint`); then older
   ones are deleted (`superseded`).
2. `wait`: the next save waits for the one in progress, so that two never overlap.
3. A failed save is reported and its files are deleted, and training continues; the second failure
   in a row ends the run.

DCP's save plan goes from all ranks to rank 0 and back, which takes rank 0 some 20 seconds for 1,024
ranks with a few hundred tensors each. The plan depends only on names, shapes and layout: as long as
these are unchanged on every rank, each reuses its own part of the last plan, and rank 0 the
`.metadata` that it wrote. torch's planner can cache plans, too (`enable_plan_caching`), but in
class attributes: two runs in one process, as in a sweep, would use each other's plans.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from titanlike.checkpoint import state_dict
from titanlike.checkpoint.discovery import step_name
from titanlike.checkpoint.integrity import (
    MODEL,
    OPTIMIZER,
    Manifest,
    check_sizes,
    checksum,
    commit,
    delete_checkpoint,
    dump_checksums,
)
from titanlike.checkpoint.reader import raise_on_all_ranks
from titanlike.checkpoint.staging import Copy, HostMemory, WriterProcess, WrittenFile, write_tensors
from titanlike.checkpoint.storage import CHUNKS, METADATA, DamagedCheckpoint, Storage, error_line
from titanlike.config.schema import Checkpoint
from titanlike.device.accelerator import set_device
from titanlike.distributed.collectives import gather_objects, scatter_objects
from titanlike.distributed.placement import StageState
from titanlike.metrics import units
from titanlike.metrics.run_files import Events
from titanlike.torch_private.accelerator import started
from titanlike.torch_private.distributed_checkpoint import Blocks, describe_files
from titanlike.torch_private.dtensor import local

MAX_FAILURES = 2  # failed saves in a row that end a run
NO_TENSORS: Mapping[str, Tensor] = {}
WriteFile = Callable[[Storage, str, Iterable[Tensor]], WrittenFile]


@dataclass
class Save:
    folder: Storage
    state: dict[str, Any]  # content of state.json
    begin: float
    model_only: bool
    future: Future[Any] = field(default_factory=Future)
    plan: CachedSavePlan | None = None  # cached once the save has succeeded
    stall: float = 0.0  # seconds that training waited
    seconds: float = 0.0  # from begin to commit
    bytes: int = 0
    deleted: list[int] = field(default_factory=list)  # steps of superseded, deleted checkpoints
    retention_error: str = ""
    reported: bool = False


class CheckpointWriter:
    """Writes a run's checkpoints. All methods except `poll`, `tidy`, `before_update` and `close`
    are collective."""

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
        self._plan: CachedSavePlan | None = None  # the plan of the last save of the run's state
        self._in_progress: Save | None = None
        self._copy: Copy | None = None  # possibly in progress
        self._thread: ThreadPoolExecutor | None = None
        self._memory: HostMemory | None = None
        self._process: WriterProcess | None = None
        # on rank 0: validation losses of the committed checkpoints, by step; None where not
        # validated
        self.saved: dict[int, float | None] = {}
        self.failures: list[str] = []  # since the last successful save
        self.newest = 0  # step of the newest committed checkpoint; 0 for none
        # on rank 0: returns steps whose checkpoints another process reads, which must stay
        self.held: Callable[[], Collection[int]] = tuple

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
            tensors, last = state_dict.model_tensors(self._stage_states, dtype), None
        else:
            tensors = {**state_dict.run_tensors(self._stage_states), **more}
            tensors, last = state_dict.share_step(tensors, self._group), self._plan
            if self._digest is not None:
                state["digest"] = self._digest(tensors, self._group)
        prepared = prepare_save(tensors, last, self._group)
        save.plan, self._in_progress = prepared.plan, save
        copy, write_file = None, write_tensors
        if mode == "async":
            prepared.tensors = {
                index: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for index, tensor in prepared.tensors.items()
            }
        elif mode != "sync":
            shared = mode == "async_process"
            memory = self._memory = self._memory or HostMemory(shared=shared)
            if shared:
                self._process = self._process or WriterProcess(memory, self._settings.timeout)
                self._process.start()
                write_file = self._process.write

            def is_late(index: MetadataIndex) -> bool:
                return index.fqn in self._late or index.fqn.startswith(OPTIMIZER)

            copy = self._copy = Copy(prepared.tensors, memory, is_late)
            prepared.tensors = copy.tensors

        device = started()

        def write() -> None:
            if device is not None:
                # a new thread's current device is 0, where waiting for an event would create a context
                set_device(device)
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
            except OSError as error:  # raised on all ranks
                save.future.set_exception(error)
            self.wait()
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        save.future = self._thread.submit(write)
        save.stall = time.perf_counter() - save.begin

    def before_update(self) -> None:
        """Wait until the save in progress has its copy, since parameters are about to change."""
        copy, self._copy = self._copy, None
        if copy is not None:
            begin = time.perf_counter()
            copy.before_update()
            if self._in_progress is not None:
                self._in_progress.stall += time.perf_counter() - begin

    def close(self) -> None:
        """Release thread, process and memory; after a failure, once the save in progress ends."""

        def release(_: object) -> None:
            for resource in (self._process, self._memory):
                if resource is not None:
                    resource.close()
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
                self.newest, self._plan = save.state["step"], save.plan
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
        """Delete checkpoints that are still superseded, for example after a kill. On rank 0, after
        `wait`."""
        _, error = self._delete_superseded()
        if error:
            self._events.log("retention_failed", self.newest, error)

    def _delete_superseded(self) -> tuple[list[int], str]:
        """Delete superseded checkpoints; return their steps and an error text. On rank 0, in the
        saving thread."""
        deleted, problem = [], ""
        held = self.held()
        for step in superseded(self.saved, self._settings):
            if step in held:
                continue
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


@dataclass
class CachedSavePlan:
    """The plan of a successful save, reused by later ones."""

    signature: list[Any]  # what the plan depends on of this rank's tensors
    items: list[MetadataIndex] = field(default_factory=list)  # what this rank writes, in order
    ends: list[int] = field(default_factory=list)  # end offsets of the chunks in this rank's file
    metadata: bytes = b""  # on rank 0: content of `.metadata`


@dataclass
class PreparedSave:
    """A plan, and the tensors that this rank may write."""

    plan: CachedSavePlan
    tensors: dict[MetadataIndex, Tensor]  # may be replaced by copies before they are written
    local_plan: SavePlan | None  # None: every rank uses its cached plan


def prepare_save(
    tensors: Mapping[str, Tensor | Blocks],
    last: CachedSavePlan | None,
    group: dist.ProcessGroup | None,
) -> PreparedSave:
    """Plan what this rank may write. Collective; without a group, for this process alone.

    last: the previous save's plan; None if it must not be reused.
    """
    signature: list[Any] = []
    for name, tensor in tensors.items():
        layout: Any = None
        if isinstance(tensor, DTensor):
            layout = tensor.device_mesh, tensor.placements
        elif isinstance(tensor, Blocks):
            layout = [(offsets, block.shape) for offsets, block in tensor.blocks.items()]
        signature.append((name, tensor.shape, tensor.dtype, layout))
    unchanged = torch.tensor(int(last is not None and last.signature == signature))
    if group is not None:
        dist.all_reduce(unchanged, dist.ReduceOp.MIN, group=group)
    if unchanged and last is not None:
        plan, local_plan, items = last, None, last.items
    else:
        plan = CachedSavePlan(signature)
        local_plan = create_default_local_save_plan(dict(tensors), _rank(group) == 0)
        items = [item.index for item in local_plan.items]
    chunks = {}
    for item in items:
        tensor = tensors[item.fqn]
        if isinstance(tensor, Blocks):
            assert item.offset is not None
            chunks[item] = tensor.blocks[item.offset]
        else:
            chunks[item] = local(tensor)
    return PreparedSave(plan, chunks, local_plan)


def write_checkpoint(
    folder: Storage,
    state: dict[str, Any],
    save: PreparedSave,
    group: dist.ProcessGroup | None,
    write_file: WriteFile = write_tensors,
) -> Manifest | None:
    """Write a checkpoint and commit it; return its files on rank 0. Collective.

    state: content of state.json. A save that fails on any rank fails on all: raises OSError.
    """
    rank, plan, cached = _rank(group), save.plan, save.local_plan is None
    # 1. rank 0 creates the folder and merges the plans
    local_plans = [] if cached else gather_objects(save.local_plan, group)
    plans: list[SavePlan] = []
    metadata: Metadata | None = None
    files: Manifest | None = None
    with raise_on_all_ranks(group):
        if rank == 0:
            # left by a killed save, or by a run that restarted from an earlier step
            delete_checkpoint(folder)
            folder.make()
            if local_plans:
                plans, metadata = global_plan(local_plans)
    if not cached:
        items = [[item.index for item in part.items] for part in plans]
        plan.items = scatter_objects(items, group)
    # 2. each rank writes its file
    with raise_on_all_ranks(group):
        name = f"__{rank}_0.distcp"
        written = write_file(folder, name, (save.tensors[item] for item in plan.items))
        if cached and plan.ends != written.ends:
            raise RuntimeError(f"{name} has other places than in the save before")
        plan.ends = written.ends
    # 3. rank 0 writes the description and commits
    all_written = gather_objects(written, group)
    with raise_on_all_ranks(group):
        if rank == 0:
            if metadata is not None:
                plan.metadata = describe(metadata, plans, all_written)
            files = {file.name: (file.size, file.checksum) for file in all_written}
            checksums = dump_checksums({file.name: (file.ends, file.sums) for file in all_written})
            for name, data in ((METADATA, plan.metadata), (CHUNKS, checksums)):
                folder.write(name, data)
                files[name] = (len(data), checksum(data))
            try:
                check_sizes(folder, files)
            except (
                DamagedCheckpoint
            ) as damage:  # a file written by another rank is not visible here
                raise OSError(
                    f"{damage.file} {damage.reason}; is {folder.parent} on a file system that "
                    "all machines share?"
                ) from None
            commit(folder, files, state)
    return files


def global_plan(local_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Merge the ranks' plans; return each rank's plan and the description of all tensors."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, metadata = planner.create_global_plan(local_plans)
    # torch's planner writes this for a flat state dict, and its converters need it
    metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
    return plans, metadata


def describe(metadata: Metadata, plans: list[SavePlan], written: list[WrittenFile]) -> bytes:
    """Return the content of `.metadata`, equal in each save of a plan."""
    places = [
        (item.index, file.name, begin, end - begin)
        for plan, file in zip(plans, written, strict=True)
        for item, begin, end in zip(plan.items, [0, *file.ends[:-1]], file.ends, strict=True)
    ]
    return pickle.dumps(describe_files(metadata, places))


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)
