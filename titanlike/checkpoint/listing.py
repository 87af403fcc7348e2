"""What there is, as a table; which checkpoints a command means. No torch."""

from __future__ import annotations

import contextlib
import re
from datetime import datetime
from typing import Any

import yaml

from titanlike.checkpoint import contents
from titanlike.checkpoint.contents import MODEL, OPTIMIZER, RNG, Entry
from titanlike.checkpoint.find import quick_look
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.whole import (
    MARKER,
    METADATA,
    REJECTED,
    Damaged,
    read_state,
)
from titanlike.metrics import units
from titanlike.metrics.console import Console

_NAME = re.compile(r"(step|model)-(\d{8,})")
_MOST_FILES = 8  # that `show` lists unless it is to list all


# --- list ----------------------------------------------------------------------------------------


def list_all(console: Console, location: str) -> None:
    """A line a checkpoint; what is wrong with some comes below."""
    rows, wrong = [], []
    alone = is_checkpoint(Storage(location))
    for path in [Storage(location)] if alone else checkpoints(location):
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
                units.size(_bytes(path)),
                when and _short(when),
            ]
        )
        if reason:
            wrong.append((path.name, reason))
    console.table("", ["checkpoint", "state", "val_loss", "layout", "size", "written"], rows)
    if wrong:
        console.line()
        console.fields(wrong)


def condition(path: Storage) -> tuple[str, str]:
    """whole, damaged, set aside or unfinished, as far as sizes tell; and why it is not whole."""
    if not path.exists(MARKER):
        if path.exists(REJECTED):
            reason = path.read(REJECTED).decode(errors="replace").partition("\n")[0]
            return "set aside", f"a start found it damaged: {reason}"
        return "unfinished", f"no {MARKER}: its save was killed, or is under way"
    try:
        quick_look(path)
    except Damaged as damage:
        return "damaged", f"{damage.file} {damage.reason}"
    return "whole", ""


# --- show ----------------------------------------------------------------------------------------


def show(console: Console, location: str, *, all_names: bool) -> bool:
    """Everything that can be told without reading tensors; whether the checkpoint is whole."""
    path = _one(location)
    word, reason = condition(path)
    state = _state(path)
    when = path.modified(MARKER) if path.exists(MARKER) else None
    loss = state.get("val_loss")
    text = "whole, by the sizes of its files (verify reads them)" if word == "whole" else word
    fields = [
        ("checkpoint", str(path)),
        ("state", f"{text}: {reason}" if reason else text),
        ("written", f"{when.astimezone():%Y-%m-%d %H:%M:%S}" if when else "-"),
        ("step", f"{state.get('step', '-')}"),
        ("val_loss", "-" if loss is None else units.decimal(loss)),
        ("saved by", _saver(state)),
    ]
    console.fields([row for row in fields if row[1] != "-"])
    _show_files(console, path, all_names)
    try:
        found = contents.entries(path)
    except Damaged as damage:
        console.line(f"  {damage.file} {damage.reason}")
        return False
    kinds = [
        ("parameters", MODEL),
        ("optimizer", OPTIMIZER),
        ("random generators", RNG),
    ]
    rows = [
        _sum(what, [one for one in found if one.name.startswith(begin)]) for what, begin in kinds
    ]
    others = [one for one in found if not one.name.startswith((MODEL, OPTIMIZER, RNG))]
    rows.append(_sum("others", others))
    console.line()
    headers = ["tensors", "count", "numbers", "dtype", "size"]
    console.table("", headers, [row for row in rows if row[1]])
    if all_names:
        console.line()
        console.table(
            "",
            ["tensor", "shape", "dtype", "size"],
            [[one.name, _shape(one.shape), one.dtype, units.size(one.bytes)] for one in found],
        )
    return word == "whole"


def _show_files(console: Console, path: Storage, everything: bool) -> None:
    sizes = [(name, path.size(name)) for name in path.names()]
    if len(sizes) > _MOST_FILES and not everything:
        listed, rest = sizes[: _MOST_FILES - 1], sizes[_MOST_FILES - 1 :]
        sizes = [*listed, (f"and {len(rest):,} more", sum(size for _, size in rest))]
    console.line()
    console.table("", ["file", "size"], [[name, units.size(size)] for name, size in sizes])


def _sum(what: str, found: list[Entry]) -> list[Any]:
    dtypes = ", ".join(sorted({one.dtype for one in found}))
    numbers, size = sum(one.numbers for one in found), sum(one.bytes for one in found)
    return [what, len(found), units.count(numbers), dtypes, units.size(size)]


# --- which ones ----------------------------------------------------------------------------------


def checkpoints(location: str) -> list[Storage]:
    """Those of a run, or in a folder, oldest first. Raises ValueError where there is none."""
    path = Storage(location)
    folders = [path.at("checkpoints"), path]
    if elsewhere := _folder_in_config(path):
        folders.insert(0, Storage(elsewhere))
    for folder in folders:
        if names := [name for name in folder.names() if _NAME.fullmatch(name)]:
            names.sort(key=lambda name: (int(name.partition("-")[2]), name))
            return [folder.at(name) for name in names]
    looked = " and ".join(map(str, folders))
    raise ValueError(
        f"{location}: no checkpoint there (looked in {looked}); write the path of a run directory "
        "or of a folder with step-XXXXXXXX folders"
    )


def _one(location: str) -> Storage:
    """A checkpoint, whole or not, or the newest that counts of a run."""
    path = Storage(location)
    if is_checkpoint(path):
        return path
    found = checkpoints(location)
    counting = [path for path in found if path.exists(MARKER) and path.name.startswith("step-")]
    return (counting or found)[-1]


def is_checkpoint(path: Storage) -> bool:
    names = set(path.names())
    return bool(names & {MARKER, REJECTED, METADATA} or (names and _NAME.fullmatch(path.name)))


def _folder_in_config(path: Storage) -> str | None:
    """checkpoint.folder of a run directory."""
    with contextlib.suppress(OSError, yaml.YAMLError, AttributeError):
        return yaml.safe_load(path.read("config.yaml"))["checkpoint"].get("folder")
    return None


# --- texts ---------------------------------------------------------------------------------------


def _short(when: datetime) -> str:
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


def _saver(state: dict[str, Any]) -> str:
    layout = state.get("layout")
    if not layout:
        return "-"  # of a file that another program wrote
    more = ""
    if layout.get("replicate", 1) > 1:
        more += f", {layout['replicate']} replicas"
    if layout.get("pp", 1) > 1:
        more += f", split {layout['split']}"
    ranks = state.get("world_size", 1)
    return f"{ranks} rank{'s' * (ranks > 1)} ({_layout(state)}{more}), torch {state.get('torch')}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _bytes(path: Storage) -> int:
    return sum(path.size(name) for name in path.names())


def _any_file(path: Storage) -> str:
    return next(iter(path.names()), MARKER)
