"""A run's checkpoints, as training uses them: resume and roll back here; written by writer.py.

To load, rank 0 selects the newest complete checkpoint (discovery.py); all ranks check its files,
each some of them; a damaged one is marked, and the next older one is tried.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titanlike.checkpoint import discovery
from titanlike.checkpoint.discovery import Selection, step_of
from titanlike.checkpoint.storage import (
    DAMAGED_MARKER,
    MARKER,
    DamagedCheckpoint,
    Storage,
    UnreadableFile,
)
from titanlike.config.credentials import redact_value
from titanlike.config.errors import ConfigError, Problem, Refused
from titanlike.config.files import as_record
from titanlike.config.parse import to_plain
from titanlike.config.schema import LAYER_AXES, MESH_AXES, Config
from titanlike.data.registry import data_changed
from titanlike.data.sources import Data, data_fingerprint, fingerprint_changes
from titanlike.metrics.run_files import Events, changed_keys
from titanlike.models.registry import resolve_model
from titanlike.optim.optimizer import StageState

if TYPE_CHECKING:
    from titanlike.checkpoint.integrity import CheckpointHeader
    from titanlike.checkpoint.writer import CheckpointWriter


@dataclass(frozen=True)
class Progress:
    """How far a run has come: saved beside the tensors."""

    step: int = 0
    value: float | None = None  # last validation loss, or loss
    left_out: int = 0  # batches that rollbacks have skipped
    guard: dict[str, Any] = field(default_factory=dict)  # see anomalies.AnomalyDetector.state


class Checkpointer:
    """Loads and saves the checkpoints of one run.

    All methods but `poll`, `before_update` and `close` are collective.
    """

    def __init__(
        self, stage_states: list[StageState], config: Config, data: Data, events: Events
    ) -> None:
        self._stage_states, self._config, self._data = stage_states, config, data
        self._settings, self._events = config.checkpoint, events
        self._folder = discovery.checkpoint_folder(config)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # DCP's plans are objects, which nccl would copy through GPU memory; and a background
        # save needs its own group
        timeout = timedelta(seconds=self._settings.timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._made_writer: CheckpointWriter | None = None
        if self._settings.every or self._settings.last or self._settings.model_only != "none":
            _ = self._writer  # imported here, while nobody waits for a save
        fingerprint = [data_fingerprint(data, config) if self._rank == 0 else {}]
        dist.broadcast_object_list(fingerprint, src=0, group=self._group)
        self._fingerprint = fingerprint[0]
        self._plain_config = redact_value("", to_plain(config))
        self._model = redact_value("", to_plain(resolve_model(config, data.vocab_size)))

    @property
    def _writer(self) -> CheckpointWriter:
        """Also knows what has been saved; a run without checkpoints has none."""
        if self._made_writer is None:
            from titanlike.checkpoint.writer import CheckpointWriter

            of_run = self._group, self._events, self._stage_states
            digest = self._digest if self._config.exact else None
            self._made_writer = CheckpointWriter(self._settings, self._folder, *of_run, digest)
        return self._made_writer

    def _digest(self, tensors: Mapping[str, Any], group: dist.ProcessGroup) -> str:
        from titanlike.checkpoint.digest import digest
        from titanlike.checkpoint.integrity import OPTIMIZER, RNG

        # of each rank's own, and on rank 0 what all pipeline ranks share
        of_all = f"{OPTIMIZER}step" if self._rank else ""
        saved = {n: x for n, x in tensors.items() if not n.startswith(RNG) and n != of_all}
        copies = self._config.dp * self._config.cp
        return digest(saved, self._rank % copies == 0, torch.device("cpu"), group)

    @property
    def newest(self) -> int:
        """Step of the newest committed checkpoint; 0 for none."""
        return 0 if self._made_writer is None else self._made_writer.newest

    @property
    def committed(self) -> Collection[int]:
        """Steps of the checkpoints that are there, also of a background save that has just ended.
        On rank 0."""
        return self._writer.saved.keys()

    def hold(self, held: Callable[[], Collection[int]]) -> None:
        """Keep the checkpoints of these steps, as long as they are named. On rank 0."""
        self._writer.held = held

    def tidy(self) -> None:
        """Delete what was held, and is superseded. On rank 0."""
        self._writer.tidy()

    def folder_of(self, step: int) -> Storage:
        """Where the checkpoint of a step is, or would be."""
        return self._folder.at(discovery.step_name(step))

    # --- loading -----------------------------------------------------------------------------

    def resume(self) -> Progress:
        """Load the checkpoint to resume from, or the weights to start from.

        Raises ValueError where another rank cannot see the checkpoint, where it was saved with
        other data or another model, and where every one is damaged.
        """

        def select(rejected: set[str]) -> Selection:
            selection = discovery.select_resume(self._config, rejected)
            for path in (path for path in selection.marked if str(path) not in rejected):
                from titanlike.checkpoint.integrity import repair_command

                text = f"{path} is marked as damaged, and an older one is taken; read it again: "
                again = repair_command(path)
                self._events.log("passed_over", step_of(path), text + again)
            return selection

        progress = self._load_first_intact(select)
        if self._rank == 0:
            self._delete_leftovers()
        if progress is not None:
            return progress
        if self._settings.start_from:
            self.start_from(self._settings.start_from)
        return Progress()

    def start_from(self, location: str) -> None:
        """Load weights alone, of what `checkpoint.start_from` may name. Raises ValueError."""
        from titanlike.checkpoint import hf_start, state_dict

        settings = replace(self._settings, start_from=location)
        of_run = self._stage_states, self._group
        if hf_start.is_folder(location):
            text = hf_start.start_from_folder(replace(self._config, checkpoint=settings), *of_run)
        else:
            text = state_dict.warm_start(settings, *of_run)
        self._events.log("warm_start", 0, text)

    def load(self, location: str) -> Progress:
        """Load the checkpoint at a location, or the newest of the run there. Raises as
        `resume`."""
        select = lambda _: Selection(discovery.resolve("path", location))  # noqa: E731
        progress = self._load_first_intact(select)
        assert progress is not None, "one was selected"
        return progress

    def rollback(self) -> Progress | None:
        """Load the newest intact checkpoint of this run; None where there is none."""
        self._writer.wait()
        newest = lambda rejected: discovery.newest_complete(self._folder, rejected)  # noqa: E731
        return self._load_first_intact(newest)

    def resume_hint(self) -> str:
        """Say what to do about a run that diverged; waits for the save in progress."""
        with contextlib.suppress(OSError):
            self._writer.wait()
        if not self.newest:
            return "there is no checkpoint yet: write a smaller optimizer.lr or a longer lr.warmup"
        path = self.folder_of(self.newest)
        return f"the last good checkpoint is {path}: resume from it with a smaller optimizer.lr"

    def _delete_leftovers(self) -> None:
        """Delete what killed saves and deletions have left, and note what retention may delete."""
        if not (paths := discovery.all_steps(self._folder)):
            return
        from titanlike.checkpoint import integrity

        for path in paths:
            with contextlib.suppress(ValueError, UnreadableFile):  # it stays
                if path.exists(MARKER):
                    self._writer.saved[step_of(path)] = integrity.read_state(path)["val_loss"]
                elif not path.exists(DAMAGED_MARKER):
                    end = "deleted"
                    try:
                        integrity.delete_checkpoint(path)
                    except OSError as error:  # the save of that step will try again
                        end = f"it could not be deleted: {error}"
                    text = f"{path} has no {MARKER}: its save was not completed; {end}"
                    self._events.log("leftover", step_of(path), text)

    def _load_first_intact(self, select: Callable[[set[str]], Selection]) -> Progress | None:
        """Load the first intact one of the checkpoints that rank 0 selects one after another.

        Its bytes are checked while they are loaded, so damage may be found when some tensors have
        been loaded; an older checkpoint replaces all of them, or an error ends the run. A damaged
        one of this run is marked; ValueError for one that the user named.
        """
        rejected: set[str] = set()
        while True:
            selected = [""]
            if self._rank == 0:
                selection = select(rejected)
                for error in selection.damaged:
                    self._mark_damaged(error.folder, str(error))
                selected = [str(selection.path or "")]
            dist.broadcast_object_list(selected, src=0, group=self._group)
            if not selected[0]:
                return None
            from titanlike.checkpoint.reader import read_header_on_all_ranks

            path = Storage(selected[0])
            try:
                return self._load(read_header_on_all_ranks(path, self._group, "run_dir"))
            except DamagedCheckpoint as error:  # on all ranks
                damage = str(error)
            except UnreadableFile as error:
                raise discovery.unreadable(path, str(error)) from None
            if str(path.parent) != str(self._folder) or str(path) in rejected:
                raise ValueError(f"{damage}; write the path of another checkpoint")
            rejected.add(str(path))
            self._mark_damaged(path, damage)

    def _mark_damaged(self, path: Storage, damage: str) -> None:
        self._events.log("damaged", step_of(path), f"{damage}; trying an older one")
        if self._rank == 0:
            from titanlike.checkpoint import integrity

            try:
                integrity.mark_damaged(path, damage)
            except OSError as error:  # each start will find the damage again
                self._events.log("damaged", step_of(path), f"{path} could not be marked: {error}")
            self._writer.saved.pop(step_of(path), None)

    def _load(self, header: CheckpointHeader) -> Progress:
        from titanlike.checkpoint import state_dict

        path, state = header.folder, header.state
        if problem := discovery.incompatibility(path, self._config, state):
            raise Refused(*astuple(problem))
        # other data are an error, unless they are meant
        sequences = len(self._data.train)
        changes = fingerprint_changes(state.get("data", {}), self._fingerprint)
        if changes is None:  # of an older version
            changes = [f"{sequences} sequences, were {state['sequences']}"]
            changes *= state["sequences"] != sequences
            text = f"{path} has no fingerprint of its data: only their length was compared"
            self._events.log("data_not_compared", state["step"], text)
        if changes:
            text = f"not what {path} was trained on ({'; '.join(changes)})"
            if not data_changed(self._config):
                reason = (
                    f"{text}, so the run would not repeat or leave out the samples that it should"
                )
                fix = "data.changed=true to continue on these data, or another run_dir"
                raise ConfigError([Problem("data", "", reason, fix)])
            self._events.log("data_changed", state["step"], f"data: {text}", changes=changes)
        saved = state.get("layout", {})
        alike = all(saved.get(axis, 1) == getattr(self._config, axis) for axis in LAYER_AXES)
        state_dict.load_run(header, self._stage_states, self._group, same_layers=alike)
        self._writer.newest = state["step"]
        self._events.log("resume", self.newest, path=str(path), world_size=self._world_size)
        if changes := changed_keys(state.get("config", {}), self._plain_config):
            text = f"changed since the checkpoint of step {self.newest}:"
            shown = "".join(f"\n  {change}" for change in changes)
            self._events.log("changed", self.newest, text + shown, changes=changes)
        return as_record(state["progress"], Progress)

    # --- saving ------------------------------------------------------------------------------

    def save(self, progress: Progress, val_loss: float | None = None) -> float:
        """Save a step, or start to; returns the seconds that training waited.

        Raises OSError at the second failure in a row.
        """
        begin = time.perf_counter()
        self._writer.wait()
        if progress.step != self.newest:
            folder = self.folder_of(progress.step)
            self._writer.start(folder, self._state(progress, val_loss), self._settings.mode, begin)
        return time.perf_counter() - begin

    def poll(self) -> None:
        """Report a background save that has ended. Not collective."""
        if self._made_writer is not None:
            self._made_writer.poll()

    def before_update(self) -> None:
        """Wait, before parameters change, for a save that may still be copying them."""
        if self._made_writer is not None:
            self._made_writer.before_update()

    def close(self) -> None:
        """Let go of what saving needs: threads, a process, memory."""
        if self._made_writer is not None:
            self._made_writer.close()

    def finish(self, progress: Progress, *, done: bool) -> None:
        """Complete all saves; of a run that is done, save the model alone if configured.

        Raises OSError if the last save failed.
        """
        if self._made_writer is None:
            return
        self._writer.wait()
        if done and self._settings.model_only != "none":
            folder = self._folder.at(f"model-{progress.step:08d}")
            begin, state = time.perf_counter(), self._state(progress, None)
            self._writer.start(folder, state, "sync", begin, model_only=True)
        if self._writer.failures:
            raise OSError(self._writer.failures[-1])
        if self._rank == 0:
            self._writer.tidy()

    def _state(self, progress: Progress, val_loss: float | None) -> dict[str, Any]:
        config = self._config
        return {
            "step": progress.step,
            "progress": asdict(progress),
            "val_loss": val_loss,
            "run_dir": str(Path(config.run_dir).absolute()),
            "world_size": self._world_size,
            "layout": {
                **{key: getattr(config, key) for key in (*MESH_AXES, "ep", "replicate")},
                "schedule": config.schedule.name,
                "split": config.split.name,
            },
            "same": discovery.run_identity(config),
            "sequences": len(self._data.train),
            "data": self._fingerprint,
            "config": self._plain_config,
            "model": self._model,
            "torch": torch.__version__,
        }
