"""events.jsonl: the events of a run, a JSON object a line, never truncated.

{"time": seconds since the epoch, "event": "rollback", "step": 120, ...}
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.config.credentials import redact
from titanlike.metrics.run_files import append_line


class Events:
    """Appends to run_dir/events.jsonl and prints lines by `say`, which is None on ranks other than 0."""

    def __init__(self, run_dir: Path, say: Callable[[str], None] | None) -> None:
        self._path, self._say = run_dir / "events.jsonl", say

    def log(self, event: str, step: int, text: str = "", **fields: Any) -> None:
        """Write an event, and print its `text` if it has one; credentials are redacted."""
        if self._say is None:
            return
        text = redact(text)  # a file system's error may have some
        shown = {key: redact(v) if isinstance(v, str) else v for key, v in fields.items()}
        record = {"time": time.time(), "event": event, "step": step, **shown}
        append_line(self._path, files.dumps(record | ({"text": text} if text else {})))
        if text:
            self._say(text)
