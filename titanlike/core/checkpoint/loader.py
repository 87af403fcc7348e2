"""Reads checkpoints into a run: the one that it resumes from or rolls back to, or the weights that
it starts from.

Rank 0 selects the newest complete checkpoint (discovery.py); a rank checks the bytes that it reads;
a damaged checkpoint is marked, and the next older one is tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titanlike.core.checkpoint import discovery, integrity
from titanlike.core.checkpoint.discovery import Progress, Selection, step_of
from titanlike.core.checkpoint.integrity import CheckpointHeader
from titanlike.core.checkpoint.reader import read_header_on_all_ranks
from titanlike.core.checkpoint.storage import (
    DAMAGED_MARKER,
    MARKER,
    DamagedCheckpoint,
    Storage,
    UnreadableFile,
)
from titanlike.core.config.errors import ConfigError, Problem, Refused
from titanlike.core.config.files import as_record
from titanlike.core.config.schema import LAYER_AXES, Config
from titanlike.core.data.kinds import READERS, data_changed
from titanlike.core.data.sources import Data, Stream, fingerprint_changes
from titanlike.core.distributed.placement import StageState
from titanlike.core.metrics.run_files import Events, changed_keys

if TYPE_CHECKING:
    from titanlike.core.checkpoint.writer import CheckpointWriter


@dataclass(frozen=True)
class CheckpointLoader:
    """Loads checkpoints into a run. All methods are collective."""

    config: Config
    stage_states: list[StageState]
    data: Data
    fingerprint: dict[str, Any]  # identifies the data
    plain_config: dict[str, Any]  # the config as saved
    folder: Storage  # the run's checkpoints
    events: Events
    group: dist.ProcessGroup
    writer: Callable[[], CheckpointWriter]  # tracks the saved steps
    dp_rank: int

    def resume(self) -> Progress:
        """See `Checkpointer.resume`."""

        def select(rejected: set[str]) -> Selection:
            selection = discovery.select_resume(self.config, rejected, self.folder.moved)
            for path in (path for path in selection.marked if str(path) not in rejected):
                text = f"{path} is marked as damaged, and an older one is taken; "
                text += integrity.how_to_unmark(path)
                self.events.log("passed_over", step_of(path), text)
            return selection

        progress = self._load_first_intact(select)
        if dist.get_rank() == 0:
            self._delete_leftovers()
        if progress is not None:
            return progress
        if self.config.checkpoint.start_from:
            self.start_from(self.config.checkpoint.start_from)
        return Progress()

    def load(self, location: str) -> Progress:
        """Load the checkpoint at a location, or its run's newest. Raises as `resume`."""
        select = lambda _: Selection(discovery.resolve("path", location, self.folder.moved))  # noqa: E731
        progress = self._load_first_intact(select)
        assert progress is not None, "one was selected"
        return progress

    def rollback(self) -> Progress | None:
        """See `Checkpointer.rollback`."""
        newest = lambda rejected: discovery.newest_complete(self.folder, rejected)  # noqa: E731
        return self._load_first_intact(newest)

    def start_from(self, location: str) -> None:
        """Load only weights, from a location as in `checkpoint.start_from`. Raises ValueError."""
        from titanlike.core.checkpoint import state_dict
        from titanlike.hf import warm_start_hf

        settings = replace(self.config.checkpoint, start_from=location)
        ranks = self.stage_states, self.group, self.folder.moved
        if location.startswith(warm_start_hf.PREFIX):
            config = replace(self.config, checkpoint=settings)
            text = warm_start_hf.start_from_folder(config, *ranks)
        else:
            text = state_dict.warm_start(settings, *ranks)
        self.events.log("warm_start", 0, text)

    def _delete_leftovers(self) -> None:
        """Delete remains of killed saves and deletions; tell the writer which checkpoints exist."""
        if not (paths := discovery.all_steps(self.folder)):
            return
        for path in paths:
            with contextlib.suppress(ValueError, UnreadableFile):  # keep an unreadable one
                if path.exists(MARKER):
                    self.writer().saved[step_of(path)] = integrity.read_state(path)["val_loss"]
                elif not path.exists(DAMAGED_MARKER):
                    end = "deleted"
                    try:
                        integrity.delete_checkpoint(path)
                    except OSError as error:  # saving that step will try again
                        end = f"it could not be deleted: {error}"
                    text = f"{path} has no {MARKER}: its save was not completed; {end}"
                    self.events.log("leftover", step_of(path), text)

    def _load_first_intact(self, select: Callable[[set[str]], Selection]) -> Progress | None:
        """Load the first intact one of the checkpoints that rank 0 selects one after another.

        Bytes are checked while they are loaded, so damage may be found after some tensors were
        loaded; an older checkpoint then replaces all of them, or an error ends the run. A damaged
        checkpoint of this run is marked; one that the user named raises ValueError.
        """
        rejected: set[str] = set()
        while True:
            selected = [""]
            if dist.get_rank() == 0:
                selection = select(rejected)
                for error in selection.damaged:
                    self._mark_damaged(error.folder, str(error))
                selected = [str(selection.path or "")]
            dist.broadcast_object_list(selected, src=0, group=self.group)
            if not selected[0]:
                return None
            path = Storage(selected[0], self.folder.moved)
            try:
                return self._load(read_header_on_all_ranks(path, self.group, key="run_dir"))
            except DamagedCheckpoint as error:  # on all ranks
                damage = str(error)
            except UnreadableFile as error:
                raise discovery.unreadable(path, str(error)) from None
            if str(path.parent) != str(self.folder) or str(path) in rejected:
                raise ValueError(f"{damage}; write the path of another checkpoint")
            rejected.add(str(path))
            self._mark_damaged(path, damage)

    def _mark_damaged(self, path: Storage, damage: str) -> None:
        self.events.log("damaged", step_of(path), f"{damage}; trying an older one")
        if dist.get_rank() == 0:
            try:
                integrity.mark_damaged(path, damage)
            except OSError as error:  # the next launch will find the damage again
                self.events.log("damaged", step_of(path), f"{path} could not be marked: {error}")
            self.writer().saved.pop(step_of(path), None)

    def _load(self, header: CheckpointHeader) -> Progress:
        from titanlike.core.checkpoint import state_dict

        path, state = header.folder, header.state
        if problem := discovery.incompatibility(path, self.config, state):
            raise Refused(*astuple(problem))
        # other data are an error, unless the user allows them
        if changes := fingerprint_changes(state.get("data", {}), self.fingerprint):
            text = f"not what {path} was trained on ({'; '.join(changes)})"
            # validation sets may change: training does not depend on them
            sets_only = self.data.validation_sets and all(c.startswith("valid") for c in changes)
            if not sets_only and not data_changed(self.config.data):
                reason = (
                    f"{text}, so the run would not repeat or leave out the samples that it should"
                )
                fix = "data.changed=true to continue on these data, or another run_dir"
                raise ConfigError([Problem("data", "", reason, fix)])
            self.events.log("data_changed", state["step"], f"data: {text}", changes=changes)
        saved = state.get("layout", {})
        alike = all(saved.get(axis, 1) == getattr(self.config, axis) for axis in LAYER_AXES)
        state_dict.load_run(header, self.stage_states, self.group, same_layers=alike)
        if isinstance(self.data.train, Stream):
            self._restore_readers(header, self.data.train)
        newest = self.writer().newest = state["step"]
        self.events.log("resume", newest, path=str(path), world_size=dist.get_world_size())
        if changes := changed_keys(state.get("config", {}), self.plain_config):
            text = f"changed since the checkpoint of step {newest}:"
            shown = "".join(f"\n  {change}" for change in changes)
            self.events.log("changed", newest, text + shown, changes=changes)
        return as_record(state["progress"], Progress)

    def _restore_readers(self, header: CheckpointHeader, stream: Stream) -> None:
        """Load the states of a stream's readers of this dp rank."""
        from titanlike.core.checkpoint.reader import raise_on_all_ranks, read

        named = (name for name in header.tensors if name.startswith(READERS))
        shapes = {name: header.tensors[name].shape for name in named}
        try:
            with raise_on_all_ranks(self.group, Refused):
                entries = stream.wanted(shapes, self.config, self.dp_rank)
            read(header, entries, self.group)
            with raise_on_all_ranks(self.group, Refused):
                stream.restore(entries)
        except Refused as error:
            raise ConfigError([error.problem]) from None
