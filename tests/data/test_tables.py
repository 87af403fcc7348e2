"""Parquet, Arrow, Feather and ORC files are read compressed as well, and a file of kilobytes that
unfolds to gigabytes is refused before it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, ipc, orc, parquet

from titanlike.core.config.groups.data import HFData
from titanlike.core.data.registry import DataError
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


@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_read_compressed_or_not(kind: str, codec: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{SUFFIX.get(kind, kind)}"
    write(path, kind, pyarrow.array(TEXTS), codec)
    assert list(documents([path], "text")) == TEXTS
    if kind.startswith("arrow"):  # the same text in many rows, kept once
        write(path, kind, pyarrow.array(TEXTS * 2).dictionary_encode(), codec)
        assert list(documents([path], "text")) == TEXTS * 2


@pytest.mark.parametrize("values", ["texts", "one text", "numbers", "nulls", "dictionary"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_table_that_unfolds_to_much_is_refused(
    kind: str, values: str, tmp_path: Path
) -> None:
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
    if kind == "orc" and values in ("numbers", "nulls", "dictionary"):
        pytest.skip("pyarrow writes no such column, or slowly")
    if kind == "orc":
        array = pyarrow.chunked_array([array] * 8)  # more than its library takes by itself
    write(path, kind, array)
    assert path.stat().st_size < _LARGEST / 50
    with pytest.raises(DataError, match=r"unpacks to more than 6\d MiB") as raised:
        list(documents([path], "text"))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(DataError, match="unpacks to more than"):  # as chats do
        list(rows_of(path))
    if path.suffix in (".parquet", ".arrow"):
        with pytest.raises(DataError, match="unpacks to more than"):
            list(texts_of_dataset(HFData(path=str(path))))


def test_arrow_files_whose_parts_and_footer_differ_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", "arrow file", pyarrow.array(TEXTS))
    data = path.read_bytes()
    other = write(tmp_path / "b.arrow", "arrow stream", pyarrow.array(TEXTS[:500])).read_bytes()
    # the stream ends early, the footer knows more
    path.write_bytes(data[:8] + other + data[8 + len(other) :])
    with pytest.raises(DataError, match="its footer has other batches"):
        list(documents([path], "text"))
