"""Rewrites checkpoints of titanlike's formats 1 and 2 (torch's distributed checkpoints) as
safetensors and JSON: what `titanlike checkpoint convert FOLDER` runs.

In place: the new files are written beside the old ones, which go once the new ones are committed
and have been read; so a conversion that is cut off is begun again. Each rank's file becomes a
rank's file, of which all pieces are in memory. Code in a pickle is not run: names outside of an
allowlist are refused.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from titanlike.core.checkpoint import integrity
from titanlike.core.checkpoint.format import WORDS, SavedTensor, checksum
from titanlike.core.checkpoint.staging import write_pieces
from titanlike.core.checkpoint.storage import (
    INDEX,
    MARKER,
    OLD_INDEX,
    STATE,
    DamagedCheckpoint,
    Storage,
    error_line,
)
from titanlike.core.config.files import parse_object
from titanlike.core.data.kinds import READERS
from titanlike.formats.stream_source import dumped

_DCP = "torch.distributed.checkpoint"
_FILES, _MOST = "files.json", 2**30  # sizes and checksums; bytes of a small file


def convert_all(checkpoints: list[Storage], say: Callable[[str], object]) -> bool:
    """Convert the complete ones among these, newest first; return whether all of an old format
    were."""
    done = True
    for folder in reversed(checkpoints):
        names = folder.names()
        old = [n for n in names if n in (OLD_INDEX, _FILES, "pieces.json") or n.endswith(".distcp")]
        if not old:
            continue
        if MARKER not in names:
            say(f"{folder.name}: left as it is, for it has no {MARKER}")
            done = False
            continue
        try:
            if OLD_INDEX in names:
                _convert(folder)
            old.sort(key=lambda name: name != OLD_INDEX)  # without that one the others are remains
            for name in old:
                folder.remove(name)
            say(f"{folder.name}: converted")
        except (ValueError, OSError) as error:
            say(f"{folder.name}: left as it is: {error_line(error)}")
            done = False
    return done


def _convert(folder: Storage) -> None:
    sealed = _read(folder, MARKER)
    marker = sealed.decode(errors="replace").strip().rpartition("\n")[2]
    manifest = _read(folder, _FILES)
    if checksum(manifest) != marker:
        if folder.exists(INDEX) and checksum(_read(folder, INDEX)) == marker:
            # converted, and cut off before anything was removed
            return integrity.check_all(folder)
        raise DamagedCheckpoint(folder, _FILES, f"does not match the checksum in {MARKER}")
    with _damage(folder, _FILES):
        listed = {
            name: (int(size), str(sum_)) for name, (size, sum_) in parse_object(manifest).items()
        }
    for name, (size, _) in listed.items():
        with integrity.reading(folder, name):
            if os.path.basename(name) != name:
                raise ValueError("is outside of it")
            if (here := folder.size(name)) != size:
                raise integrity.Damage.SIZE(here=here, written=size)
            if size > 2**36 and (here := folder.allocated(name)) < size >> 10:
                raise integrity.Damage.SPARSE(here=here, written=size)
    for name, (_, expected) in listed.items():
        _check(folder, name, expected)
    with _damage(folder, STATE):
        state = parse_object(_read(folder, STATE))
    with _damage(folder, OLD_INDEX):
        of_files = _described(_read(folder, OLD_INDEX))
    written = []
    for rank, (file, entries) in enumerate(of_files.items()):
        if file not in listed:
            raise DamagedCheckpoint(folder, OLD_INDEX, f"names an unlisted file, {file!r:.80}")
        with _damage(folder, file):
            written += write_pieces(folder, rank, _pieces(folder, file, entries))
    try:
        with _damage(folder, OLD_INDEX):
            integrity.commit(folder, written, state)
        integrity.check_all(folder)
    except BaseException:
        folder.write(MARKER, sealed)
        raise


@contextlib.contextmanager
def _damage(folder: Storage, file: str) -> Iterator[None]:
    """Raise DamagedCheckpoint for whatever parsing a file raises; it may be a stranger's."""
    try:
        yield
    except (DamagedCheckpoint, OSError):
        raise
    except Exception as error:
        reason = f"is not what was written: {error_line(error)}"
        raise DamagedCheckpoint(folder, file, reason) from None


def _described(data: bytes) -> dict[str, list[tuple[SavedTensor, Any, Any]]]:
    """Return the pieces that `.metadata` describes, by file."""
    described = _Unpickler(io.BytesIO(data)).load()
    of_files: dict[str, list[tuple[SavedTensor, Any, Any]]] = {}
    for index, place in described.storage_data.items():
        entry = described.state_dict_metadata[index.fqn]
        dtype = entry.properties.dtype
        word = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else "no dtype"
        if word not in WORDS:
            raise ValueError(f"{index.fqn:.80} is of {word}, which safetensors cannot hold")
        if not (_is_plain(entry.size) and _is_plain(index.offset) and _is_plain(place)):
            raise ValueError(f"does not describe {index.fqn:.80}")
        saved = SavedTensor(index.fqn, word, tuple(entry.size))
        of_files.setdefault(place.relative_path, []).append((saved, index.offset, place))
    return dict(sorted(of_files.items()))


