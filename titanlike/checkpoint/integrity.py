"""A checkpoint is complete if every file has the size and checksum that its manifest lists.

    step-00000100/
        __R_0.distcp .metadata   tensors and their layout, names as in the whole model (DCP)
        pieces.json              a checksum of each chunk in these files: of what DCP calls a block
                                 of a tensor, so that what a rank reads is checked as it is read
        state.json               step, position in the data, layout, what a resume must not change
        files.json               the manifest: size in bytes and xxh3 checksum of each file above
        COMMITTED                the checksum of files.json; written last, removed first
        DAMAGED                  in its place: the reason for which a start rejected the checkpoint

The small files are read here, without torch, and without executing code: DCP's own reader calls
`pickle.load` on `.metadata` (torch 2.11 to 2.15), so that a checkpoint from an untrusted source can
execute any code.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shlex
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from operator import index
from typing import Any, NamedTuple

import xxhash

from titanlike.checkpoint.storage import (
    CHUNKS,
    DAMAGED_MARKER,
    FORMAT,
    MANIFEST,
    MARKER,
    METADATA,
    STATE,
    DamagedCheckpoint,
    Storage,
)
from titanlike.config.files import NotRegularFile, parse_object
from titanlike.config.program import tool_program
from titanlike.config.schema import MESH_AXES

MODEL, OPTIMIZER, RNG = "model.", "optimizer.state.", "rng."  # prefixes of tensors' names
_NUMBER = (float, int, type(None))
_REQUIRED: dict[str, tuple[type, ...]] = {  # keys of state.json
    "step": (int,),
    "progress": (dict,),
    "val_loss": _NUMBER,
    "same": (dict,),
    "sequences": (int, type(None)),  # None if restored from another program's file
}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    **{"layout": (dict,), "world_size": (int,), "run_dir": (str,), "torch": (str,)},
    **{f"layout.{key}": (int,) for key in (*MESH_AXES, "ep", "replicate")},
    **{f"layout.{key}": (str,) for key in ("schedule", "split")},
    **{"progress.step": (int,), "progress.value": _NUMBER},
    **{"progress.left_out": (int,), "progress.guard": (dict,)},
    **{"digest": (str,), "data": (dict,), "config": (dict,), "model": (dict,), "format": (int,)},
    "model.name": (str,),
}
_STEP_IN_NAME = re.compile(r"(?:step|model)-(\d{8,})")
_READ = 2**22  # bytes read at a time
_DIGEST = 16  # bytes of a checksum


class Damage(StrEnum):
    """Messages about damaged checkpoint files. Calling a member fills in its fields and returns the
    ValueError that `reading` turns into DamagedCheckpoint."""

    MISSING = "is missing"
    IRREGULAR = "is not a regular file"
    SIZE = "has {here:,} bytes, and {written:,} were written"
    CHECKSUM = "does not match the checksum {source}"
    FORM = "is not a list of {what}"
    UNREADABLE = "cannot be read as a description of tensors ({error})"
    UNLISTED = "does not list {names}"
    OUTSIDE = "names a file outside the folder, {name!r}"
    LACKS = "lacks {keys}"
    TYPE = "has {value:.40} as {key}"
    STEP = "is of another step, {step:.40}"
    VALUES = "has {here:,} of {all:,} values of {what}"
    NO_PLACE = "does not say where {name} is"
    SHAPES = "has other shapes than {file} at byte {begin}"
    SHORT = "ends too early"
    RECORD = "has no tensor at byte {begin} ({error})"

    def __call__(self, **facts: Any) -> ValueError:
        return ValueError(self.format(**facts))


UNEQUAL = Damage.CHECKSUM.format(source="that was written")

Manifest = dict[str, tuple[int, str]]  # file -> bytes, checksum


class UnsafeCheckpoint(ValueError):
    """A checkpoint's file names code that loading does not need and that might be malicious."""


@contextlib.contextmanager
def reading(folder: Storage, file: str) -> Iterator[None]:
    """Raise DamagedCheckpoint if the block finds the file missing or raises a ValueError.

    Other errors pass through: they do not prove that the checkpoint is damaged.
    """
    try:
        yield
    except (DamagedCheckpoint, UnsafeCheckpoint):
        raise
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, file, Damage.MISSING) from None
    except NotRegularFile:
        raise DamagedCheckpoint(folder, file, Damage.IRREGULAR) from None
    except ValueError as error:
        raise DamagedCheckpoint(folder, file, str(error)) from None


def checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


# --- completing, deleting, marking ---------------------------------------------------------------


