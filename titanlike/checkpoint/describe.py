"""The list and show commands: tables of checkpoints and of what one contains. No torch."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from titanlike.checkpoint.discovery import all_checkpoints
from titanlike.checkpoint.integrity import (
    DAMAGED_MARKER,
    MARKER,
    DamagedCheckpoint,
    check_quick,
    read_state,
)
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import MODEL, OPTIMIZER, RNG, TensorEntry, read_entries
from titanlike.metrics import units
from titanlike.metrics.console import Console

COMPLETE, DAMAGED, REJECTED, INCOMPLETE = "complete", "damaged", "rejected", "incomplete"
_MAX_FILES = 8  # that `show` lists without --tensors


def list_checkpoints(console: Console, location: str) -> None:
    """Print a line for each checkpoint, and below them the reasons why some are not complete."""
    rows, reasons = [], []
    for path in all_checkpoints(location):
        word, reason = condition(path)
        state = _state(path)
        when = path.modified(MARKER if path.exists(MARKER) else _any_file(path))
        loss = state.get("val_loss")
        rows.append(
            [
                path.name,
                word,
                None if loss is None else units.decimal(loss),
                _layout(state),
                units.size(sum(path.size(name) for name in path.names())),
                when and _date(when),
            ]
        )
        if reason:
            reasons.append((path.name, reason))
    console.table("", ["checkpoint", "state", "val_loss", "layout", "size", "written"], rows)
    if reasons:
        console.line()
        console.fields(reasons)


def condition(path: Storage) -> tuple[str, str]:
    """Complete, damaged, rejected or incomplete, by the sizes of the files; and why."""
    if not path.exists(MARKER):
        if path.exists(DAMAGED_MARKER):
            reason = path.read(DAMAGED_MARKER).decode(errors="replace").partition("\n")[0]
            return REJECTED, f"a start found it damaged: {reason}"
        return INCOMPLETE, f"no {MARKER}: its save was killed, or is in progress"
    try:
        check_quick(path)
    except DamagedCheckpoint as damage:
        return DAMAGED, f"{damage.file} {damage.reason}"
    return COMPLETE, ""


def show(console: Console, location: str, *, all_names: bool) -> bool:
    """Print what is known without reading tensors; whether the checkpoint is complete.

    Of a run, its newest committed checkpoint.
    """
    found = all_checkpoints(location)
    steps = [path for path in found if path.exists(MARKER) and path.name.startswith("step-")]
    path = (steps or found)[-1]
    word, reason = condition(path)
    state = _state(path)
    when = path.modified(MARKER) if path.exists(MARKER) else None
    loss = state.get("val_loss")
    text = f"{word}, by the sizes of its files (verify reads them)" if word == COMPLETE else word
    fields = [
        ("checkpoint", str(path)),
        ("state", f"{text}: {reason}" if reason else text),
        ("written", f"{when.astimezone():%Y-%m-%d %H:%M:%S}" if when else "-"),
        ("step", f"{state.get('step', '-')}"),
        ("val_loss", "-" if loss is None else units.decimal(loss)),
        ("saved by", _saved_by(state)),
    ]
    console.fields([row for row in fields if row[1] != "-"])
    _show_files(console, path, all_names)
    try:
        _show_tensors(console, read_entries(path), all_names)
    except DamagedCheckpoint as damage:
        console.line(f"  {damage.file} {damage.reason}")
        return False
    return word == COMPLETE


def _show_files(console: Console, path: Storage, all_names: bool) -> None:
    sizes = [(name, path.size(name)) for name in path.names()]
    if len(sizes) > _MAX_FILES and not all_names:
        listed, rest = sizes[: _MAX_FILES - 1], sizes[_MAX_FILES - 1 :]
        sizes = [*listed, (f"and {len(rest):,} more", sum(size for _, size in rest))]
    console.line()
    console.table("", ["file", "size"], [[name, units.size(size)] for name, size in sizes])


def _show_tensors(console: Console, entries: list[TensorEntry], all_names: bool) -> None:
    kinds = {"parameters": MODEL, "optimizer": OPTIMIZER, "random generators": RNG}
    groups = {
        kind: [entry for entry in entries if entry.name.startswith(prefix)]
        for kind, prefix in kinds.items()
    }
    prefixes = tuple(kinds.values())
    groups["others"] = [entry for entry in entries if not entry.name.startswith(prefixes)]
    console.line()
    headers = ["tensors", "count", "elements", "dtype", "size"]
    console.table("", headers, [_totals(kind, group) for kind, group in groups.items() if group])
    if all_names:
        console.line()
        console.table(
            "",
            ["tensor", "shape", "dtype", "size"],
            [
                [one.name, " x ".join(map(str, one.shape)) or "scalar", one.dtype]
                + [units.size(one.bytes)]
                for one in entries
            ],
        )


def _totals(kind: str, group: list[TensorEntry]) -> list[Any]:
    dtypes = ", ".join(sorted({one.dtype for one in group}))
    numel, size = sum(one.numel for one in group), sum(one.bytes for one in group)
    return [kind, len(group), units.count(numel), dtypes, units.size(size)]


# --- texts ---------------------------------------------------------------------------------------


def _date(when: datetime) -> str:
    """02-14 15:04 of this year, else 2025-02-14."""
    here, now = when.astimezone(), datetime.now().astimezone()
    return f"{here:%m-%d %H:%M}" if here.year == now.year else f"{here:%Y-%m-%d}"


def _state(path: Storage) -> dict[str, Any]:
    """state.json, {} where it cannot be read."""
    try:
        return read_state(path)
    except (ValueError, KeyError):
        return {}


def _layout(state: dict[str, Any]) -> str:
    """pp2 x dp4 1f1b: degrees above one."""
    layout = state.get("layout") or {}
    degrees = [f"{key}{layout[key]}" for key in ("pp", "dp") if layout.get(key, 1) > 1]
    schedule = [layout["schedule"]] if layout.get("pp", 1) > 1 else []
    return " ".join([" x ".join(degrees), *schedule]) if degrees else "one rank" if layout else "-"


def _saved_by(state: dict[str, Any]) -> str:
    layout = state.get("layout")
    if not layout:
        return "-"  # a file that another program wrote
    more = ""
    if layout.get("replicate", 1) > 1:
        more += f", {layout['replicate']} replicas"
    if layout.get("pp", 1) > 1:
        more += f", split {layout['split']}"
    ranks = state.get("world_size", 1)
    return f"{ranks} rank{'s' * (ranks > 1)} ({_layout(state)}{more}), torch {state.get('torch')}"


def _any_file(path: Storage) -> str:
    return next(iter(path.names()), MARKER)