def _pieces(
    folder: Storage, file: str, entries: list[tuple[SavedTensor, Any, Any]]
) -> Iterator[tuple[SavedTensor, tuple[int, ...], Tensor]]:
    size = folder.size(file)
    with folder.reader(file) as read_into:
        for saved, offset, place in entries:
            if not (place.offset >= 0 and 0 <= place.length <= size - place.offset):
                raise ValueError(f"it has no {place.length} bytes at {place.offset}")
            record = bytearray(place.length)
            read_into(place.offset, record)
            block = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
            if saved.name.removeprefix(READERS).isdigit():  # its state was a record of torch.save
                length, step = block[:16].clone().view(torch.int64).tolist()
                content = io.BytesIO(block[16 : 16 + length].numpy().tobytes())
                state = torch.load(content, weights_only=True)
                block = dumped(state["state"], state["first"], step)
                saved = saved._replace(shape=tuple(block.shape))
            if block.dtype != getattr(torch, saved.dtype) or block.dim() != len(saved.shape):
                raise ValueError(f"it has another tensor than {saved.name:.80}")
            yield saved, tuple(offset or (0,) * block.dim()), block


def _check(folder: Storage, name: str, expected: str) -> None:
    """Raise DamagedCheckpoint unless a file has this checksum."""
    hasher, buffer, at = xxhash.xxh3_128(), memoryview(bytearray(2**22)), 0
    with integrity.reading(folder, name), folder.reader(name) as read_into:
        while count := read_into(at, buffer):
            hasher.update(buffer[:count])
            at += count
        if hasher.hexdigest() != expected:
            raise ValueError(integrity.UNEQUAL)


def _read(folder: Storage, name: str) -> bytes:
    with integrity.reading(folder, name), folder.reader(name) as read_into:
        if (size := folder.size(name)) > _MOST:
            raise ValueError(f"has more than {_MOST:,} bytes")
        data = bytearray(size)
        return bytes(data[: read_into(0, data)])


_MOST_SIZES = 64  # of a shape


def _is_plain(value: Any) -> bool:
    """Return whether this is a text, a number, a name, a shape, or an object that consists of them:
    what is hashed, compared and printed at once. Tuples of one and the same tuple, 40 deep, are
    not."""
    if isinstance(value, (tuple, list)):
        return len(value) <= _MOST_SIZES and all(type(one) is int for one in value)
    if value is None or isinstance(value, (str, int, float, type, torch.dtype)):
        return True
    return _is_of_torch(value) and all(
        _is_plain(one) and not _is_of_torch(one) for one in vars(value).values()
    )


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__.startswith(f"{_DCP}.")


class _Unpickler(pickle._Unpickler):
    """Of `.metadata`: resolves what torch's description of tensors consists of, nothing else. In
    Python: that of C allocates what the file says."""

    def load_reduce(self) -> None:
        self._check(self.stack[-1])
        super().load_reduce()

    def load_newobj(self) -> None:
        self._check(self.stack[-1])
        super().load_newobj()

    def load_setitem(self) -> None:
        self._check(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check(self.stack[::2])
        super().load_setitems()

    def _check(self, values: Any) -> None:
        """Raise ValueError unless these arguments, or keys, are plain."""
        if not all(map(_is_plain, values)):
            raise ValueError(f"{OLD_INDEX} has what no checkpoint needs")

    dispatch = pickle._Unpickler.dispatch | {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }
    for _opcode in (
        *(pickle.BYTEARRAY8, pickle.FROZENSET, pickle.ADDITEMS),
        *(pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ),
    ):
        del dispatch[_opcode[0]]

    _NAMES = {
        **dict.fromkeys(["dict", "list", "set", "tuple"], "builtins"),
        **dict.fromkeys(["OrderedDict", "defaultdict"], "collections"),
        **dict.fromkeys(["Size"], "torch"),
        **dict.fromkeys(["_get_layout"], "torch.serialization"),
        **dict.fromkeys(["_StorageInfo", "_StoragePrefix"], f"{_DCP}.filesystem"),
        **dict.fromkeys(
            [
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            ],
            f"{_DCP}.metadata",
        ),
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or self._NAMES.get(name) == module:
            return super().find_class(module, name)
        raise ValueError(f"{OLD_INDEX} asks for {module}.{name}, which no checkpoint needs")
