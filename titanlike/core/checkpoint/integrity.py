"""A checkpoint is complete if every file has the size and checksum that its index lists.

    step-00000100/
        rank-R.safetensors   tensors, names as in the whole model (format.py)
        state.json           step, position in the data, layout, what a resume must not change
        index.json           the tensors, and size and checksum of all of the above
        COMMITTED            the checksum of index.json; written last, removed first
        DAMAGED              in its place: the reason for which a start rejected the checkpoint

Without torch. The files may be a stranger's: what is wrong with them is a DamagedCheckpoint.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

import xxhash

from titanlike.core.checkpoint.format import (
    FILE,
    Index,
    LaterFormat,
    Piece,
    SavedTensor,
    WrittenFile,
    checksum,
    dump_index,
    parse_index,
)
from titanlike.core.checkpoint.storage import (
    DAMAGED_MARKER,
    INDEX,
    MARKER,
    OLD_INDEX,
    STATE,
    DamagedCheckpoint,
    ReadInto,
    Storage,
)
from titanlike.core.config.errors import Refused
from titanlike.core.config.files import NotRegularFile, check_depth, parse_object
from titanlike.core.config.program import tool_program
from titanlike.core.config.schema import MESH_AXES

MODEL, OPTIMIZER, RNG = "model.", "optimizer.state.", "rng."  # prefixes of tensors' names
_NUMBER = (float, int, type(None))
_REQUIRED: dict[str, tuple[type, ...]] = {  # keys of state.json
    "step": (int,),
    "progress": (dict,),
    "val_loss": _NUMBER,
    "same": (dict,),
}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    **{"layout": (dict,), "world_size": (int,), "run_dir": (str,), "torch": (str,)},
    **{f"layout.{key}": (int,) for key in (*MESH_AXES, "ep", "replicate")},
    **{f"layout.{key}": (str,) for key in ("schedule", "split")},
    **{"progress.step": (int,), "progress.value": _NUMBER},
    **{"progress.left_out": (int,), "progress.guard": (dict,)},
    **{"digest": (str,), "data": (dict,), "config": (dict,), "model": (dict,)},
    "model.name": (str,),
}
_STEP_IN_NAME = re.compile(r"(?:step|model)-(\d{8,})")
_READ = 2**20  # bytes read at a time
_MOST_WRONG = 100  # files; with more, no other is read
_MARK = 2**16  # bytes of a marker
_LEAST_INDEX, _MOST_INDEX = 2**20, 2**30  # bytes: any index may have the one, none has the other
_PACKED = 4  # times that a file system may compress a file's header
_SPARSE = 2**36  # bytes of a file that is refused if nearly all of it is a hole


class Damage(StrEnum):
    """Messages about damaged checkpoint files. Calling a member fills in its fields and returns the
    ValueError that `reading` turns into DamagedCheckpoint. Those of index.json are in format.py."""

    MISSING = "is missing"
    IRREGULAR = "is not a regular file"
    SIZE = "has {here:,} bytes, and {written:,} were written"
    CHECKSUM = "does not match the checksum {source}"
    LACKS = "lacks {keys}"
    TYPE = "has {value:.40} as {key}"
    STEP = "is of another step, {step:.40}"
    VALUES = "has {here:,} of {all:,} values of {what}"
    SHORT = "ends too early"
    SPARSE = "has {written:,} bytes, of which {here:,} are on the disk"

    def __call__(self, **facts: Any) -> ValueError:
        return ValueError(self.format(**facts))


UNEQUAL = Damage.CHECKSUM.format(source="that was written")


def _old(folder: Storage) -> Refused:
    """Return the error for a checkpoint in a format of earlier versions."""
    command = shlex.join([*tool_program("checkpoint"), "convert", str(folder.parent)])
    reason = "is in the pickled format of an earlier version"
    return Refused("checkpoint", folder, reason, f"{command} rewrites it and those beside it")


@contextlib.contextmanager
def reading(folder: Storage, file: str) -> Iterator[None]:
    """Raise DamagedCheckpoint if the block finds the file missing or raises a ValueError.

    Other errors pass through: they do not prove that the checkpoint is damaged.
    """
    try:
        yield
    except (DamagedCheckpoint, Refused):
        raise
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, file, Damage.MISSING) from None
    except NotRegularFile:
        raise DamagedCheckpoint(folder, file, Damage.IRREGULAR) from None
    except ValueError as error:
        raise DamagedCheckpoint(folder, file, str(error)) from None


# --- completing, deleting, marking ---------------------------------------------------------------


def commit(folder: Storage, files: list[WrittenFile], state: dict[str, Any]) -> int:
    """Complete a checkpoint whose tensor files are durable: state, index, then the marker; return
    its size in bytes. Raises OSError if a file is not there."""
    text = json.dumps(state, indent=1).encode() + b"\n"
    index = dump_index(files, (len(text), checksum(text)))
    folder.write(STATE, text)
    folder.write(INDEX, index)
    try:
        check_sizes(folder, parse_index(index))
    except DamagedCheckpoint as damage:  # a file written by another rank is not visible here
        raise OSError(
            f"{damage.file} {damage.reason}; is {folder.parent} on a file system that all machines "
            "share?"
        ) from None
    folder.sync()
    folder.write(MARKER, checksum(index).encode() + b"\n")
    folder.parent.sync()
    return sum(file.size for file in files) + len(text) + len(index)


def delete_checkpoint(folder: Storage) -> None:
    """Delete a checkpoint (or a link), its marker first: after a crash it is incomplete."""
    if not folder.is_link:
        folder.remove(MARKER)
    folder.remove_all()


def mark_damaged(folder: Storage, reason: str) -> None:
    """Replace a checkpoint's marker by DAMAGED; its files are kept for inspection."""
    if folder.is_link:
        raise OSError("it is a link, and what it leads to is not this run's")
    text = f"{reason}\n{how_to_unmark(folder)}\n"
    try:
        marker = folder.read(MARKER, _MARK)
    except (FileNotFoundError, NotRegularFile, ValueError):
        marker = b""
    folder.write(DAMAGED_MARKER, text.encode() + marker)
    folder.remove(MARKER)


