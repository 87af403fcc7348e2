"""Destinations of metrics. A record is a dict of one step, with floats in full precision:

step loss grad_norm lr tokens time tokens_per_second step_seconds memory_bytes, and if available
memory_reserved_bytes, mfu, val_loss, data_seconds; with several ranks busy_seconds (mean),
busiest_rank, busiest_seconds; with experts busiest_expert, idlest_expert, dropped.

`time`: seconds since the epoch, after the step. `tokens`: since the start of the run, batch_size x
seq_len per step, padding included; data without tokens have samples and samples_per_second instead.
Lists (microbatch_losses) and dicts are name/index or name/key in TensorBoard, W&B and the report.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlike.core.config import files
from titanlike.core.metrics.run_files import AppendedFile
from titanlike.core.metrics.summary import flat_record, is_number, parse_records


class Sink:
    """A destination of a run's records. Methods that a sink does not override do nothing."""

    location = ""  # tells the user where to look

    def log(self, record: dict[str, Any]) -> None:
        """Log the record of one step; steps increase."""

    def note(self, name: str, text: str) -> None:
        """Log a text about the run."""

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Log a table at a step."""

    def flush(self) -> None:
        """Make the records durable, if a resumed run continues the same file."""

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: the run rolls back and logs these steps again."""

    def close(self, status: str) -> None:
        """Finish with the run's status: completed, failed or interrupted."""


class JsonlSink(Sink):
    """metrics.jsonl: one JSON object per line, written before the next step begins.

    start_step: the step that the run resumes from. Records of later steps, which will be repeated,
    and a truncated last line are first removed from an existing file. Raises OSError, naming the
    file, if it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        start_step: int = 0,
        redone: Callable[[int, float], object] = lambda *_: None,
    ) -> None:
        """redone: called with the number of removed records and the seconds of their steps."""
        self.location = str(path)
        self._path, self._redone = path, redone
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open_after(start_step)

    def log(self, record: dict[str, Any]) -> None:
        self._file.write(files.dumps(record))

    def flush(self) -> None:
        self._file.sync()

    def rewind(self, step: int) -> None:
        self._file.close()
        self._open_after(step)

    def close(self, status: str) -> None:
        self._file.close()

    def _open_after(self, step: int) -> None:
        for unfinished in self._path.parent.glob(f".{self._path.name}.*"):
            unfinished.unlink(missing_ok=True)  # a process was killed while rewriting the file
        records = []
        if self._path.exists():
            existing = read_jsonl(self._path)
            records = [record for record in existing if record["step"] <= step]
            if later := [record for record in existing if record["step"] > step]:
                seconds = (r["step_seconds"] for r in later if is_number(r, "step_seconds"))
                self._redone(len(later), sum(seconds))
            files.atomic_write_text(self._path, "".join(files.dumps(r) + "\n" for r in records))
        self._file = AppendedFile(self._path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl, skipping truncated lines."""
    with files.open_regular(path) as file:
        return list(parse_records(file.read().splitlines()))


def with_prefixes(record: dict[str, Any]) -> dict[str, Any]:
    """Rename a record's keys to the groups of W&B and TensorBoard: train/loss, val/loss."""
    return {
        f"val/{name[4:]}" if name.startswith("val_") else f"train/{name}": value
        for name, value in flat_record(record).items()
        if name not in ("step", "time")  # both add these themselves
    }
