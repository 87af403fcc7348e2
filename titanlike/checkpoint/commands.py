"""The commands of tools/checkpoint.py: which checkpoints exist, what one contains, what is damaged.

Those that convert or compare tensors are in conversion.py; they alone import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from datetime import datetime
from typing import Any

from titanlike.checkpoint import integrity
from titanlike.checkpoint.discovery import all_checkpoints
from titanlike.checkpoint.integrity import (
    DAMAGED_MARKER,
    MARKER,
    DamagedCheckpoint,
    UnsafeCheckpoint,
)
from titanlike.checkpoint.metadata import (
    MODEL,
    OPTIMIZER,
    RNG,
    SavedTensor,
    missing_data,
    read_tensors,
)
from titanlike.checkpoint.storage import Storage, UnreadableFile
from titanlike.config.files import NotRegularFile
from titanlike.config.program import program
from titanlike.metrics import units
from titanlike.metrics.console import Console

OK, DIFFERENT, INVALID = 0, 1, 2  # exit codes
COMPLETE, DAMAGED, REJECTED, INCOMPLETE = "complete", "damaged", "rejected", "incomplete"
UNREADABLE = "unreadable"  # now: that is no verdict
_MAX_FILES = 9  # that `show` lists without --tensors
_DESCRIPTION = """\
Inspect and convert checkpoints. A CHECKPOINT is a step-XXXXXXXX or model-XXXXXXXX folder, or a run
directory, which stands for its newest one; each is a local path or an fsspec URL (s3://...)."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return OK if _run(Console(steps=1), arguments) else DIFFERENT
    except (DamagedCheckpoint, UnsafeCheckpoint) as error:
        return _fail(error, DIFFERENT)
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, INVALID)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(error: object, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=shlex.join(program()), description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, *positional: str, **options: str) -> Any:
        """options: those without a value, with their help."""
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=name)
        for argument in positional:
            command.add_argument(argument.lower(), metavar=argument)
        for option, about in options.items():
            command.add_argument(f"--{option}", action="store_true", help=about)
        return command

    add("list", "the checkpoints of a run, or in a folder", "FOLDER")
    text = "what a checkpoint contains"
    add("show", text, "CHECKPOINT", tensors="name every tensor and every file")
    text = "check every file against its checksum; of a run, all checkpoints"
    repair = "also lift the mark DAMAGED where all bytes are right"
    add("verify", text, "CHECKPOINT", repair=repair)
    text = "whether two checkpoints have the same tensors"
    tensors = "name every tensor that differs"
    command = add("compare", text, "A", "B", tensors=tensors)
    text = "absolute difference that counts as none"
    command.add_argument("--tolerance", type=float, default=0.0, help=text)
    text = "the model (names without `model.`) in one safetensors file"
    optimizer = "also all that a run needs to resume"
    command = add("consolidate", text, "CHECKPOINT", "FILE", optimizer=optimizer)
    command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights")
    text = "a checkpoint (step- or model-XXXXXXXX) in FOLDER from a safetensors file"
    add("restore", text, "FILE", "FOLDER")
    return parser


def _run(console: Console, args: argparse.Namespace) -> bool:
    """Whether nothing is damaged or different."""
    if args.command == "list":
        list_checkpoints(console, args.folder)
        return True
    if args.command == "show":
        return show(console, args.checkpoint, all_names=args.tensors)
    if args.command == "verify":
        return verify(console, args.checkpoint, repair=args.repair)
    from titanlike.checkpoint.conversion import compare, consolidate, restore  # imports torch

    if args.command == "compare":
        return compare(console, args.a, args.b, args.tolerance, all_names=args.tensors)
    if args.command == "restore":
        console.line(restore(args.file, args.folder))
    else:
        options = {"dtype": args.dtype, "with_optimizer": args.optimizer}
        console.line(consolidate(args.checkpoint, args.file, **options))
    return True


