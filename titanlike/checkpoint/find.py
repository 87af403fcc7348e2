"""Which checkpoint a run goes on from. No torch, so that a config can be checked with it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.whole import (
    MARKER,
    REJECTED,
    Damaged,
    check_sizes,
    check_sums,
    read_manifest,
    read_state,
)
from titanlike.checkpoint.whole import STATE as STATE_FILE
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config

_STEP = re.compile(r"step-(\d{8,})")


@dataclass
class Found:
    """The checkpoint to go on from, None for a fresh start, and the damaged ones before it."""

    path: Storage | None
    damaged: list[Damaged] = field(default_factory=list)


def storage_of(config: Config) -> Storage:
    """The folder of a run's checkpoints."""
    return Storage(config.checkpoint.folder or Path(config.run_dir) / "checkpoints")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Storage) -> int:
    return int(path.name.removeprefix("step-"))


def committed(folder: Storage) -> list[Storage]:
    """The checkpoints in a folder that count, newest first."""
    return [path for path in all_steps(folder) if path.exists(MARKER)]


def unfinished(folder: Storage) -> list[Storage]:
    """What killed saves and removals have left there."""
    found = [path for path in all_steps(folder) if not path.exists(MARKER)]
    return [path for path in found if not path.exists(REJECTED)]


def find(config: Config, rejected: Collection[str] = ()) -> Found:
    """The checkpoint that `checkpoint.resume` means, as far as sizes tell whether it is whole.

    rejected: locations that were found damaged by closer looks. Raises ValueError when there is
    nothing whole to go on from though there should be, and when run_dir holds newer ones than the
    named one: the next start would go on from those, and its metrics would be of two runs.
    """
    resume, folder = config.checkpoint.resume, storage_of(config)
    if resume == "auto":
        found = newest_whole(folder, rejected)
        if found.path is not None and config.checkpoint.folder is not None:
            _refuse_anothers(found.path, config)
        lost = [path for path in all_steps(folder) if path.exists(REJECTED)]
        if found.path is None and (found.damaged or lost or rejected):
            why = [*map(str, found.damaged), *(f"{path} was found damaged" for path in lost)]
            raise ValueError(
                f"checkpoint.resume=auto: no whole checkpoint is left in {folder}: {'; '.join(why)}; "
                "write another run_dir to start again, or the path of another run's checkpoint"
            )
        return found
    chosen = None if resume == "never" else named("checkpoint.resume", resume)
    if chosen is not None and not _STEP.fullmatch(chosen.name):
        raise ValueError(
            f"checkpoint.resume={resume}: a run goes on from a step-XXXXXXXX folder alone; write "
            f"checkpoint.start_from={resume} to start a new run from the weights in it"
        )
    start = 0 if chosen is None else step_of(chosen)
    own = committed(folder)
    if own and step_of(own[0]) > start:
        raise ValueError(
            f"checkpoint.resume={resume}: run_dir already holds the checkpoint of step "
            f"{step_of(own[0])} ({own[0]}), and this run would start after step {start}; "
            "write another run_dir"
        )
    return Found(chosen)


def newest_whole(folder: Storage, rejected: Collection[str] = ()) -> Found:
    """The newest checkpoint whose files are there with their sizes, and the damaged newer ones."""
    found = Found(None)
    for path in committed(folder):
        if str(path) in rejected:
            continue
        try:
            quick_look(path)
        except Damaged as damage:
            found.damaged.append(damage)
            continue
        found.path = path
        break
    return found


def _refuse_anothers(path: Storage, config: Config) -> None:
    """A folder of its own takes one run's checkpoints: a sweep's jobs would continue each other."""
    there = read_state(path)["run_dir"]
    if there != str(Path(config.run_dir).absolute()):
        raise ValueError(
            f"checkpoint.folder={config.checkpoint.folder}: it holds the checkpoints of the run in "
            f"{there}; write run_dir={there} to go on with it, or another checkpoint.folder"
        )


def quick_look(path: Storage) -> None:
    """What costs no reading of tensors. Raises Damaged."""
    files = read_manifest(path)
    check_sizes(path, files)
    check_sums(path, files, [STATE_FILE])


def named(key: str, location: str) -> Storage:
    """The checkpoint at `location`, or the newest in it where that is a run or its checkpoints.

    Raises ValueError where there is none that counts.
    """
    path = Storage(location)
    if path.exists(MARKER):
        return path
    for folder in (path.at("checkpoints"), path):
        if inside := committed(folder):
            return inside[0]
    reason = "no whole checkpoint there"
    if path.exists(REJECTED):
        reason = f"was found damaged (see {path}/{REJECTED})"
    elif path.exists(STATE_FILE) or path.exists(".metadata"):
        reason = f"not whole: it has no file {MARKER}, so its save was not completed"
    raise ValueError(
        f"{key}={location}: {reason}; "
        "write the path of a step-XXXXXXXX folder or of a run directory"
    )


def must_be_the_same(config: Config) -> dict[str, Any]:
    """What the order of the samples and the function of the model depend on, by key."""
    sizes = {f"model.{key}": value for key, value in to_plain(config.model).items()}
    for derived in ("model.vocab_size", "model.max_seq_len"):  # null or not: shapes tell
        sizes.pop(derived, None)
    plain = {key: getattr(config, key) for key in ("seed", "batch_size", "seq_len")}
    return {**plain, "optimizer": config.optimizer.name, **sizes}


def difference(path: Storage, config: Config) -> str | None:
    """Why a checkpoint was made by another run than `config` describes; None if it was not."""
    here = must_be_the_same(config)
    for key, value in read_state(path)["same"].items():
        if value != here.get(key):
            return (
                f"{key}={here.get(key)}: {path} was made with {value}, so this would be another "
                f"run; write {key}={value}, or another run_dir"
            )
    return None


def all_steps(folder: Storage) -> list[Storage]:
    """Whatever has the name of a checkpoint there, newest first."""
    paths = [folder.at(name) for name in folder.names() if _STEP.fullmatch(name)]
    return sorted(paths, key=step_of, reverse=True)
