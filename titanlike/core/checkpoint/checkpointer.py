"""A run's checkpoints, as training uses them: read by loader.py, written by writer.py. Each is
imported only when something is read or written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titanlike.core.checkpoint import discovery
from titanlike.core.checkpoint.discovery import Progress
from titanlike.core.checkpoint.storage import Moved, Storage
from titanlike.core.config.credentials import redact_value
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import MESH_AXES, Config
from titanlike.core.data.kinds import READERS
from titanlike.core.data.sources import Data, Stream, data_fingerprint
from titanlike.core.distributed.placement import StageState
from titanlike.core.metrics.run_files import Events
from titanlike.core.models.registry import resolve_model

if TYPE_CHECKING:
    from titanlike.core.checkpoint.loader import CheckpointLoader
    from titanlike.core.checkpoint.writer import CheckpointWriter


class Checkpointer:
    """Loads and saves the checkpoints of one run.

    All methods but `poll`, `before_update` and `close` are collective.
    """

    def __init__(
        self,
        stage_states: list[StageState],
        config: Config,
        data: Data,
        events: Events,
        dp_rank: int = 0,
        moved: Moved | None = None,
    ) -> None:
        """moved: counts what is read and written of checkpoints."""
        self._dp_rank = dp_rank
        self._stage_states, self._config, self._data = stage_states, config, data
        self._settings, self._events = config.checkpoint, events
        self.folder = discovery.checkpoint_folder(config, moved)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # objects, which nccl would copy through GPU memory; and a background save needs a group
        timeout = timedelta(seconds=self._settings.timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._made_writer: CheckpointWriter | None = None
        if self._settings.every or self._settings.last or self._settings.model_only != "none":
            self._writer.check()  # imported here, while nobody waits for a save
        fingerprint = [data_fingerprint(data, config.data) if self._rank == 0 else {}]
        dist.broadcast_object_list(fingerprint, src=0, group=self._group)
        self._fingerprint = fingerprint[0]
        self._plain_config = redact_value("", to_plain(config))
        self._model = redact_value("", to_plain(resolve_model(config, data.vocab_size)))

    @property
    def _writer(self) -> CheckpointWriter:
        """The writer, made when it is first used; it also tracks the steps that were saved."""
        if self._made_writer is None:
            from titanlike.core.checkpoint.writer import CheckpointWriter

            self._made_writer = CheckpointWriter(
                self._settings,
                self.folder,
                group=self._group,
                events=self._events,
                stage_states=self._stage_states,
                digest=self._digest if self._config.exact else None,
            )
        return self._made_writer

    def _digest(self, tensors: Mapping[str, Any], group: dist.ProcessGroup) -> str:
        from titanlike.core.checkpoint.digest import digest
        from titanlike.core.checkpoint.integrity import OPTIMIZER, RNG

        # a rank's own entries, and on rank 0 also the entries that all pipeline ranks share
        counted_once = f"{OPTIMIZER}step" if self._rank else ""
        saved = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith((RNG, READERS)) and name != counted_once
        }
        copies = self._config.dp * self._config.cp
        return digest(saved, self._rank % copies == 0, torch.device("cpu"), group)

    @property
    def newest(self) -> int:
        """Step of the newest committed checkpoint; 0 for none."""
        return 0 if self._made_writer is None else self._made_writer.newest

    def folder_of(self, step: int) -> Storage:
        """Return the folder of a step's checkpoint, existing or not."""
        return self.folder.at(discovery.step_name(step))

    # --- loading -----------------------------------------------------------------------------

    @property
    def loader(self) -> CheckpointLoader:
        """Loads one of these checkpoints, or another's weights, into the run."""
        from titanlike.core.checkpoint.loader import CheckpointLoader

        return CheckpointLoader(
            self._config,
            self._stage_states,
            self._data,
            self._fingerprint,
            self._plain_config,
            self.folder,
            self._events,
            self._group,
            lambda: self._writer,
            self._dp_rank,
        )

    def resume(self) -> Progress:
        """Load the checkpoint to resume from, or the weights to start from.

        Raises ValueError if a rank cannot see the checkpoint, if it was saved with other data or
        another model, or if every one is damaged.
        """
        named = self._settings.resume not in ("auto", "never") or bool(self._settings.start_from)
        there = [named or (self._rank == 0 and bool(discovery.all_steps(self.folder)))]
        dist.broadcast_object_list(there, src=0, group=self._group)
        return self.loader.resume() if there[0] else Progress()

    def rollback(self) -> Progress | None:
        """Load the newest intact checkpoint of this run; None if there is none."""
        self._writer.wait()
        return self.loader.rollback()

    def resume_hint(self) -> str:
        """Return advice for a run that diverged, after the save in progress."""
        with contextlib.suppress(OSError):
            self._writer.wait()
        if not self.newest:
            return "there is no checkpoint yet: write a smaller optimizer.lr or a longer lr.warmup"
        path = self.folder_of(self.newest)
        return f"the last good checkpoint is {path}: resume from it with a smaller optimizer.lr"

    # --- saving ------------------------------------------------------------------------------

    def save(self, progress: Progress, val_loss: float | None = None) -> float:
        """Save a step, or begin to; return the seconds that training waited.

        Raises OSError at the second failure in a row.
        """
        begin = time.perf_counter()
        self._writer.wait()
        if progress.step != self.newest:
            folder = self.folder_of(progress.step)
            state, more = self._state(progress, val_loss), dict[str, torch.Tensor]()
            if isinstance(self._data.train, Stream):
                more = self._data.train.saved(progress.step + progress.left_out)
            self._writer.start(folder, state, self._settings.mode, begin, more)
        return time.perf_counter() - begin

    def poll(self) -> None:
        """Report a background save that has ended. Not collective."""
        if self._made_writer is not None:
            self._made_writer.poll()

    def before_update(self) -> None:
        """Wait for a save that may still be copying parameters, before these change."""
        if self._made_writer is not None:
            self._made_writer.before_update()

    def close(self) -> None:
        """Release what saving needs: its thread and memory."""
        if self._made_writer is not None:
            self._made_writer.close()

    def finish(self, progress: Progress, *, done: bool) -> None:
        """Complete all saves; if the run is done, also save the model alone if configured.

        Raises OSError if the last save failed.
        """
        if self._made_writer is None:
            return
        self._writer.wait()
        if done and self._settings.model_only != "none":
            folder = self.folder.at(f"model-{progress.step:08d}")
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
            "data": self._fingerprint,
            "config": self._plain_config,
            "model": self._model,
            "torch": torch.__version__,
        }
