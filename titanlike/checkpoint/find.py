"""Which checkpoint a run goes on from. No torch, so that a config can be checked with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titanlike.config.parse import to_plain
from titanlike.config.schema import Config

MARKER = "COMMITTED"  # the file without which a checkpoint does not count


def folder_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def newest(folder: Path) -> Path | None:
    """The committed checkpoint with the largest step."""
    whole = [path for path in folder.glob("step-*") if (path / MARKER).exists()]
    return max(whole, key=lambda path: path.name, default=None)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, None for a fresh start.

    Raises ValueError when the named one is not there or not whole, and when run_dir holds newer
    ones: the next start would go on from those, and its metrics would be of two runs.
    """
    own = newest(folder_of(run_dir))
    if resume == "auto":
        return own
    chosen = None if resume == "never" else _named(resume)
    start = 0 if chosen is None else step_of(chosen)
    if own is not None and step_of(own) > start:
        raise ValueError(
            f"checkpoint.resume={resume}: run_dir already holds the checkpoint of step "
            f"{step_of(own)} ({own}), and this run would start after step {start}; "
            "write another run_dir"
        )
    return chosen


def _named(resume: str) -> Path:
    path = Path(resume).expanduser()
    if (path / MARKER).exists():
        return path
    inside = newest(folder_of(path)) or newest(path)
    if inside is None:
        raise ValueError(
            f"checkpoint.resume={resume}: no whole checkpoint there; "
            "write the path of a step-XXXXXXXX folder or of a run directory"
        )
    return inside


def read_state(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors: step, layout, and what must be the same.

    Raises ValueError that names a damaged checkpoint.
    """
    try:
        return json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: BaseException) -> ValueError:
    """The error that says which checkpoint cannot be read, why, and what else there is."""
    older = [p for p in path.parent.glob("step-*") if (p / MARKER).exists() and p.name < path.name]
    last = max(older, key=lambda p: p.name, default=None)
    way_out = (
        f"remove that folder, and the run goes on from {last.name}"
        if last
        else "there is no older one; write another run_dir to start again"
    )
    lines = str(error).strip().splitlines() or [""]
    return ValueError(
        f"checkpoint {path.absolute()} is damaged ({type(error).__name__}: {lines[0][:200]}); {way_out}"
    )


def must_be_the_same(config: Config) -> dict[str, Any]:
    """What the order of the samples and the function of the model depend on, by key."""
    sizes = {f"model.{key}": value for key, value in to_plain(config.model).items()}
    for derived in ("model.vocab_size", "model.max_seq_len"):  # null or not: shapes tell
        sizes.pop(derived, None)
    return {**{key: getattr(config, key) for key in ("seed", "batch_size", "seq_len")}, **sizes}


def difference(path: Path, config: Config) -> str | None:
    """Why a checkpoint was made by another run than `config` describes; None if it was not."""
    here = must_be_the_same(config)
    for key, value in read_state(path)["same"].items():
        if value != here.get(key):
            return (
                f"{key}={here.get(key)}: {path} was made with {value}, so this would be another "
                f"run; write {key}={value}, or another run_dir"
            )
    return None
