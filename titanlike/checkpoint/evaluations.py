"""What was measured of a checkpoint: a JSON list beside it, step-XXXXXXXX.evaluations.json."""

from __future__ import annotations

import json
import time
from typing import Any

from titanlike.checkpoint.storage import Storage


def add_evaluation(checkpoint: Storage, result: dict[str, Any]) -> str:
    """Append a result; where it is."""
    folder, name = checkpoint.parent, f"{checkpoint.name}.evaluations.json"
    found = read_evaluations(checkpoint)
    text = json.dumps([*found, {"time": time.time(), **result}], indent=1)
    folder.write(name, text.encode() + b"\n")
    return f"{folder}/{name}"


def read_evaluations(checkpoint: Storage) -> list[dict[str, Any]]:
    """All results so far; [] where there are none, or the file is no list."""
    name = f"{checkpoint.name}.evaluations.json"
    if not checkpoint.parent.exists(name):
        return []
    try:
        found = json.loads(checkpoint.parent.read(name))
    except ValueError:
        return []
    return found if isinstance(found, list) else []
