"""Keys of other frameworks, which users type first, and their equivalents here.

The table is `other_frameworks.yaml`, read only when an unknown key is found.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ON, _OFF = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "none", "null")


@dataclass(frozen=True)
class Context:
    """Values of the config on which an equivalent may depend."""

    dp: int = 1
    steps: int = 300
    lr: float = 3e-3
    batch_size: int = 16
    microbatches: int = 1
    cut: str = ""  # override that sets this number of microbatches, if the config does not


def translate(key: str, value: str, context: Context) -> tuple[list[str], str] | None:
    """Return (overrides to write here, what differs) for another framework's key; None if unknown.

    Without overrides, nothing here does what the key did. "" = there is nothing to explain.
    """
    table, parts = _table(), _normalized(key).split(".")
    if parts[-1] in ("enable", "enabled"):  # fp16.enabled, callbacks.wandb.enabled
        parts.pop()
    entry = table.get(_normalized(key), {})
    names = (".".join(parts[start:]) for start in range(len(parts)))
    # one section's key is no option of a tool
    entry = entry or next((e for e in map(table.get, names) if e and "tool" not in e), {})
    if not entry:
        return None
    write: str | Mapping[str, str] = entry.get("write", "")
    if not isinstance(write, str):
        write = write.get(_normalized(value), write.get("*", ""))
    words = [_fill(word, value, context) for word in write.split()]
    return [word for word in words if word], entry.get("note", "")


def tools() -> set[str]:
    """Return titanlike's tools that have options of their own."""
    return {entry["tool"] for entry in _table().values() if "tool" in entry}


def other_names(key: str) -> list[str]:
    """Return other frameworks' names for a key, their models' included."""
    keys: str = _table().get(_normalized(key), {}).get("keys", "")
    return keys.split()


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    """Load the file: each name in another framework and its entry."""
    import yaml

    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = {}
    for entry in yaml.safe_load(text):
        if isinstance(write := entry.get("write"), dict):
            on, off = write.pop(True, ""), write.pop(False, "")
            switch = dict.fromkeys(_ON, on) if on else {}
            switch |= dict.fromkeys(_OFF, off) if off else {}
            entry["write"] = switch | write
        for name in entry["keys"].split():
            assert name not in table, f"{name} is in the table twice"
            table[name] = entry
    return table


def _normalized(text: str) -> str:
    return re.sub(r"[-\s]+", "_", text.strip("-").lower())


def _fill(template: str, value: str, context: Context) -> str:
    """Fill a template with values; an expression with a non-number is left as the value itself."""
    numbers: dict[str, Any] = {"60": 60.0, "100": 100.0} | asdict(context)
    numbers["sharded"] = max(context.dp, 2)  # so that FSDP shards
    numbers["count"] = 1 + value.count(",") if value.startswith("[") else value

    def filled(match: re.Match[str]) -> str:
        name, operations = match.groups()
        if not operations:
            return value if name == "value" else str(numbers[name])
        try:
            result = float(value)
            for operator, number in re.findall(r"([*/])(\w+)", operations):
                result *= numbers[number] if operator == "*" else 1 / numbers[number]
            return str(math.ceil(result)) if template.startswith("steps=") else f"{result:.6g}"
        except (ValueError, ZeroDivisionError):
            return value

    return re.sub(r"\{(\w+)((?:[*/]\w+)*)\}", filled, template)
