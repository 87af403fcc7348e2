"""A run's checkpoints, as training uses them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titanlike.checkpoint.run import last_good, resume_run, save_run
from titanlike.config.schema import Config
from titanlike.data.sources import Data
from titanlike.metrics.events import Events
from titanlike.optimization import Part


@dataclass(frozen=True)
class Progress:
    """How far a run is: what a checkpoint keeps besides tensors."""

    step: int = 0
    value: float | None = None  # last validation loss, or loss
    left_out: int = 0  # batches that rollbacks have jumped over
    guard: dict[str, Any] = field(default_factory=dict)  # see guard.Guard.state


class Saver:
    """Saves and loads the checkpoints of one run. All methods but `poll` are collective."""

    newest = 0  # step of the newest checkpoint that is complete, 0 for none

    def __init__(
        self, parts: list[Part], config: Config, data: Data, run_dir: Path, events: Events
    ) -> None:
        self._parts, self._config, self._data = parts, config, data
        self._run_dir, self._events = run_dir, events

    def resume(self) -> Progress:
        """Load what the config says to go on from."""
        state = resume_run(self._parts, self._config, self._data, self._run_dir)
        self.newest = state.get("step", 0)
        return Progress(**state.get("progress", {}))

    def save(self, progress: Progress, val_loss: float | None = None) -> bool:
        """Write a checkpoint, or begin to; False where it failed and the run may go on."""
        save_run(
            self._parts, self._config, self._data, self._run_dir, progress.step, asdict(progress)
        )
        self.newest = progress.step
        return True

    def poll(self) -> None:
        """Report a background save that has ended."""

    def go_back(self) -> Progress | None:
        """Load the newest whole checkpoint of this run; None where there is none."""
        if not self.newest:
            return None
        return self.resume()

    def way_back(self) -> str:
        """From where a run that diverged can go on, in words."""
        return last_good(self._run_dir)

    def finish(self, progress: Progress, *, done: bool) -> None:
        """Complete all saves; of a run that is done, save the model alone where that is asked for."""
