"""The commands of tools/checkpoint.py: which checkpoints exist, what one contains, what is damaged.

Those that read tensors are in conversion.py; they alone import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import runpy
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlike.core.checkpoint import integrity
from titanlike.core.checkpoint.discovery import leads_out
from titanlike.core.checkpoint.format import SavedTensor
from titanlike.core.checkpoint.integrity import MODEL, OPTIMIZER, RNG
from titanlike.core.checkpoint.storage import (
    DAMAGED_MARKER,
    MARKER,
    OLD_INDEX,
    DamagedCheckpoint,
    NotSmallText,
    Storage,
    UnreadableFile,
)
from titanlike.core.config.files import NotRegularFile
from titanlike.core.config.program import argument_parser, exit_code, scripts_dir
from titanlike.core.config.schema import MESH_AXES
from titanlike.core.data.kinds import READERS
from titanlike.core.metrics import units
from titanlike.core.metrics.console import Console

OK, DIFFERENT = 0, 1  # exit codes; 2 is that of another error of the user's
COMPLETE, DAMAGED, REJECTED, INCOMPLETE = "complete", "damaged", "rejected", "incomplete"
UNREADABLE = "unreadable"  # at the moment, so neither complete nor damaged
_ANY_NAME = re.compile(r"(step|model)-(\d{8,})")
_MAX_FILES = 9  # files that `show` lists without --tensors
_DESCRIPTION = """\
Inspect and convert checkpoints. A CHECKPOINT is a step-XXXXXXXX or model-XXXXXXXX folder, or a run
directory, which stands for its newest one; each is a local path or the URL of an object store (s3://...)."""
# command: what it does, arguments, options without a value with their help
_COMMANDS: dict[str, tuple[str, str, dict[str, str]]] = {
    "list": ("the checkpoints of a run, or in a folder", "FOLDER", {}),
    "show": ("what a checkpoint contains", "CHECKPOINT", {"tensors": "name all tensors and files"}),
    "verify": ("check every file against its checksum; of a run, all", "CHECKPOINT", {}),
    "digest": ("one number for all tensors, of A and of B, the same in any layout", "A B", {}),
    "consolidate": (
        "the model (names without `model.`) in one safetensors file",
        "CHECKPOINT FILE",
        {},
    ),
    "convert": (
        "rewrite checkpoints of earlier versions, in place: of a run, or in a folder",
        "FOLDER",
        {},
    ),
}


def main(argv: list[str]) -> int:
    """Run one command; return the exit code."""
    parser = argument_parser(_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (text, positional, options) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        for argument in positional.split():
            command.add_argument(argument.lower(), metavar=argument)
        for option, about in options.items():
            command.add_argument(f"--{option}", action="store_true", help=about)
        if name == "consolidate":
            command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights")
    args = parser.parse_args(argv)
    codes: dict[type[Exception], int] = {DamagedCheckpoint: DIFFERENT}
    return exit_code(lambda: OK if _run(Console(steps=1), args) else DIFFERENT, codes)


def _run(console: Console, args: argparse.Namespace) -> bool:
    """Run a command; return False if something is damaged or different."""
    if args.command == "list":
        list_checkpoints(console, args.folder)
        return True
    if args.command == "show":
        return show(console, args.checkpoint, all_names=args.tensors)
    if args.command == "verify":
        return verify(console, args.checkpoint)
    if args.command == "convert":
        script = runpy.run_path(str(scripts_dir() / "convert_checkpoint.py"))
        return script["convert_all"](all_checkpoints(args.folder), console.line)
    from titanlike.hf.conversion import compare_digests, consolidate  # imports torch

    if args.command == "digest":
        return compare_digests(console, args.a, args.b)
    console.line(consolidate(args.checkpoint, args.file, dtype=args.dtype))
    return True


def all_checkpoints(location: str) -> list[Storage]:
    """Return the checkpoint at `location`, or all of the run or folder there, oldest first.

    Raises ValueError if there is none.
    """
    path = Storage(location)
    names = path.names()
    if (names and _ANY_NAME.fullmatch(path.name)) or {MARKER, DAMAGED_MARKER, OLD_INDEX} & {*names}:
        return [path]
    folders = [path.at("checkpoints"), path]
    for folder in folders:
        if names := [name for name in folder.names() if _ANY_NAME.fullmatch(name)]:
            names.sort(key=lambda name: (int(name.partition("-")[2]), name))
            checkpoints = [folder.at(name) for name in names]
            for each in checkpoints:
                if leads := leads_out(each, path):
                    raise ValueError(f"{each}: is a link out of {location}; write {leads}")
            return checkpoints
    searched = " and ".join(map(str, folders))
    fix = "write the path of a run directory or of a folder with step-XXXXXXXX folders"
    from titanlike.core.config.received import read_run

    with contextlib.suppress(OSError, ValueError):
        if elsewhere := read_run(Path(location)).checkpoint.folder:
            fix = f"its config.yaml names another folder; if you trust it, write {elsewhere}"
    raise ValueError(f"{location}: no checkpoint there (searched {searched}); {fix}")


def list_checkpoints(console: Console, location: str) -> None:
    """Print a line for each checkpoint, then the reasons why some are not complete."""
    rows, reasons = [], []
    for path in all_checkpoints(location):
        word, reason = condition(path)
        state, sizes = _state(path), _sizes(path)
        when = path.modified(MARKER if MARKER in sizes else next(iter(sizes), MARKER))
        date = None
        if when is not None:  # 02-14 15:04 of this year, else 2025-02-14
            when = when.astimezone()
            this_year = when.year == datetime.now().astimezone().year
            date = f"{when:%m-%d %H:%M}" if this_year else f"{when:%Y-%m-%d}"
        size = units.size(sum(sizes.values()))
        rows.append([path.name, word, _loss(state), _layout(state), size, date])
        if reason:
            reasons.append((path.name, reason))
    console.table("", ["checkpoint", "state", "val_loss", "layout", "size", "written"], rows)
    if reasons:
        console.line()
        console.fields(reasons)


def condition(path: Storage) -> tuple[str, str]:
    """Return a checkpoint's condition (complete, damaged, rejected, incomplete or unreadable), by
    the sizes of its files, and the reason."""
    try:
        if path.exists(MARKER):
            integrity.open_header(path)
            return COMPLETE, ""
        if path.exists(DAMAGED_MARKER):
            reason = path.read(DAMAGED_MARKER).decode(errors="replace").partition("\n")[0]
            again = integrity.how_to_unmark(path)
            return REJECTED, f"a launch found it damaged: {reason}; {again}"
    except DamagedCheckpoint as damage:
        return DAMAGED, f"{damage.file} {damage.reason}"
    except (NotRegularFile, NotSmallText):
        return REJECTED, f"{DAMAGED_MARKER} is not a text file"
    except (UnreadableFile, ValueError) as error:  # ValueError: another format
        return UNREADABLE, str(error)
    return INCOMPLETE, f"no {MARKER}: its save was killed, or is in progress"


def show(console: Console, location: str, *, all_names: bool) -> bool:
    """Print what is known without reading tensors; return whether the checkpoint is complete.

    For a run, its newest committed checkpoint.
    """
    checkpoints = all_checkpoints(location)
    steps = [path for path in checkpoints if path.exists(MARKER) and path.name.startswith("step-")]
    path = (steps or checkpoints)[-1]
    word, reason = condition(path)
    state, when = _state(path), path.modified(MARKER)
    text = f"{word}, by the sizes of its files (verify reads them)" if word == COMPLETE else word
    saved_by = None
    if layout := state.get("layout"):
        ranks = state.get("world_size", 1)
        details = f", {layout['replicate']} replicas" if layout.get("replicate", 1) > 1 else ""
        details += f", split {layout.get('split')}" if layout.get("pp", 1) > 1 else ""
        saved_by = f"{ranks} rank{'s' * (ranks > 1)} ({_layout(state)}{details})"
        saved_by += f", torch {state.get('torch')}"
    fields = {
        "checkpoint": path,
        "state": f"{text}: {reason}" if reason else text,
        "written": when and f"{when.astimezone():%Y-%m-%d %H:%M:%S}",
        "step": state.get("step"),
        "val_loss": _loss(state),
        "saved by": saved_by,
    }
    console.fields([(name, str(value)) for name, value in fields.items() if value is not None])
    sizes = list(_sizes(path).items())
    if len(sizes) > _MAX_FILES and not all_names:
        rest = sizes[_MAX_FILES - 1 :]
        total = sum(size for _, size in rest)
        sizes = [*sizes[: _MAX_FILES - 1], (f"and {len(rest):,} more", total)]
    console.line()
    console.table("", ["file", "size"], [[name, units.size(size)] for name, size in sizes])
    try:
        marker = DAMAGED_MARKER if word == REJECTED else MARKER
        tensors = integrity.read_index(path, marker).tensors
    except DamagedCheckpoint as damage:
        console.line(f"  {damage.file} {damage.reason}")
        return False
    kinds = {MODEL: "parameters", OPTIMIZER: "optimizer", RNG: "random generators"}
    kinds |= {READERS: "readers of the data", "": "others"}
    groups: dict[str, list[SavedTensor]] = {kind: [] for kind in kinds}
    for name, tensor in tensors.items():
        groups[next(prefix for prefix in kinds if name.startswith(prefix))].append(tensor)
    rows = []
    for prefix, group in groups.items():
        dtypes = ", ".join(sorted({tensor.dtype for tensor in group}))
        numel, size = sum(t.numel for t in group), sum(t.bytes for t in group)
        if group:
            rows.append([kinds[prefix], len(group), units.count(numel), dtypes, units.size(size)])
    console.line()
    console.table("", ["tensors", "count", "elements", "dtype", "size"], rows)
    if all_names:
        rows = [
            [name, " x ".join(map(str, t.shape)) or "scalar", t.dtype, units.size(t.bytes)]
            for name, t in tensors.items()
        ]
        console.line()
        console.table("", ["tensor", "shape", "dtype", "size"], rows)
    return word == COMPLETE


def verify(console: Console, location: str) -> bool:
    """Read all files and print a line for each problem; return whether the checkpoints are intact.

    Raises ValueError if there is no checkpoint, UnreadableFile if one cannot be read and none is
    damaged.
    """
    paths = all_checkpoints(location)
    alone = [str(path) for path in paths] == [str(Storage(location))]
    intact = damaged = 0
    unread: Exception | None = None  # the first
    for path in paths:
        begin = time.perf_counter()
        word, reason = condition(path)
        if word == INCOMPLETE and not alone:
            console.line(f"{path.name}: {reason}")  # harmless for runs
            continue
        problems = [reason]
        try:
            if word == UNREADABLE:
                raise UnreadableFile(reason)
            if word in (COMPLETE, DAMAGED, REJECTED):
                marker = DAMAGED_MARKER if word == REJECTED else MARKER
                found = integrity.damaged_files(path, marker)
                problems = [f"{damage.file} {damage.reason}" for damage in found]
            if word == REJECTED and not problems:
                problems = [f"its bytes are right: rename {DAMAGED_MARKER} to {MARKER}"]
        except UnreadableFile as error:
            word, problems = UNREADABLE, [str(error)]
            unread = unread or error
        if problems:
            word = DAMAGED if word == COMPLETE else word
            damaged += word != UNREADABLE
            console.line(f"{path.name}: {'marked as damaged' if word == REJECTED else word}")
            for problem in dict.fromkeys(problems):
                console.line(f"  {problem}")
            continue
        sizes = _sizes(path)
        size, spent = units.size(sum(sizes.values())), units.duration(time.perf_counter() - begin)
        console.line(f"{path.name}: complete ({len(sizes)} files, {size}, read in {spent})")
        intact += 1
    if unread is not None and not damaged:
        raise unread
    return intact > 0 and not damaged


def _sizes(path: Storage) -> dict[str, int]:
    """Return the sizes of a folder's readable files by name."""
    with contextlib.suppress(OSError):
        return {name: size for name, size in sorted(path.sizes().items()) if size is not None}
    return {}


def _state(path: Storage) -> dict[str, Any]:
    """Read state.json; {} if unreadable."""
    with contextlib.suppress(ValueError, OSError):
        return integrity.read_state(path)
    return {}


def _loss(state: dict[str, Any]) -> str | None:
    loss = state.get("val_loss")
    return None if loss is None else units.decimal(loss)


def _layout(state: dict[str, Any]) -> str:
    """Format the axes with more than one rank: pp2 x dp4 1f1b."""
    layout = state.get("layout") or {}
    shown = {key: layout.get(key) for key in MESH_AXES}
    degrees = [f"{key}{n}" for key, n in shown.items() if isinstance(n, int) and n > 1]
    schedule = [layout.get("schedule", "")] if layout.get("pp", 1) > 1 else []
    return " ".join([" x ".join(degrees), *schedule]) if degrees else "one rank" if layout else "-"
