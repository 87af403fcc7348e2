"""Strict JSON (NaN and infinities as strings) and atomic writes."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(record: dict[str, Any]) -> str:
    """One line of strict JSON; floats round-trip to the last bit, NaN is "nan", infinity "inf"."""
    plain = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(plain, allow_nan=False)


def loads(text: str) -> dict[str, Any]:
    """The inverse. Raises ValueError for anything but a JSON object."""
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object was expected, not {text!r}")
    return {
        key: NON_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in record.items()
    }


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` in UTF-8."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `path` so that readers, also after a crash, see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would exclude other users
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