def how_to_unmark(folder: Storage) -> str:
    """Return what to do with a checkpoint marked as damaged."""
    command = shlex.join([*tool_program("checkpoint"), "verify", str(folder)])
    return f"read it again: {command}; if its bytes are right, rename {DAMAGED_MARKER} to {MARKER}"


# --- the index, and the files that it lists: these raise DamagedCheckpoint ------------------------


def read_index(folder: Storage, marker: str = MARKER) -> Index:
    """Read the index of a committed checkpoint, or of one with another marker. Raises
    Refused for an earlier format, ValueError for a later one."""
    sizes = folder.sizes()
    if INDEX not in sizes and OLD_INDEX in sizes:
        raise _old(folder)
    with reading(folder, marker):
        # a marker made by renaming DAMAGED has the reason above the checksum
        expected = folder.read(marker, _MARK).decode(errors="replace").strip().rpartition("\n")[2]
    with reading(folder, INDEX):
        # an entry in a file's own header is longer than that in the index
        files = {name: size for name, size in sizes.items() if size and FILE.fullmatch(name)}
        if folder.local and folder.allocated(INDEX):  # else what is allocated is not told
            files = {name: _PACKED * folder.allocated(name) for name in files}
        most = min(_MOST_INDEX, _LEAST_INDEX + sum(files.values()))
        text = folder.read(INDEX, most)
        if checksum(text) != expected and OLD_INDEX in sizes:  # its conversion was cut off
            raise _old(folder)
        if checksum(text) != expected:
            raise Damage.CHECKSUM(source=f"in {marker}")
        try:
            return parse_index(text)
        except LaterFormat as error:
            later = f"checkpoint {folder}: {INDEX} {error}"
    raise ValueError(later)


def wrong_sizes(folder: Storage, index: Index) -> Iterator[DamagedCheckpoint]:
    """Yield the errors of files that are missing or have another size, from one listing."""
    sizes = folder.sizes()
    files = {name: size for name, (size, _) in index.files.items()} | {STATE: index.state[0]}
    for name, size in files.items():
        try:
            with reading(folder, name):
                here = sizes.get(name)
                if name not in sizes and folder.local:
                    raise FileNotFoundError
                # a listing of an object store may be behind, and leaves out what is no file there
                here = folder.size(name) if here is None else here
                if here != size:
                    raise Damage.SIZE(here=here, written=size)
                if size > _SPARSE and (here := folder.allocated(name)) < size >> 10:
                    raise Damage.SPARSE(here=here, written=size)
        except DamagedCheckpoint as damage:
            yield damage


def check_sizes(folder: Storage, index: Index) -> None:
    """Check that each file exists with its size."""
    for damage in wrong_sizes(folder, index):
        raise damage


def check_all(folder: Storage) -> None:
    """Check every file, including its contents."""
    for damage in damaged_files(folder):
        raise damage


