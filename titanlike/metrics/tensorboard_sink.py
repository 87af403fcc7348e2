"""TensorBoard event files in run_dir/tensorboard."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def tensorboard_problem() -> str | None:
    """Why `logger=tensorboard` cannot work here, or None. Imports nothing."""
    if importlib.util.find_spec("tensorboard") is None:
        return (
            "logger=tensorboard: the package tensorboard is missing; write logger=none, or install "
            "it first: pip install 'titanlike[tensorboard]'"
        )
    return None


class TensorBoardSink:
    """A scalar for every number of a record, over steps.

    Points of an earlier attempt beyond `start_step` are hidden by TensorBoard.
    Raises ValueError where the package is missing.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        if problem := tensorboard_problem():
            raise ValueError(problem)
        from torch.utils.tensorboard import SummaryWriter  # late: torch, for this sink alone

        folder = Path(run_dir) / "tensorboard"
        self.location = f"tensorboard --logdir {folder}"
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def log(self, record: dict[str, Any]) -> None:
        """Write the record's numbers."""
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, global_step=record["step"])

    def flush(self) -> None:
        """Nothing: a resumed run does not read it."""

    def rewind(self, step: int) -> None:
        """Nothing: repeated steps are drawn again."""

    def close(self, status: str) -> None:
        """Flush and close the event file."""
        self._writer.close()
