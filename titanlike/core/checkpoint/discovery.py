"""Finds checkpoints: those in a folder, the one that a user's path means, and the one that a run
resumes from. No torch, so that a config can be checked with it; integrity.py, which reads
checkpoints, is imported when there is one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlike.core.checkpoint.storage import (
    DAMAGED_MARKER,
    MARKER,
    STATE,
    DamagedCheckpoint,
    Moved,
    Storage,
    UnreadableFile,
)
from titanlike.core.config.errors import Problem, Refused, override_text
from titanlike.core.config.files import same_folder
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import Config
from titanlike.core.metrics.run_files import earlier_folders

STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Progress:
    """How far a run has come; saved with the tensors."""

    step: int = 0
    value: float | None = None  # last validation loss, or loss
    left_out: int = 0  # batches skipped by rollbacks
    guard: dict[str, Any] = field(default_factory=dict)  # see anomalies.AnomalyDetector.state


@dataclass
class Selection:
    """The checkpoint to resume from, or None, and the newer damaged ones that were skipped."""

    path: Storage | None
    damaged: list[DamagedCheckpoint] = field(default_factory=list)
    marked: list[Storage] = field(default_factory=list)  # marked as damaged by an earlier launch


def checkpoint_folder(config: Config, moved: Moved | None = None) -> Storage:
    """Return the folder of a run's checkpoints. moved: see `Storage`."""
    return Storage(config.checkpoint.folder or Path(config.run_dir) / "checkpoints", moved)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Storage) -> int:
    return int(path.name.removeprefix("step-"))


def all_steps(folder: Storage) -> list[Storage]:
    """Return the step-XXXXXXXX folders in a folder, newest first; of links those out of it."""
    paths = [folder.at(name) for name in folder.names() if STEP_NAME.fullmatch(name)]
    paths = [path for path in paths if not path.is_link or leads_out(path, folder)]
    return sorted(paths, key=step_of, reverse=True)


def committed(folder: Storage) -> list[Storage]:
    """Return the committed checkpoints in a folder, newest first."""
    return [path for path in all_steps(folder) if path.exists(MARKER)]


def newest_complete(folder: Storage, rejected: Collection[str] = ()) -> Selection:
    """Return the newest checkpoint whose files all exist with their sizes, and the damaged newer
    ones.

    rejected: locations to skip. Raises UnreadableFile if one cannot be read at the moment, rather
    than falling back to an older one.
    """
    selection = Selection(None)
    for path in all_steps(folder):
        if str(path) in rejected:
            selection.marked.append(path)
            continue
        try:
            if path.exists(MARKER):
                from titanlike.core.checkpoint.integrity import open_header

                open_header(path)
                selection.path = path
                break
            if path.exists(DAMAGED_MARKER):
                selection.marked.append(path)
        except DamagedCheckpoint as damage:
            if not path.exists(MARKER):  # its run just deleted it, so there is a newer one
                return newest_complete(folder, rejected)
            selection.damaged.append(damage)
        except UnreadableFile as error:
            raise unreadable(path, str(error)) from None
    return selection


def unreadable(path: Storage, reason: str) -> UnreadableFile:
    """Return the error for a checkpoint that cannot be read at the moment, with what to do."""
    older = [other for other in all_steps(path.parent) if step_of(other) < step_of(path)]
    text = f"{reason}; {path} is left as it is: its bytes may be right. Start again when it can be read"
    for other in older:
        with contextlib.suppress(UnreadableFile):
            if other.exists(MARKER):
                text += f", or continue from an older one: checkpoint.resume={other} run_dir=NEW"
                break
    return UnreadableFile(text)


def resolve(key: str, location: str, moved: Moved | None = None) -> Storage:
    """Return the committed checkpoint at `location`, or the newest one of the run there.

    moved: see `Storage`. Raises Refused if there is none.
    """
    path = Storage(location, moved)
    if path.exists(MARKER):
        return path
    for folder in (path.at("checkpoints"), path):
        if inside := committed(folder):
            if leads := leads_out(inside[0], path):
                raise Refused(key, location, f"{inside[0]} is a link out of it", f"write {leads}")
            return inside[0]
    reason = "no complete checkpoint there"
    if path.exists(DAMAGED_MARKER):
        from titanlike.core.checkpoint.integrity import how_to_unmark

        reason = f"is marked as damaged (see {path}/{DAMAGED_MARKER}); {how_to_unmark(path)}"
    elif path.exists(STATE):
        reason = f"incomplete: it has no file {MARKER}, so its save was not completed"
    fix = "write the path of a step-XXXXXXXX folder or of a run directory"
    raise Refused(key, location, reason, fix)


def leads_out(path: Storage, folder: Storage) -> str:
    """Return the target of a local path's links if it is outside of `folder`; else ""."""
    real = Path(os.path.realpath(str(path)))  # `resolve` raises for a loop
    is_inside = not path.local or real.is_relative_to(os.path.realpath(str(folder)))
    return "" if is_inside else str(real)


# --- what a run resumes from ---------------------------------------------------------------------