def list_checkpoints(console: Console, location: str) -> None:
    """Print a line for each checkpoint, and below them the reasons why some are not complete."""
    rows, reasons = [], []
    for path in all_checkpoints(location):
        word, reason = condition(path)
        state = _state(path)
        sizes = _sizes(path)
        when = path.modified(MARKER if MARKER in sizes else next(iter(sizes), MARKER))
        loss = state.get("val_loss")
        size = units.size(sum(sizes.values()))
        shown = None if loss is None else units.decimal(loss)
        rows.append([path.name, word, shown, _layout(state), size, when and _date(when)])
        if reason:
            reasons.append((path.name, reason))
    console.table("", ["checkpoint", "state", "val_loss", "layout", "size", "written"], rows)
    if reasons:
        console.line()
        console.fields(reasons)


def condition(path: Storage) -> tuple[str, str]:
    """Complete, damaged, rejected, incomplete or unreadable, by the sizes of its files; and why."""
    try:
        if path.exists(MARKER):
            integrity.check_quick(path)
            return COMPLETE, ""
        if path.exists(DAMAGED_MARKER):
            reason = path.read(DAMAGED_MARKER).decode(errors="replace").partition("\n")[0]
            again = integrity.repair_command(path)
            return REJECTED, f"a start found it damaged: {reason}; read it again: {again}"
    except DamagedCheckpoint as damage:
        return DAMAGED, f"{damage.file} {damage.reason}"
    except NotRegularFile:
        return REJECTED, f"{DAMAGED_MARKER} is not a regular file"
    except (UnreadableFile, ValueError) as error:  # ValueError: a later format
        return UNREADABLE, str(error)
    return INCOMPLETE, f"no {MARKER}: its save was killed, or is in progress"


def show(console: Console, location: str, *, all_names: bool) -> bool:
    """Print what is known without reading tensors; whether the checkpoint is complete.

    Of a run, its newest committed checkpoint.
    """
    checkpoints = all_checkpoints(location)
    steps = [path for path in checkpoints if path.exists(MARKER) and path.name.startswith("step-")]
    path = (steps or checkpoints)[-1]
    word, reason = condition(path)
    state = _state(path)
    when = path.modified(MARKER)
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
        _show_tensors(console, [*read_tensors(path).values()], all_names)
    except DamagedCheckpoint as damage:
        console.line(f"  {damage.file} {damage.reason}")
        return False
    return word == COMPLETE


def _show_files(console: Console, path: Storage, all_names: bool) -> None:
    sizes = list(_sizes(path).items())
    if len(sizes) > _MAX_FILES and not all_names:
        listed, rest = sizes[: _MAX_FILES - 1], sizes[_MAX_FILES - 1 :]
        sizes = [*listed, (f"and {len(rest):,} more", sum(size for _, size in rest))]
    console.line()
    console.table("", ["file", "size"], [[name, units.size(size)] for name, size in sizes])


def _show_tensors(console: Console, tensors: list[SavedTensor], all_names: bool) -> None:
    kinds = {MODEL: "parameters", OPTIMIZER: "optimizer", RNG: "random generators", "": "others"}
    groups: dict[str, list[SavedTensor]] = {kind: [] for kind in kinds.values()}
    for tensor in tensors:
        prefix = next(prefix for prefix in kinds if tensor.name.startswith(prefix))
        groups[kinds[prefix]].append(tensor)
    rows = []
    for kind, group in groups.items():
        dtypes = ", ".join(sorted({tensor.dtype for tensor in group}))
        numel, size = sum(t.numel for t in group), sum(t.bytes for t in group)
        if group:
            rows.append([kind, len(group), units.count(numel), dtypes, units.size(size)])
    console.line()
    console.table("", ["tensors", "count", "elements", "dtype", "size"], rows)
    if all_names:
        rows = []
        for tensor in tensors:
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            rows.append([tensor.name, shape, tensor.dtype, units.size(tensor.bytes)])
        console.line()
        console.table("", ["tensor", "shape", "dtype", "size"], rows)