def commit(folder: Storage, files: Manifest, state: dict[str, Any]) -> None:
    """Complete a checkpoint whose tensor files are durable: state, manifest, then the marker."""
    text = json.dumps({"format": FORMAT, **state}, indent=1).encode() + b"\n"
    folder.write(STATE, text)
    files = dict(sorted({**files, STATE: (len(text), checksum(text))}.items()))
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in files.items()]
    manifest = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    folder.write(MANIFEST, manifest)
    folder.sync()
    folder.write(MARKER, checksum(manifest).encode() + b"\n")
    folder.parent.sync()


def delete_checkpoint(folder: Storage) -> None:
    """Delete a checkpoint, its marker first: a crash leaves an incomplete one, never a damaged
    one."""
    folder.remove(MARKER)
    folder.remove_all()


def mark_damaged(folder: Storage, reason: str) -> None:
    """Replace a checkpoint's marker by DAMAGED; its files are kept for inspection."""
    text = f"{reason}\nIf its bytes are right, {repair_command(folder)} lifts this mark.\n"
    try:
        marker = folder.read(MARKER)
    except (FileNotFoundError, NotRegularFile):
        marker = b""
    folder.write(DAMAGED_MARKER, text.encode() + marker)
    folder.remove(MARKER)


def marked_checksum(folder: Storage) -> str:
    """Return the manifest's checksum of a checkpoint marked as damaged. Raises DamagedCheckpoint."""
    with reading(folder, DAMAGED_MARKER):
        marked = folder.read(DAMAGED_MARKER).decode(errors="replace")
    with reading(folder, MANIFEST):
        expected = checksum(folder.read(MANIFEST))
        recorded = marked.strip().rpartition("\n")[2]
        if re.fullmatch(r"[0-9a-f]{32}", recorded) and recorded != expected:
            raise Damage.CHECKSUM(source="in its mark")
    return expected


def lift_mark(folder: Storage, expected: str) -> None:
    """Commit a marked checkpoint again, after all of its bytes were found intact."""
    folder.write(MARKER, expected.encode() + b"\n")
    folder.remove(DAMAGED_MARKER)


def repair_command(folder: Storage) -> str:
    """Return the shell line that verifies a marked checkpoint again."""
    return shlex.join([*tool_program("checkpoint"), "verify", str(folder), "--repair"])


# --- the manifest, and the files that it lists: these raise DamagedCheckpoint --------------------


def read_manifest(folder: Storage, expected: str | None = None) -> Manifest:
    """Return sizes and checksums of a committed checkpoint's files.

    expected: the manifest's own checksum; None = the marker's.
    """
    with reading(folder, MANIFEST):
        text = folder.read(MANIFEST)
    if expected is None:
        with reading(folder, MARKER):
            marker = folder.read(MARKER).decode(errors="replace")
        # a marker made by renaming DAMAGED has the reason above the checksum
        expected = marker.strip().rpartition("\n")[2]
    files: Manifest = {}
    with reading(folder, MANIFEST):
        if checksum(text) != expected:
            raise Damage.CHECKSUM(source=f"in {MARKER}")
        for name, entry in parse_object(text).items():
            if not isinstance(entry, list) or [*map(type, entry)] != [int, str]:
                raise Damage.FORM(what="files")
            if os.path.basename(name) != name or name in (".", ".."):
                raise Damage.OUTSIDE(name=name)
            files[name] = entry[0], entry[1]
        if missing := [name for name in (STATE, METADATA) if name not in files]:
            raise Damage.UNLISTED(names=" and ".join(missing))
    return files


def wrong_sizes(folder: Storage, files: Manifest) -> Iterator[DamagedCheckpoint]:
    """Yield the errors of files that are missing or have another size, from one listing."""
    sizes = folder.sizes()
    for name, (size, _) in files.items():
        try:
            with reading(folder, name):
                # a listing of an object store may be behind, and leaves out what is no file there
                here = sizes[name] if sizes.get(name) is not None else folder.size(name)
                if here != size:
                    raise Damage.SIZE(here=here, written=size)
        except DamagedCheckpoint as damage:
            yield damage


def check_sizes(folder: Storage, files: Manifest) -> None:
    """Check that each file exists with its size."""
    for damage in wrong_sizes(folder, files):
        raise damage


def check_sums(folder: Storage, files: Manifest, names: Iterable[str]) -> None:
    """Read files and compare their checksums."""
    buffer = memoryview(bytearray(_READ))
    for name in names:
        with reading(folder, name), folder.reader(name) as read_into:
            hasher, offset = xxhash.xxh3_128(), 0
            while count := read_into(offset, buffer):
                hasher.update(buffer[:count])
                offset += count
            if hasher.hexdigest() != files[name][1]:
                raise ValueError(UNEQUAL)


def read_checked(folder: Storage, files: Manifest, name: str) -> bytes:
    """Read a file and compare its checksum."""
    with reading(folder, name):
        data = folder.read(name)
        if checksum(data) != files[name][1]:
            raise ValueError(UNEQUAL)
    return data


