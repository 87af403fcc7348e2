"""The files of tensors, and the index that says what is in them.

    rank-00003.safetensors     what rank 3 wrote: a header, and the pieces' bytes one after another
    rank-00003-1.safetensors   its second pieces of tensors of which it has several

A piece is a block of a tensor. A header has torch's `DCP_SHARDING_INFO` (the piece's offsets in the
full tensor), so that `torch.distributed.checkpoint` reads and consolidates the files; to any reader
of safetensors a piece is a tensor.

index.json is JSON, written in lines: first what a checkpoint is, then the pieces, a line for each
file, which are parsed when tensors are read. Each rank makes its own line, and rank 0 joins them:
"pieces" has, for each file, [name, begin, offsets, sizes, checksums]; `begin` counts from the end
of the header, and there is an xxh3 of 16 hexadecimal digits for each of `Piece.parts`.

Files that others wrote are read here: what does not fit the files' sizes is refused. No torch.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import xxhash

from titanlike.core.config.files import LARGEST, parse_object

FORMAT = 4
FILE = re.compile(r"rank-\d{5,}(-\d+)?\.safetensors")
BLOCK = 2**20  # bytes of a checksum
# safetensors' words -> torch's name, and bytes of an element
DTYPES = {
    **{"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2)},
    **{"BF16": ("bfloat16", 2), "C64": ("complex64", 8), "BOOL": ("bool", 1)},
    **{f"I{bits}": (f"int{bits}", bits // 8) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", bits // 8) for bits in (8, 16, 32, 64)},
    **{"F8_E4M3": ("float8_e4m3fn", 1), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1)},
    **{"F8_E5M2": ("float8_e5m2", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1)},
}
WORDS = {name: word for word, (name, _) in DTYPES.items()}
_MOST_DIMENSIONS, _LONGEST_NAME = 64, 1000
_SEPARATOR = b',\n"pieces": {\n'

Sum = tuple[int, str]  # bytes, and xxh3


def checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def is_name(name: str) -> bool:
    """Return whether a tensor in a checkpoint may have this name."""
    return name.isprintable() and len(name) <= _LONGEST_NAME


class SavedTensor(NamedTuple):
    """A tensor in a checkpoint."""

    name: str
    dtype: str  # float32
    shape: tuple[int, ...]

    @property
    def item_size(self) -> int:
        return DTYPES[WORDS[self.dtype]][1]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.item_size


class Piece(NamedTuple):
    """A block of a tensor, and its bytes in a file."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item_size: int
    file: str = ""
    begin: int = 0  # in the file
    sums: str = ""

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * self.item_size

    @property
    def rows(self) -> int:
        """The length of the first dimension; 0 without elements."""
        return (self.sizes[0] if self.sizes else 1) if prod(self.sizes) else 0

    @property
    def has_all_sums(self) -> bool:
        dim, step = self._cut()
        each = -(-self.sizes[dim] // step) if self.sizes else 1
        return len(self.sums) == 16 * prod(self.sizes[:dim]) * each * bool(self.rows)

    def parts(self) -> Iterator[Piece]:
        """Yield the blocks that have a checksum each, one after another: rows, or of a row longer
        than BLOCK its parts."""
        (dim, step), begin = self._cut(), self.begin
        outer = product(*map(range, self.sizes[:dim]))
        length = self.sizes[dim] if self.sizes else 1
        places = ((*at, start) for at in outer for start in range(0, length, step))
        for i, place in enumerate(places if self.rows else ()):
            inside = zip(place, self.offsets, strict=False)
            offsets = (*(at + offset for at, offset in inside), *self.offsets[dim + 1 :])
            last = min(step, length - place[-1])
            sizes = (*[1] * dim, last, *self.sizes[dim + 1 :]) if self.sizes else ()
            sums = self.sums[16 * i : 16 * (i + 1)]
            part = Piece(self.name, offsets, sizes, self.item_size, self.file, begin, sums)
            begin += part.bytes
            yield part

    def _cut(self) -> tuple[int, int]:
        """Return the dimension along which values share a checksum, and how many of it do."""
        for dim in range(len(self.sizes)):
            inner = max(1, prod(self.sizes[dim + 1 :]) * self.item_size)
            if inner <= BLOCK:
                return dim, max(1, BLOCK // inner)
        return 0, 1


# --- writing --------------------------------------------------------------------------------------


class WrittenFile(NamedTuple):
    """What a rank tells of a file that it wrote."""

    name: str
    size: int
    header: Sum
    tensors: dict[str, list[Any]]  # of which this file has the first piece: dtype's word, shape
    pieces: str  # its line of the index


def header_of(pieces: Iterable[tuple[Piece, str]]) -> bytes:
    """Return the header of a file with these pieces, each with its dtype's word."""
    offsets, entries, begin = {}, dict[str, Any](), 0
    for piece, word in pieces:
        end = begin + piece.bytes
        offsets[piece.name] = {"saved_offsets": piece.offsets}
        entries[piece.name] = {"dtype": word, "shape": piece.sizes, "data_offsets": (begin, end)}
        begin = end
    about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned
    return struct.pack("<Q", len(text)) + text


def dump_index(files: Sequence[WrittenFile], state: Sum) -> bytes:
    """Return index.json. state: of state.json."""

    def section(entries: Mapping[str, str]) -> str:
        return ",\n".join(f" {json.dumps(name)}: {entry}" for name, entry in entries.items())

    tensors = {name: entry for file in files for name, entry in file.tensors.items()}
    described = section({name: json.dumps(tensors[name]) for name in sorted(tensors)})
    listed = section({file.name: json.dumps((file.size, file.header)) for file in files})
    text = f'{{\n"format": {FORMAT},\n"state.json": {json.dumps(state)},\n'
    text += f'"tensors": {{\n{described}\n}},\n"files": {{\n{listed}\n}}'
    pieces = section({file.name: file.pieces for file in files})
    return text.encode() + _SEPARATOR + f"{pieces}\n}}\n}}\n".encode()


# --- reading: all raise ValueError, with a reason that can follow the file's name -----------------


class LaterFormat(ValueError):
    """A later version of this program wrote it."""


@dataclass(frozen=True)
class Index:
    """The parsed beginning of index.json, and the text of its pieces."""

    state: Sum
    tensors: dict[str, SavedTensor]  # by name
    files: dict[str, tuple[int, Sum]]  # name -> bytes; the header's bytes and checksum
    text: bytes

    def pieces(self, names: Collection[str] | None = None) -> dict[str, list[Piece]]:
        """Return the pieces of these tensors, or of all, each of which must then be whole."""
        found = {name: list[Piece]() for name in (self.tensors if names is None else names)}
        files = set[str]()
        for line in self.text.splitlines():
            one = parse_object(b"{" + line.strip().removesuffix(b",") + b"}")
            for file, entries in one.items():
                if file in files:
                    raise ValueError(f"has the pieces of {file:.80} twice")
                files.add(file)
                for piece in self._pieces_of(file, entries, found, strict=names is None):
                    found[piece.name].append(piece)
        for name, pieces in found.items():
            here, all_of_it = sum(prod(p.sizes) for p in pieces), self.tensors[name].numel
            if names is None and here != all_of_it:
                raise ValueError(f"has {here:,} of {all_of_it:,} values of {name}")
            if _overlap([piece for piece in pieces if piece.rows]):
                raise ValueError(f"has pieces of {name} that overlap")
        return found

    def _pieces_of(
        self, file: str, entries: Any, names: Collection[str], *, strict: bool
    ) -> Iterator[Piece]:
        """Yield a file's pieces of some tensors. No byte is in two; strict: and all are in one."""
        if file not in self.files or not isinstance(entries, list):
            raise ValueError(f"has pieces of {file:.80}, which it does not list")
        size, (end, _) = self.files[file]
        for entry in entries:
            if not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[0], str):
                raise ValueError(f"has no pieces of {file}, but other JSON")
            name, begin, offsets, sizes, sums = entry
            if name not in names and not strict:
                continue
            tensor = self.tensors.get(name)
            whole = () if tensor is None else tensor.shape
            inside = _are_sizes((begin,)) and _are_sizes(offsets) and _are_sizes(sizes)
            inside = inside and len(offsets) == len(sizes) == len(whole)
            inside = inside and all(
                o + s <= n for o, s, n in zip(offsets, sizes, whole, strict=True)
            )
            if tensor is None or not inside or not isinstance(sums, str):
                raise ValueError(f"has a piece of {name:.80} that cannot be in {file}")
            at = self.files[file][1][0] + begin
            piece = Piece(name, (*offsets,), (*sizes,), tensor.item_size, file, at, sums)
            if not piece.has_all_sums:
                raise ValueError(f"has not all checksums of a piece of {name}")
            if at < end or (strict and at > end) or at + piece.bytes > size:
                raise ValueError(f"has a piece of {name} in bytes of {file} that are not its own")
            end = at + piece.bytes
            yield piece
        if strict and end != size:
            raise ValueError(f"has no piece for the last bytes of {file}")


def _overlap(pieces: list[Piece]) -> bool:
    """Return whether no cuts part a tensor's pieces: dimension by dimension, twice."""
    groups = [pieces] if len(pieces) > 1 else []
    for dim in [*range(len(pieces[0].sizes) if pieces else 0)] * 2:
        parts = list[list[Piece]]()
        for group in groups:
            end = 0  # of the pieces so far
            for piece in sorted(group, key=lambda piece: piece.offsets[dim]):
                if piece.offsets[dim] >= end:
                    parts.append([])
                parts[-1].append(piece)
                end = max(end, piece.offsets[dim] + piece.sizes[dim])
        groups = [part for part in parts if len(part) > 1]
    return bool(groups)


def parse_index(text: bytes) -> Index:
    """Parse all of index.json but its pieces. Raises LaterFormat."""
    head, separator, rest = text.partition(_SEPARATOR)
    content = parse_object(head + b"}")
    if type(content.get("format")) is int and content["format"] > FORMAT:
        raise LaterFormat(
            f"has format {content['format']}, and this version of titanlike reads {FORMAT}: it was "
            "written by a later one"
        )
    tensors, files = content.get("tensors"), content.get("files")
    whole = separator and rest.endswith(b"\n}\n}\n") and content.get("format") == FORMAT
    if not (whole and isinstance(tensors, dict) and isinstance(files, dict)):
        raise ValueError("is no index of a checkpoint")
    named = {name: _tensor(name, entry) for name, entry in tensors.items()}
    sizes = {name: _file(name, entry) for name, entry in files.items()}
    here = sum(size - header for size, (header, _) in sizes.values())
    if here != sum(tensor.bytes for tensor in named.values()):
        raise ValueError("has tensors of another size than its files")
    return Index(_sum(content.get("state.json")), named, sizes, rest.removesuffix(b"}\n}\n"))


def _tensor(name: str, entry: Any) -> SavedTensor:
    if not is_name(name):
        raise ValueError(f"has a tensor named {name[:80]!r}")
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
        raise ValueError(f"does not describe {name}")
    word, shape = entry
    if word not in DTYPES:
        raise ValueError(f"has {name} in dtype {word[:40]!r}, which is none of safetensors")
    # of a tensor without values, too: torch multiplies the others
    if not _are_sizes(shape) or prod(size or 1 for size in shape) * DTYPES[word][1] >= LARGEST:
        raise ValueError(f"has no shape of {name}")
    return SavedTensor(name, DTYPES[word][0], (*shape,))


def _file(name: str, entry: Any) -> tuple[int, Sum]:
    if not FILE.fullmatch(name):
        raise ValueError(f"names a file that is none of a checkpoint, {name[:80]!r}")
    if not isinstance(entry, list) or len(entry) != 2:
        raise ValueError(f"does not describe {name}")
    size, header = entry[0], _sum(entry[1])
    if not _are_sizes((size,)) or size < header[0]:
        raise ValueError(f"has no size of {name}")
    return size, header


def _sum(entry: Any) -> Sum:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        raise ValueError("has no checksum of a file")
    if not _are_sizes(entry[:1]):
        raise ValueError("has no size of a file")
    return entry[0], entry[1]


def _are_sizes(values: Any) -> bool:
    """Return whether these are a few integers, as of a shape."""
    if not isinstance(values, list | tuple) or len(values) > _MOST_DIMENSIONS:
        return False
    return all(type(value) is int and 0 <= value < LARGEST for value in values)
