"""Parquet, Arrow, Feather and ORC files are read compressed as well, and a file of kilobytes that
unfolds to gigabytes is refused before it does, whatever it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import feather, ipc, orc, parquet

from support.cells import cells, slow
from titanlike.core.config.groups.data import HFData
from titanlike.core.data.registry import DataError
from titanlike.formats import tables
from titanlike.formats.hf_dataset import texts as texts_of_dataset
from titanlike.formats.tables import _LARGEST
from titanlike.formats.text import documents, rows_of

TEXTS = [f"Document {i}: größer, 日本" for i in range(2000)]
LONG = "a" * (_LARGEST // 64)


def write(path: Path, kind: str, values: Any, codec: str = "zstd") -> Path:
    table = pyarrow.table({"text": values})
    options = ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
    if kind == "orc":
        orc.write_table(table, path, compression="uncompressed" if codec == "none" else codec)
    elif kind == "parquet":
        parquet.write_table(table, path, compression=codec, use_dictionary=False)
    elif kind == "feather":
        feather.write_feather(table, path, compression="uncompressed" if codec == "none" else codec)
    elif kind == "arrow file":
        with ipc.new_file(path, table.schema, options=options) as file:
            file.write_table(table, max_chunksize=max(500, len(values) // 4))
    else:
        with ipc.new_stream(path, table.schema, options=options) as stream:
            stream.write_table(table, max_chunksize=max(500, len(values) // 4))
    return path


SUFFIX = {"arrow file": "arrow", "arrow stream": "arrow"}
KINDS = ("parquet", "feather", "arrow file", "arrow stream", "orc")


@pytest.mark.parametrize("codec", ["zstd", *slow("none", "lz4")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_read_compressed_or_not(kind: str, codec: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{SUFFIX.get(kind, kind)}"
    write(path, kind, pyarrow.array(TEXTS), codec)
    assert list(documents([path], "text")) == TEXTS
    if kind.startswith("arrow"):  # the same text in many rows, kept once
        write(path, kind, pyarrow.array(TEXTS * 2).dictionary_encode(), codec)
        assert list(documents([path], "text")) == TEXTS * 2


VALUES = ("texts", "one text", "numbers", "nulls", "dictionary")
UNFOLDING = {f"{kind}-{values}": (kind, values) for kind in KINDS[:-1] for values in VALUES}
UNFOLDING |= {f"orc-{values}": ("orc", values) for values in VALUES[:2]}  # pyarrow writes no others
FEW = ("arrow file-nulls", "parquet-dictionary", "parquet-texts")


@pytest.mark.parametrize("table", cells({name: UNFOLDING[name] for name in FEW}, UNFOLDING))
def test_a_small_table_that_unfolds_to_much_is_refused(
    table: tuple[str, str], tmp_path: Path
) -> None:
    kind, values = table
    path = tmp_path / f"a.{SUFFIX.get(kind, kind)}"
    array: Any = pyarrow.array([LONG] * 66)
    if values == "one text":
        array = pyarrow.array([LONG * 66])
    elif values == "numbers":
        offsets = pyarrow.array([0, _LARGEST // 7])
        zeros = pyarrow.nulls(_LARGEST // 7, pyarrow.int64()).fill_null(0)
        array = pyarrow.ListArray.from_arrays(offsets, zeros)
    elif values == "nulls":
        array = pyarrow.nulls(_LARGEST + 1)
    elif values == "dictionary":
        array = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0]), pyarrow.array([LONG * 66]))
    if kind == "orc":
        array = pyarrow.chunked_array([array] * 8)  # more than its library takes by itself
    write(path, kind, array)
    assert path.stat().st_size < _LARGEST / 50
    with pytest.raises(DataError, match=r"unpacks to more than 6\d MiB") as raised:
        list(documents([path], "text"))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(OSError, match="unpacks to more than"):  # as chats do
        list(rows_of(path))
    if path.suffix in (".parquet", ".arrow"):
        with pytest.raises(DataError, match="unpacks to more than"):
            list(texts_of_dataset(HFData(path=str(path))))


def same(text: Any, rows: int) -> Any:
    """A column that has one text in each row, and holds it once."""
    return pyarrow.DictionaryArray.from_arrays(np.zeros(rows, "int32"), pyarrow.array([text]))


def in_a_list(values: Any) -> Any:
    return pyarrow.ListArray.from_arrays(pyarrow.array([0, len(values)]), values)


def varint(number: int) -> bytes:
    """As Thrift writes it."""
    rest = number >> 7
    return bytes([number & 127 | 128]) + varint(rest) if rest else bytes([number])


def forged(path: Path) -> None:
    """Let a footer say 50 of whatever it says millions of: of sizes and of counts."""
    data, footer = path.read_bytes(), parquet.read_metadata(path)
    group = footer.row_group(0)
    column = group.column(0)
    begin = len(data) - 8 - footer.serialized_size
    for number in (group.total_byte_size, column.total_uncompressed_size, column.num_values):
        right = varint(2 * number)
        if number > 1 << 20:  # of as many bytes
            low = b"\xe4" + b"\x80" * (len(right) - 2) + b"\x00"
            data = data[:begin] + data[begin:].replace(right, low)
    path.write_bytes(data)
    assert parquet.read_metadata(path).row_group(0).total_byte_size <= 1 << 20


BOMBS = {  # more than a GiB, or 70 MiB of one record
    "a page": lambda: pyarrow.array([LONG * 70]),
    "values of a row": lambda: in_a_list(pyarrow.array(np.zeros(70 << 20, "int8"))),
    "texts of a row": lambda: in_a_list(same(LONG, 1100)),
    "a text of many rows": lambda: same(LONG * 10, 1100),
    "bytes of many rows": lambda: same(LONG.encode() * 10, 1100),
    "many rows": lambda: pyarrow.nulls(1 << 22, pyarrow.string()),
}


@pytest.mark.parametrize("bomb", [*[*BOMBS][:2], *slow(*[*BOMBS][2:])])
def test_parquet_whose_pages_unfold_to_more_than_its_footer_says_is_refused(
    bomb: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    how = {"compression": "zstd", "use_dictionary": bomb != "a page", "store_schema": False}
    parquet.write_table(pyarrow.table({"text": BOMBS[bomb]()}), path, **how)
    forged(path)
    assert path.stat().st_size < _LARGEST / 50
    with pytest.raises(DataError, match=r"unpacks to more than 6\d MiB"):
        list(documents([path], "text"))
    with pytest.raises(DataError, match=r"unpacks to more than 6\d MiB"):
        list(texts_of_dataset(HFData(path=str(path))))


def test_a_long_text_of_many_rows_is_read(tmp_path: Path) -> None:
    """As the same instructions in each conversation are, of tens of MiB in all."""
    texts = same("größer " * 2**12, 1000)
    path = tmp_path / "a.parquet"
    for column in (pyarrow.ListArray.from_arrays(np.arange(1001, dtype="int32"), texts), texts):
        parquet.write_table(pyarrow.table({"text": column}), path, store_schema=False)
        assert path.stat().st_size < 2**18 and len(list(rows_of(path))) == 1000
    assert len(list(texts_of_dataset(HFData(path=str(path))))) == 1000


def with_library(does: str) -> str:
    """The program that reads first, with a library that does something else."""
    program = f"import os, sys\nsys.path.insert(0, {str(tables._PROGRAM.parent)!r})\n"
    program += (
        f"import first_read\nfirst_read.SECONDS = 1\ndef parts_of(*_):\n    {does}\n    yield\n"
    )
    return program + "first_read.parts_of = parts_of\nfirst_read.main()\n"


@pytest.mark.parametrize("does", ["os.abort()", "while True: pass", "bytearray(10**9)"])
def test_a_file_that_its_library_cannot_read_within_limits_is_refused(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the process that reads it, never ends, or takes all memory."""
    (tmp_path / "program").write_text(with_library(does))
    monkeypatch.setattr(tables, "_PROGRAM", tmp_path / "program")
    path = write(tmp_path / "a.orc", "orc", pyarrow.array(TEXTS))
    with pytest.raises(DataError, match="a.orc is damaged, or unpacks to more than"):
        list(documents([path], "text"))


def test_arrow_files_whose_parts_and_footer_differ_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", "arrow file", pyarrow.array(TEXTS))
    data = path.read_bytes()
    other = write(tmp_path / "b.arrow", "arrow stream", pyarrow.array(TEXTS[:500])).read_bytes()
    # the stream ends early, the footer knows more
    path.write_bytes(data[:8] + other + data[8 + len(other) :])
    with pytest.raises(DataError, match="its footer has other batches"):
        list(documents([path], "text"))
