"""events.jsonl: what happened to a run besides its steps, a JSON object a line, kept for good.

{"time": seconds since the epoch, "event": "rollback", "step": 120, ...}
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.config.credentials import redact


class Events:
    """Appends to run_dir/events.jsonl and tells the user. On ranks other than 0 it does nothing."""

    def __init__(self, run_dir: Path, say: Callable[[str], None] | None) -> None:
        """say: takes lines for the user; None on a rank that keeps silent."""
        self._path, self._say = run_dir / "events.jsonl", say

    def log(self, event: str, step: int, text: str = "", **fields: Any) -> None:
        """Note an event; `text`, if there is one, is shown. Neither with credentials in it."""
        if self._say is None:
            return
        text = redact(text)  # of a file system's error, for one
        shown = {key: redact(v) if isinstance(v, str) else v for key, v in fields.items()}
        record = {"time": time.time(), "event": event, "step": step, **shown}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(files.dumps(record | ({"text": text} if text else {})) + "\n")
        if text:
            self._say(text)
