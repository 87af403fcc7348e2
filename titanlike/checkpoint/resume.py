"""Which checkpoint a run resumes from, whether it belongs to that run, and the config of a restart.
No torch, so that a config can be checked with it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlike.checkpoint import discovery
from titanlike.checkpoint.discovery import Selection, checkpoint_folder, step_of
from titanlike.checkpoint.integrity import read_state, repair_command
from titanlike.checkpoint.storage import Storage
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config


def select_resume(config: Config, rejected: Collection[str] = ()) -> Selection:
    """The checkpoint that `checkpoint.resume` means; only the sizes of its files are checked.

    rejected: locations whose checksums were wrong. Raises ValueError where every checkpoint is
    damaged, and where run_dir has newer ones than the given one: the next start would resume from
    those, and metrics.jsonl would mix two runs.
    """
    resume, folder = config.checkpoint.resume, checkpoint_folder(config)
    if resume == "auto":
        selection = discovery.newest_complete(folder, rejected)
        if selection.path is not None and config.checkpoint.folder is not None:
            _check_owner(selection.path, config)
        if selection.path is None and (selection.damaged or selection.marked):
            reasons = [*map(str, selection.damaged)]
            reasons += [f"{path} is marked as damaged" for path in selection.marked]
            raise ValueError(
                f"checkpoint.resume=auto: no complete checkpoint is left in {folder}: "
                f"{'; '.join(reasons)}; {repair_command(folder)} reads all bytes again and "
                "lifts marks that are wrong; write checkpoint.resume=/path/of/another/checkpoint"
            )
        return selection
    chosen = None if resume == "never" else discovery.resolve("checkpoint.resume", resume)
    if chosen is not None and not discovery.STEP_NAME.fullmatch(chosen.name):
        raise ValueError(
            f"checkpoint.resume={resume}: a run resumes only from a step-XXXXXXXX folder; write "
            f"checkpoint.start_from={resume} to start a new run from its weights"
        )
    start = 0 if chosen is None else step_of(chosen)
    own = discovery.committed(folder)
    if own and step_of(own[0]) > start:
        raise ValueError(
            f"checkpoint.resume={resume}: run_dir already has the checkpoint of step "
            f"{step_of(own[0])} ({own[0]}), and this run would start after step {start}; "
            "write another run_dir"
        )
    return Selection(chosen)


def _check_owner(path: Storage, config: Config) -> None:
    """A folder outside run_dir has one run's checkpoints: a sweep's jobs would resume each other's."""
    owner = read_state(path)["run_dir"]
    if owner != str(Path(config.run_dir).absolute()):
        raise ValueError(
            f"checkpoint.folder={config.checkpoint.folder}: it has the checkpoints of the run in "
            f"{owner}; write run_dir={owner} to resume it, or another checkpoint.folder"
        )


def run_identity(config: Config) -> dict[str, Any]:
    """What a resumed run must not change, by key: the order of the samples and the model depend
    on it. "same" in state.json."""
    sizes = {f"model.{key}": value for key, value in to_plain(config.model).items()}
    # null or not: shapes are compared; and a plan for tp changes no value
    for changing in ("model.vocab_size", "model.max_seq_len", "model.tp_plan"):
        sizes.pop(changing, None)
    plain = {key: getattr(config, key) for key in ("seed", "batch_size", "seq_len")}
    return {**plain, "optimizer": config.optimizer.name, **sizes}


def incompatibility(path: Storage, config: Config) -> str | None:
    """Why a run with this config cannot resume from a checkpoint; None where it can."""
    identity = run_identity(config)
    for key, value in read_state(path)["same"].items():
        if value != identity.get(key):
            # a name without its model's keys would be the next mistake
            fix = "leave the model as it was" if key == "model.name" else f"write {key}={value}"
            return (
                f"{key}={identity.get(key)}: {path} was saved with {value}, so this would be "
                f"another run; {fix}, or another run_dir"
            )
    return None


def resumed_config(config: Config) -> tuple[Config, int]:
    """The config for a restart, and the step that it resumes from.

    `checkpoint.resume` applies to a run's first start: once the run has saved a checkpoint of its
    own, it is "auto".
    """
    try:
        own = discovery.newest_complete(checkpoint_folder(config)).path
        step = step_of(own) if own is not None else 0
        resume = config.checkpoint.resume
        if resume == "auto":
            return config, step
        begin = 0 if resume == "never" else step_of(discovery.resolve("checkpoint.resume", resume))
    except (OSError, ValueError):  # reported in detail by the start itself
        return config, 0
    if step <= begin:
        return config, begin
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto")), step