def select_resume(
    config: Config, rejected: Collection[str] = (), moved: Moved | None = None
) -> Selection:
    """Return the checkpoint that `checkpoint.resume` means, checking only the sizes of its files.

    rejected: locations whose checksums were wrong; moved: see `Storage`. Raises Refused if every checkpoint is damaged,
    or if run_dir has newer ones than the given one: the next launch would resume from those, and
    metrics.jsonl would mix two runs.
    """
    resume, folder = config.checkpoint.resume, checkpoint_folder(config, moved)
    if resume == "auto":
        selection = newest_complete(folder, rejected)
        here, named = Path(config.run_dir).absolute(), config.checkpoint.folder
        inside = named is None or Path(named).absolute().is_relative_to(here)
        if selection.path is not None and not inside:
            # it has one run's checkpoints: a sweep's jobs would resume each other's
            from titanlike.core.checkpoint.integrity import read_state

            owner = read_state(selection.path).get("run_dir", str(here))
            was_here = owner in earlier_folders(here)  # it was moved or copied
            exists = os.path.exists(owner)
            if not (owner == str(here) or same_folder(owner, here) or (was_here and not exists)):
                reason = f"it has the checkpoints of the run in {owner}"
                fix = f"run_dir={owner} to resume it, or another checkpoint.folder"
                if was_here:
                    reason += f", of which {here} is a copy"
                    fix = f"checkpoint.folder=null checkpoint.resume={selection.path}"
                raise Refused("checkpoint.folder", folder, reason, fix)
        if selection.path is None and (selection.damaged or selection.marked):
            from titanlike.core.checkpoint.integrity import how_to_unmark

            reasons = [*map(str, selection.damaged)]
            reasons += [f"{path} is marked as damaged" for path in selection.marked]
            reason = f"no complete checkpoint is left in {folder}: {'; '.join(reasons)}; "
            reason += how_to_unmark(folder)
            fix = "checkpoint.resume=/path/of/another/checkpoint"
            raise Refused("checkpoint.resume", "auto", reason, fix)
        return selection
    chosen = None if resume == "never" else resolve("checkpoint.resume", resume, moved)
    if chosen is not None and not STEP_NAME.fullmatch(chosen.name):
        reason = "a run resumes only from a step-XXXXXXXX folder"
        fix = f"checkpoint.start_from={resume} to start a new run from its weights"
        raise Refused("checkpoint.resume", resume, reason, fix)
    start = 0 if chosen is None else step_of(chosen)
    checkpoints = committed(folder)
    if checkpoints and step_of(checkpoints[0]) > start:
        newest = f"the checkpoint of step {step_of(checkpoints[0])} ({checkpoints[0]})"
        reason = f"run_dir already has {newest}, and this run would start after step {start}"
        raise Refused("checkpoint.resume", resume, reason, "write another run_dir")
    return Selection(chosen)


def run_identity(config: Config) -> dict[str, Any]:
    """Return the values that a resumed run must not change, by key, since the order of samples and
    the model depend on them. "same" in state.json."""
    sizes = {f"model.{key}": value for key, value in to_plain(config.model).items()}
    # null may become a number, since shapes are compared; a tp plan changes no value
    lengths = ("max_seq_len", "n_positions", "max_position_embeddings")
    for changing in ("vocab_size", "tp_plan", *lengths):
        sizes.pop(f"model.{changing}", None)
    plain = {key: getattr(config, key) for key in ("seed", "batch_size", "seq_len")}
    plain |= {"ramp": to_plain(config.ramp)}
    if config.exact:  # the grain determines the bits
        numerics = config.numerics
        plain |= {"numerics": numerics.name, "numerics.grain": numerics.grain}
    return {**plain, "optimizer": config.optimizer.name, **sizes}


def incompatibility(
    path: Storage, config: Config, state: dict[str, Any] | None = None
) -> Problem | None:
    """Return why a run with this config cannot resume from a checkpoint; None if it can.

    state: its state.json, if already read.
    """
    from titanlike.core.checkpoint.integrity import read_state

    saved, identity = (state or read_state(path))["same"], run_identity(config)
    # keys that only the new config has
    new = [k for k in identity if k.startswith("model.") and k not in saved]
    defaults = {}
    if new or saved.keys() - identity.keys():
        from titanlike.core.models.registry import (
            complete_arguments,  # imports torch, and the model
        )

        arguments = to_plain(complete_arguments(Custom(config.model.name)))
        defaults = {f"model.{key}": value for key, value in arguments.items()}
    for key in [*saved, *new]:
        was, now = (side.get(key, defaults.get(key)) for side in (saved, identity))
        if was != now:
            how, fix = f"with {was}", f"{key}={override_text(was)}"
            if key == "model.name":  # the fix must include the model's keys
                fix = "leave the model as it was"
            elif key not in saved.keys() | defaults.keys():
                how, fix = "without it", "leave it out"
            reason = f"{path} was saved {how}, so this would be another run"
            current = config.numerics.name if key == "numerics" else now
            return Problem(key, current, reason, f"{fix}, or another run_dir")
    return None


def resumed_config(config: Config) -> tuple[Config, int]:
    """Return the config for a restart, and the step that it resumes from. `checkpoint.resume`
    applies to a run's first launch; once the run has saved a checkpoint, it is "auto"."""
    try:
        newest = newest_complete(checkpoint_folder(config)).path
        step = step_of(newest) if newest is not None else 0
        resume = config.checkpoint.resume
        if resume == "auto":
            return config, step
        begin = 0 if resume == "never" else step_of(resolve("checkpoint.resume", resume))
    except (OSError, ValueError):  # the launch itself reports it in detail
        return config, 0
    if step <= begin:
        return config, begin
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto")), step