def verify(console: Console, location: str, *, repair: bool = False) -> bool:
    """Read all files and print a line for each problem; whether the checkpoints are intact.

    repair: lift the marks of those that are. Raises ValueError where there is no checkpoint, and
    UnreadableFile where one cannot be read and none is damaged.
    """
    paths = all_checkpoints(location)
    alone = [str(path) for path in paths] == [str(Storage(location))]
    intact = damaged = 0
    unread: UnreadableFile | None = None  # the first
    for path in paths:
        begin = time.perf_counter()
        word, reason = condition(path)
        if word == INCOMPLETE and not alone:
            console.line(f"{path.name}: {reason}")  # harms no run
            continue
        marked, problems = word == REJECTED, [reason]
        try:
            if word == UNREADABLE:
                raise UnreadableFile(reason)
            if word in (COMPLETE, DAMAGED) or (marked and repair):
                problems = _problems(path, marked)
            if marked and not problems:
                integrity.lift_mark(path, integrity.marked_checksum(path))
        except UnreadableFile as error:
            word, problems = UNREADABLE, [str(error)]
            unread = unread or error
        if problems:
            damaged += word != UNREADABLE
            console.line(f"{path.name}: {DAMAGED if word == REJECTED else word}")
            for problem in dict.fromkeys(problems):
                console.line(f"  {problem}")
            continue
        files = integrity.read_manifest(path)
        size = units.size(sum(size for size, _ in files.values()))
        spent = units.duration(time.perf_counter() - begin)
        text = f"{path.name}: complete ({len(files)} files, {size}, read in {spent})"
        if marked:
            text += f"; it was marked as damaged: the file {DAMAGED_MARKER} is removed"
        console.line(text)
        intact += 1
    if unread is not None and not damaged:
        raise unread
    return intact > 0 and not damaged


def _problems(path: Storage, marked: bool) -> list[str]:
    """What is wrong with the bytes of a checkpoint, committed or marked as damaged."""
    problems = []
    try:
        files = integrity.read_manifest(path, integrity.marked_checksum(path) if marked else None)
        wrong = {damage.file: damage for damage in integrity.wrong_sizes(path, files)}
        for name in files:
            try:
                if name in wrong:
                    raise wrong[name]
                integrity.check_sums(path, files, [name])
            except DamagedCheckpoint as damage:
                problems.append(f"{damage.file} {damage.reason}")
        if not any(text.startswith(integrity.STATE) for text in problems):
            integrity.read_state(path)
        if not any(text.startswith(integrity.METADATA) for text in problems):
            problems += missing_data(read_tensors(path), files)
    except DamagedCheckpoint as damage:
        problems.append(f"{damage.file} {damage.reason}")
    except integrity.UnsafeCheckpoint as error:
        problems.append(str(error))
    return problems


def _sizes(path: Storage) -> dict[str, int]:
    """The sizes of a folder's files, of what can be read."""
    sizes = {}
    with contextlib.suppress(OSError):
        for name in path.names():
            with contextlib.suppress(OSError):
                sizes[name] = path.size(name)
    return sizes


def _date(when: datetime) -> str:
    """02-14 15:04 of this year, else 2025-02-14."""
    here, now = when.astimezone(), datetime.now().astimezone()
    return f"{here:%m-%d %H:%M}" if here.year == now.year else f"{here:%Y-%m-%d}"


def _state(path: Storage) -> dict[str, Any]:
    """state.json, {} where it cannot be read."""
    try:
        return integrity.read_state(path)
    except (ValueError, OSError):
        return {}


def _layout(state: dict[str, Any]) -> str:
    """pp2 x dp4 1f1b: degrees above one."""
    layout = state.get("layout") or {}
    shown = {key: layout.get(key) for key in ("pp", "dp", "cp", "tp")}
    degrees = [f"{key}{n}" for key, n in shown.items() if isinstance(n, int) and n > 1]
    schedule = [layout["schedule"]] if layout.get("pp", 1) > 1 else []
    return " ".join([" x ".join(degrees), *schedule]) if degrees else "one rank" if layout else "-"


def _saved_by(state: dict[str, Any]) -> str:
    layout = state.get("layout")
    if not layout:
        return "-"  # a file that another program wrote
    more = f", {layout['replicate']} replicas" if layout.get("replicate", 1) > 1 else ""
    more += f", split {layout['split']}" if layout.get("pp", 1) > 1 else ""
    ranks = state.get("world_size", 1)
    return f"{ranks} rank{'s' * (ranks > 1)} ({_layout(state)}{more}), torch {state.get('torch')}"