def damaged_files(folder: Storage, marker: str = MARKER) -> Iterator[DamagedCheckpoint]:
    """Yield the errors of files with wrong sizes or contents, reading all."""
    try:
        index = read_index(folder, marker)
    except DamagedCheckpoint as damage:
        yield damage
        return
    wrong = {damage.file: damage for damage in islice(wrong_sizes(folder, index), _MOST_WRONG)}
    pieces: dict[str, list[Piece]] = {name: [] for name in index.files}
    try:
        with reading(folder, INDEX):
            for piece in (piece for several in index.pieces().values() for piece in several):
                pieces[piece.file].append(piece)
    except DamagedCheckpoint as damage:
        yield damage
        return
    try:
        if STATE not in wrong:
            read_state(folder, index)
    except DamagedCheckpoint as damage:
        yield damage
    yield from wrong.values()
    for name in index.files.keys() - wrong.keys() if len(wrong) < _MOST_WRONG else ():
        try:
            with reading(folder, name), folder.reader(name) as read_into:
                length, expected = index.files[name][1]
                if _hash(xxhash.xxh3_128(), read_into, 0, length) != expected:
                    raise ValueError(UNEQUAL)
                for piece in sorted(pieces[name], key=lambda piece: piece.begin):
                    for part in piece.parts():
                        read_part(read_into, part)
        except DamagedCheckpoint as damage:
            yield damage


def read_part(read_into: ReadInto, part: Piece, buffer: memoryview | None = None) -> None:
    """Read the bytes of one of a piece's `parts`, into a buffer of their size if given. Raises
    ValueError if they are not those that were written."""
    if _hash(xxhash.xxh3_64(), read_into, part.begin, part.bytes, buffer) != part.sums:
        raise ValueError(UNEQUAL)


def _hash(
    hasher: Any, read_into: ReadInto, begin: int, length: int, buffer: memoryview | None = None
) -> str:
    """Hash the next bytes while they are in the CPU's cache."""
    scratch = memoryview(bytearray(min(_READ, length))) if buffer is None else buffer
    for start in range(0, length, _READ):
        size = min(_READ, length - start)
        view = scratch[:size] if buffer is None else scratch[start : start + size]
        if read_into(begin + start, view) < size:
            raise Damage.SHORT()
        hasher.update(view)
    return hasher.hexdigest()


# --- state.json ----------------------------------------------------------------------------------


def read_state(folder: Storage, index: Index | None = None) -> dict[str, Any]:
    """Read state.json. Raises DamagedCheckpoint. index: with its checksum; None = not compared."""
    with reading(folder, STATE):
        text = folder.read(STATE)
        if index is not None and checksum(text) != index.state[1]:
            raise ValueError(UNEQUAL)
        state = parse_object(text)
        check_depth(state)
        if missing := [key for key in _REQUIRED if key not in state]:
            raise Damage.LACKS(keys=", ".join(missing))
        for key, types in (_REQUIRED | _OPTIONAL).items():
            group, _, name = key.rpartition(".")
            owner = state.get(group, {}) if group else state
            if name in owner and type(owner[name]) not in types:
                raise Damage.TYPE(value=repr(owner[name]), key=key)
        if "name" not in state.get("model", {"name": ""}):
            raise Damage.LACKS(keys="model.name")
        step, progress = state["step"], state["progress"]
        named = _STEP_IN_NAME.fullmatch(folder.name)
        if step < 0 or (named and int(named[1]) != step) or progress.get("step", step) != step:
            raise Damage.STEP(step=str(step))
        for name, saved in progress.get("guard", {}).items():
            if type(saved) is not (int if name == "nonfinite" else list):
                raise Damage.TYPE(value=repr(saved), key=f"progress.guard.{name}")
    return state


# --- both -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointHeader:
    """A checkpoint's small files, checked."""

    folder: Storage
    state: dict[str, Any]
    index: Index
    # name -> what is read under it; other names than the checkpoint's where averages are weights
    tensors: dict[str, SavedTensor] = field(default_factory=dict)

    def pieces(self, names: Collection[str] | None = None) -> dict[str, list[Piece]]:
        """Return the pieces of these entries of `tensors`, or of all. Raises DamagedCheckpoint."""
        wanted = None if names is None else {self.tensors[name].name for name in names}
        with reading(self.folder, INDEX):
            found = self.index.pieces(wanted)
        names = self.tensors if names is None else names
        return {name: found[self.tensors[name].name] for name in names}


def open_header(folder: Storage) -> CheckpointHeader:
    """Read and check the small files of a committed checkpoint, and its files' sizes: all but the
    contents of the tensors' files."""
    index = read_index(folder)
    check_sizes(folder, index)
    return CheckpointHeader(folder, read_state(folder, index), index, index.tensors)
