"""Reading every file of a checkpoint against what was written down of it."""

from __future__ import annotations

import time

from titanlike.checkpoint import contents, store
from titanlike.checkpoint.listing import checkpoints, condition, is_checkpoint
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.whole import (
    METADATA,
    Damaged,
    Refused,
    check_sizes,
    check_sums,
    read_manifest,
)
from titanlike.metrics import units
from titanlike.metrics.console import Console


def verify(console: Console, location: str) -> bool:
    """Read everything; each bad file on a line of its own. Whether all that counts is whole.

    Raises ValueError where there is no checkpoint.
    """
    alone = is_checkpoint(Storage(location))
    paths = [Storage(location)] if alone else checkpoints(location)
    whole = damaged = 0
    for path in paths:
        begin = time.perf_counter()
        word, reason = condition(path)
        if word == "unfinished" and not alone:
            console.line(f"{path.name}: {reason}")  # harms no run
            continue
        if word in ("unfinished", "set aside"):
            problems = [reason]
        else:
            problems = list(dict.fromkeys(_problems(path)))
        if problems:
            damaged += 1
            console.line(f"{path.name}: {'not whole' if word == 'unfinished' else 'damaged'}")
            for problem in problems:
                console.line(f"  {problem}")
            continue
        files = read_manifest(path)
        size = units.size(sum(size for size, _ in files.values()))
        seconds = units.duration(time.perf_counter() - begin)
        console.line(f"{path.name}: whole ({len(files)} files, {size}, read in {seconds})")
        whole += 1
    return whole > 0 and not damaged


def _problems(path: Storage) -> list[str]:
    try:
        files = read_manifest(path)
    except Damaged as damage:
        return [f"{damage.file} {damage.reason}"]
    found = []
    for name in files:
        try:
            check_sizes(path, {name: files[name]})
            check_sums(path, files, [name])
        except Damaged as damage:
            found.append(f"{damage.file} {damage.reason}")
    if any(problem.startswith(METADATA) for problem in found):
        return found
    try:
        store.metadata_of(path)  # as a run would read it
        return found + list(contents.absent(contents.entries(path), files))
    except Damaged as damage:
        return [*found, f"{damage.file} {damage.reason}"]
    except Refused as error:
        return [*found, str(error)]
