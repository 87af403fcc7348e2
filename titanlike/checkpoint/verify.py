"""The verify command: reads every file of a checkpoint and checks it against the manifest."""

from __future__ import annotations

import time

from titanlike.checkpoint.dcp_metadata import read_metadata
from titanlike.checkpoint.describe import INCOMPLETE, REJECTED, condition
from titanlike.checkpoint.discovery import all_checkpoints, is_checkpoint
from titanlike.checkpoint.integrity import (
    METADATA,
    DamagedCheckpoint,
    UnsafeCheckpoint,
    check_sizes,
    check_sums,
    read_manifest,
)
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import missing_data, read_entries
from titanlike.metrics import units
from titanlike.metrics.console import Console


def verify(console: Console, location: str) -> bool:
    """Read all files and print a line for each problem; whether the checkpoints are intact.

    Raises ValueError where there is no checkpoint.
    """
    alone = is_checkpoint(Storage(location))
    intact = damaged = 0
    for path in all_checkpoints(location):
        begin = time.perf_counter()
        word, reason = condition(path)
        if word == INCOMPLETE and not alone:
            console.line(f"{path.name}: {reason}")  # harms no run
            continue
        problems = [reason] if word in (INCOMPLETE, REJECTED) else _problems(path)
        if problems:
            damaged += 1
            console.line(f"{path.name}: {word if word == INCOMPLETE else 'damaged'}")
            for problem in dict.fromkeys(problems):
                console.line(f"  {problem}")
            continue
        files = read_manifest(path)
        size = units.size(sum(size for size, _ in files.values()))
        seconds = units.duration(time.perf_counter() - begin)
        console.line(f"{path.name}: complete ({len(files)} files, {size}, read in {seconds})")
        intact += 1
    return intact > 0 and not damaged


def _problems(path: Storage) -> list[str]:
    try:
        files = read_manifest(path)
    except DamagedCheckpoint as damage:
        return [f"{damage.file} {damage.reason}"]
    found = []
    for name in files:
        try:
            check_sizes(path, {name: files[name]})
            check_sums(path, files, [name])
        except DamagedCheckpoint as damage:
            found.append(f"{damage.file} {damage.reason}")
    if any(problem.startswith(METADATA) for problem in found):
        return found
    try:
        read_metadata(path)  # as training reads it
        return found + list(missing_data(read_entries(path), files))
    except DamagedCheckpoint as damage:
        return [*found, f"{damage.file} {damage.reason}"]
    except UnsafeCheckpoint as error:
        return [*found, str(error)]
