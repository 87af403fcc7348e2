"""Reads the .wandb file of a W&B run back, as `wandb sync` would.

A 7-byte header, then 32 KiB blocks of chunks: CRC-32 (of type and data), length, type (1 whole,
2 first, 3 middle, 4 last), data. The joined data of a record is a protobuf message.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32 * 1024
CHUNK = struct.Struct("<IHB")


@dataclass
class WandbFile:
    """What a run has left for W&B."""

    id: str = ""
    name: str = ""
    project: str = ""
    group: str = ""
    entity: str = ""
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)  # name or pattern -> its step metric
    exit_code: int | None = None


def read_wandb_file(path: Path) -> WandbFile:
    """The run in `path`: its identity, config, metrics by step, and exit code if it has ended."""
    run = WandbFile()
    for record in _records(path.read_bytes()):
        match record.WhichOneof("record_type"):
            case "run":
                run.id, run.name = record.run.run_id, record.run.display_name
                run.project, run.group = record.run.project, record.run.run_group
                run.entity, run.notes = record.run.entity, record.run.notes
                run.tags = list(record.run.tags)
                run.config.update(_values(record.run.config.update))
            case "config":
                run.config.update(_values(record.config.update))
            case "history":
                run.history.append(_values(record.history.item))
            case "summary":
                run.summary.update(_values(record.summary.update))
            case "metric":
                name = record.metric.name or record.metric.glob_name
                run.metrics[name] = record.metric.step_metric
            case "exit":
                run.exit_code = record.exit.exit_code
    run.config.pop("_wandb", None)
    return run


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[Any]:
    assert data[:4] == b":W&B", "not a .wandb file"
    position, parts = 7, []
    while position + CHUNK.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < CHUNK.size:  # padding at a block's end
            position += left
            continue
        crc, length, kind = CHUNK.unpack_from(data, position)
        chunk = data[position + CHUNK.size : position + CHUNK.size + length]
        position += CHUNK.size + length
        if kind == 0 or len(chunk) < length:  # space not yet written, or a torn end
            return
        assert zlib.crc32(chunk, zlib.crc32(bytes([kind]))) == crc, "corrupt chunk"
        parts.append(chunk)
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record