def check_quick(folder: Storage) -> None:
    """Check everything except the contents of the tensors' files."""
    files = read_manifest(folder)
    check_sizes(folder, files)
    read_state(folder, files)


def check_all(folder: Storage) -> None:
    """Check every file, including its contents."""
    for damage in damaged_files(folder, read_manifest(folder)):
        raise damage
    read_state(folder)


def damaged_files(folder: Storage, files: Manifest) -> Iterator[DamagedCheckpoint]:
    """Yield the errors of files with wrong sizes or contents, reading all."""
    wrong = {damage.file: damage for damage in wrong_sizes(folder, files)}
    for name in files:
        try:
            if name in wrong:
                raise wrong[name]
            check_sums(folder, files, [name])
        except DamagedCheckpoint as damage:
            yield damage


# --- state.json ----------------------------------------------------------------------------------


def read_state(folder: Storage, files: Manifest | None = None) -> dict[str, Any]:
    """Read state.json. Raises DamagedCheckpoint; ValueError for a later format, or for earlier
    names.

    files: the manifest with its checksum; None = not compared.
    """
    with reading(folder, STATE):
        text = folder.read(STATE) if files is None else read_checked(folder, files, STATE)
        state = parse_object(text)
    version = state.get("format", FORMAT)
    if type(version) is int and version > FORMAT:
        raise ValueError(
            f"checkpoint {folder} has format {version}, and this version of titanlike reads "
            f"{FORMAT}: it was written by a later one"
        )
    with reading(folder, STATE):
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
    if state["same"].get("model.name") in ("llama", "gpt2", "moe") and "model.dim" in state["same"]:
        raise ValueError(
            f"checkpoint {folder} was written before parameters took Hugging Face's names, and there "
            "is no migration; train that model anew, in another run_dir"
        )
    return state


# --- pieces.json: the checksums of chunks --------------------------------------------------------

# file -> ends of its chunks in bytes, and their checksums in a row
ChunkChecksums = dict[str, tuple[list[int], bytes]]


def check_chunk(
    checksums: ChunkChecksums, file: str, begin: int, length: int, digest: bytes
) -> None:
    """Raise ValueError if bytes with this checksum are not a chunk that was written."""
    ends, sums = checksums.get(file, ([], b""))
    i = bisect_left(ends, begin + length)
    is_chunk = ends[i : i + 1] == [begin + length] and begin == (ends[i - 1] if i else 0)
    if not is_chunk or digest != sums[i * _DIGEST : (i + 1) * _DIGEST]:
        raise ValueError(UNEQUAL)


def dump_checksums(checksums: ChunkChecksums) -> bytes:
    """Return the content of `pieces.json`: file -> [ends, "32 hexadecimal digits of xxh3 per
    chunk"], chunks in file order, each beginning where the previous one ends."""
    content = {file: [ends, sums.hex()] for file, (ends, sums) in checksums.items()}
    return json.dumps(content).encode() + b"\n"


def _load_checksums(data: bytes) -> ChunkChecksums:
    try:
        pairs = json.loads(data).items()
        checksums = {file: (ends, bytes.fromhex(sums)) for file, (ends, sums) in pairs}
        for ends, sums in checksums.values():
            if {*map(type, ends)} - {int} or len(sums) != _DIGEST * len(ends):
                raise ValueError
    except (ValueError, TypeError, AttributeError):
        raise Damage.FORM(what="pieces") from None
    return checksums


# --- .metadata: the tensors ----------------------------------------------------------------------


