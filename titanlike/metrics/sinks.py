"""Where metrics are written. A record is a dict of one step, its floats in full precision:

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
    """Takes every record of a run. `location`: where they can be seen, for the user."""

    location: str

    def log(self, record: dict[str, Any]) -> None:
        """Take the record of one step; steps rise."""

    def flush(self) -> None:
        """Make the records durable, where a resumed run continues the file."""

    def rewind(self, step: int) -> None:
        """The run rolls back: the records after `step` will be logged again."""

    def close(self, status: str) -> None:
        """End with the run's status: completed, failed or interrupted."""


class JsonlSink:
    """metrics.jsonl: a JSON object a line, each in the file before the next step begins.

    start_step: the step that the run resumes from. Records of later steps, which will be repeated,
    and a last line truncated by a crash are dropped from an existing file first.
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
        """Sync the file to disk."""
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
            unfinished.unlink()  # of a process that was killed while rewriting the file
        if self._path.exists():
            kept = [record for record in read_jsonl(self._path) if record["step"] <= step]
            files.atomic_write_text(
                self._path, "".join(files.dumps(record) + "\n" for record in kept)
            )
        self._file = self._path.open("a", buffering=1, encoding="utf-8")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; truncated lines are skipped."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = files.loads(line)
        except ValueError:
            continue
        if isinstance(record.get("step"), int):
            records.append(record)
    return records
