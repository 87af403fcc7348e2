"""Metrics as TensorBoard event files, with `logger=tensorboard`."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.metrics.sinks import Sink, with_prefixes


def tensorboard_problem() -> Problem | None:
    """The problem of `logger=tensorboard` if the package is missing, else None. Does not import it."""
    if importlib.util.find_spec("tensorboard") is not None:
        return None
    fix = "logger=none, or install it first: pip install 'titanlike[tensorboard]'"
    return Problem("logger", "tensorboard", "the package tensorboard is missing", fix)


class TensorBoardSink(Sink):
    """Event files in run_dir/tensorboard: a scalar for every number of a record, by step.

    TensorBoard hides points of earlier attempts after `start_step`. Raises ConfigError if the
    package is missing.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        if problem := tensorboard_problem():
            raise ConfigError([problem])
        self._folder = str(Path(run_dir) / "tensorboard")
        self.location = f"tensorboard --logdir {shlex.quote(self._folder)}"
        self._open_after(start_step)

    def _open_after(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only this sink needs torch

        self._writer = SummaryWriter(self._folder, purge_step=step + 1)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._open_after(step)

    def log(self, record: dict[str, Any]) -> None:
        for name, value in with_prefixes(record).items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, global_step=record["step"])

    def note(self, name: str, text: str) -> None:
        self._writer.add_text(name, text)

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        texts = ("".join(text for text in row.values() if isinstance(text, str)) for row in rows)
        cells = ("\n".join(f"    {line}" for line in text.splitlines()) for text in texts)
        self._writer.add_text(name, "\n\n".join(cells), global_step=step)

    def close(self, status: str) -> None:
        self._writer.close()
