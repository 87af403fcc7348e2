"""Where metrics go. A record is a plain dict of one step, its floats in full precision:

step loss grad_norm lr tokens tokens_per_second step_seconds memory_bytes, and where known mfu,
val_loss. `tokens` counts from the start of the run; seconds and bytes are plain units.
Tokens are counted as batch_size x seq_len a step, padding of shorter samples included.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from titanlike.config import files


class Sink(Protocol):
    """Takes every record of a run. `location` says in a few words where they can be seen."""

    location: str

    def log(self, record: dict[str, Any]) -> None:
        """Take the record of one step; steps rise."""

    def flush(self) -> None:
        """Make durable what was logged, where the sink is a file that a run goes on from."""

    def rewind(self, step: int) -> None:
        """The run goes back: the records after `step` will come again, changed."""

    def close(self, status: str) -> None:
        """End with the run's status: completed, failed or interrupted."""


class JsonlSink:
    """metrics.jsonl: a JSON object a line, each in the file before the next step begins.

    `start_step` is the step that the run goes on from. Records of later steps, which the run is
    going to repeat, and a last line torn by a crash are dropped from an existing file first.
    Raises OSError where the file cannot be written.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self.location = str(path)
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open_after(start_step)

    def log(self, record: dict[str, Any]) -> None:
        """Append the record."""
        self._file.write(files.dumps(record) + "\n")

    def flush(self) -> None:
        """Have the records on the disk."""
        os.fsync(self._file.fileno())

    def rewind(self, step: int) -> None:
        """Drop the records after `step`."""
        self._file.close()
        self._open_after(step)

    def close(self, status: str) -> None:
        """Close the file."""
        self._file.close()

    def _open_after(self, step: int) -> None:
        for unfinished in self._path.parent.glob(f".{self._path.name}.*"):
            unfinished.unlink()  # of a process that was killed right here
        if self._path.exists():
            kept = [record for record in read_jsonl(self._path) if record["step"] <= step]
            files.atomic_write_text(
                self._path, "".join(files.dumps(record) + "\n" for record in kept)
            )
        self._file = self._path.open("a", buffering=1, encoding="utf-8")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, whole lines only: a run may be writing it, or have died."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = files.loads(line)
        except ValueError:
            continue
        if isinstance(record.get("step"), int):
            records.append(record)
    return records