class Chunk(NamedTuple):
    """A block of a tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None = None  # None: no file is listed
    begin: int = 0
    length: int = 0


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint."""

    name: str
    dtype: str  # float32
    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def item_size(self) -> int:
        """Bytes of an element: 4 for float32, 1 for float8_e4m3fn."""
        bits = re.search(r"\d+", self.dtype)
        return max(1, int(bits[0]) // 8) if bits else 1

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.item_size


@dataclass(frozen=True)
class CheckpointHeader:
    """A checkpoint's small files, checked."""

    folder: Storage
    state: dict[str, Any]
    tensors: dict[str, SavedTensor]  # by name
    checksums: ChunkChecksums | None  # None: the tensors' files have been checked as a whole
    # the ranks of which only the first has the tensors' chunks; None = all ranks have them
    read_by: range | None = None


def read_header(
    folder: Storage, files: Manifest, rank: int = 0, ranks: int = 1, read_by: range | None = None
) -> CheckpointHeader:
    """Read and check the small files of a checkpoint with this manifest.

    An older version's checkpoint has no checksums of chunks: then all files are read and checked, a
    share on each rank. Raises DamagedCheckpoint, UnsafeCheckpoint.
    """
    if CHUNKS not in files:
        check_sums(folder, files, sorted(files)[rank::ranks])
    state = read_state(folder, files)
    checksums: ChunkChecksums | None = {} if CHUNKS in files else None
    if read_by is not None and rank != read_by.start:
        return CheckpointHeader(folder, state, {}, checksums, read_by)
    tensors = read_tensors(folder, read_checked(folder, files, METADATA))
    if CHUNKS in files:
        with reading(folder, CHUNKS):
            checksums = _load_checksums(read_checked(folder, files, CHUNKS))
    return CheckpointHeader(folder, state, tensors, checksums, read_by)


def open_header(folder: Storage) -> CheckpointHeader:
    """Apply `read_header` to a committed checkpoint, after checking its files' sizes."""
    files = read_manifest(folder)
    check_sizes(folder, files)
    return read_header(folder, files)


def read_tensors(folder: Storage, data: bytes | None = None) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint that may be damaged, sorted by name.

    data: the content of `.metadata`, if already read. Raises DamagedCheckpoint, UnsafeCheckpoint.
    """
    if data is None:
        with reading(folder, METADATA):
            data = folder.read(METADATA)
    try:
        return dict(_tensors(_InertUnpickler(io.BytesIO(data)).load()))
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(
            f"checkpoint {folder} is refused: {METADATA} {error}; take a checkpoint from a source "
            "that you trust"
        ) from None
    except Exception as error:  # pickle may raise anything for damaged bytes
        reason = Damage.UNREADABLE.format(error=type(error).__name__)
        raise DamagedCheckpoint(folder, METADATA, reason) from None


def missing_data(tensors: dict[str, SavedTensor], files: Manifest) -> Iterator[str]:
    """Yield which data of the tensors cannot be in the files."""
    for tensor in tensors.values():
        present = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        if present != tensor.numel:
            yield f"{METADATA} has {present:,} of the {tensor.numel:,} elements of {tensor.name}"
        for chunk in tensor.chunks:
            place = f"{tensor.name} at {list(chunk.offsets)}"
            if chunk.file is None:
                yield f"{METADATA} names no file for {place}"
            elif chunk.file not in files:
                yield f"{METADATA} names {chunk.file}, which is not in the manifest, for {place}"
            elif chunk.begin + chunk.length > files[chunk.file][0]:
                yield f"{chunk.file} ends before the bytes of {place}"
            elif chunk.length < prod(chunk.sizes) * tensor.item_size:
                yield f"{chunk.file} has too few bytes for {place}"


def _tensors(metadata: Any) -> Iterator[tuple[str, SavedTensor]]:
    """Yield each tensor of DCP's Metadata, with its name."""
    places = {}
    for key, place in (metadata.storage_data or {}).items():
        file = place.relative_path
        if os.path.basename(file) != file:
            raise UnsafeCheckpoint(Damage.OUTSIDE.format(name=file))
        places[key.fqn, _integers(getattr(key, "offset", None) or ())] = place
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        if not hasattr(
            entry, "chunks"
        ):  # a pickled object, which titanlike neither writes nor reads
            continue
        chunks = []
        for block in entry.chunks:
            chunk = Chunk(_integers(block.offsets), _integers(block.sizes))
            if place := places.get((name, chunk.offsets)) or places.get((name, ())):
                begin, length = _integers((place.offset, place.length))
                chunk = Chunk(*chunk[:2], place.relative_path, begin, length)
            chunks.append(chunk)
        yield name, SavedTensor(name, entry.properties.state[0], _integers(entry.size), chunks)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(map(index, values))


_DCP = "torch.distributed.checkpoint."
_PLAIN: dict[tuple[str, str], Any] = {
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("builtins", "tuple"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("torch", "Size"): tuple,
}
_CALLED = {("torch.serialization", "_get_layout"), (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING")}
_CLASSES = {
    f"{_DCP}metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
    },
    f"{_DCP}filesystem": {"_StorageInfo", "_StoragePrefix"},
}
_DTYPE = re.compile(r"bool|bfloat16|(float|complex|q?u?int|bits)\d\w*")


class _InertUnpickler(pickle.Unpickler):
    """Creates plain objects with the attributes in the file; resolves no other names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _CALLED:
            return lambda *parts: "/".join(map(str, parts))
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        if name in _CLASSES.get(module, ()):
            return _Inert
        raise UnsafeCheckpoint(
            f"asks for {module}.{name}, which no checkpoint needs and which may execute code on "
            "your machine"
        )


class _Inert:
    def __setstate__(self, *state: Any) -> None:
        """Keep what a dataclass had, a dict; or TensorProperties, a tuple."""
        if not state:  # BUILD was given the class, which GLOBAL has named
            raise UnsafeCheckpoint("changes a class that it names")
        if isinstance(state[0], dict):
            self.__dict__.update(state[0])
        else:
            self.state = state[0]
