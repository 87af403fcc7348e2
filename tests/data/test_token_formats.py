"""Token files as others write them: each made by its own format's description, read as what it is,
or refused with what to write."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from support.models import tiny
from titanlike.core.config.groups.data import ChatData, TextData, TokenData
from titanlike.core.config.schema import Config
from titanlike.core.data import registry
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.data.sources import IGNORE

DOCUMENTS = [[7 * n % 50 + 1] * (5 + n % 9) + [0] for n in range(60)]  # each ends with 0
IDS = [token for document in DOCUMENTS for token in document]
STARTS = np.cumsum([0, *map(len, DOCUMENTS)])


def megatron(
    folder: Path, dtype: str = "u2", code: int = 8, per: int = 1, old: bool = False
) -> Path:
    """IndexedDatasetBuilder's files: `per` sequences a document; old: fairseq's, without documents."""
    pieces = [part for d in DOCUMENTS for part in np.array_split(np.array(d, f"<{dtype}"), per)]
    lengths, itemsize = np.array([len(p) for p in pieces], "<i4"), np.dtype(dtype).itemsize
    np.concatenate(pieces).tofile(folder / "corpus_text_document.bin")
    with open(folder / "corpus_text_document.idx", "wb") as index:
        index.write(b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, code, len(pieces)))
        if not old:
            index.write(struct.pack("<Q", len(DOCUMENTS) + 1))
        index.write(lengths.tobytes())
        index.write((np.cumsum([0, *lengths[:-1]]) * itemsize).astype("<i8").tobytes())
        if not old:
            index.write((np.arange(len(DOCUMENTS) + 1) * per).astype("<i8").tobytes())
    return folder / "corpus_text_document"


def llm_c(path: Path, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(IDS)
    path.write_bytes(header.tobytes() + np.array(IDS, dtype).tobytes())
    return path


def raw(path: Path, dtype: str = "<u2", ids: Any = IDS) -> Path:
    np.array(ids, dtype).tofile(path)
    return path


def config(path: Path, **changes: Any) -> Config:
    data = TokenData(path=str(path), vocab_size=51, validation_fraction=0.1)
    return replace(tiny(), data=replace(data, **changes), seq_len=8, batch_size=4)


def read(path: Path, **changes: Any) -> list[int]:
    found = config(path, **changes)
    assert registry.problems(found) == []
    data = open_data(found)
    return [*data.train.read(0, 10_000), *data.validation.read(0, 10_000)]


FILES: dict[str, Callable[[Path], Path]] = {
    "a prefix of Megatron": megatron,
    "its .bin alone": lambda folder: megatron(folder, "i4", 4).with_suffix(".bin"),
    "several sequences a document": lambda folder: megatron(folder, "i8", 5, per=2),
    "fairseq": lambda folder: megatron(folder, old=True),
    "llm.c": lambda folder: llm_c(folder / "a.bin"),
    "llm.c of Llama": lambda folder: llm_c(folder / "a.bin", 20240801, 7, "<u4"),
    "numpy under another name": lambda folder: numpy_in(folder / "a.bin"),
    "raw": lambda folder: raw(folder / "a.bin"),
}  # fmt: skip


def numpy_in(path: Path) -> Path:
    with open(path, "wb") as file:
        np.save(file, np.array(IDS))
    return path


@pytest.mark.parametrize("form", FILES)
def test_headers_of_other_tools_token_files_are_skipped(form: str, tmp_path: Path) -> None:
    path = FILES[form](tmp_path)
    assert read(path) == IDS
    if form != "raw" and path.is_file():
        np.save(tmp_path / "other.npy", np.array(IDS))
        assert len(read(path, format="raw", vocab_size=2**16)) > 0, "told so, it is read as it is"


@pytest.mark.parametrize("form", [*FILES][:4])
def test_documents_begin_where_the_index_says(form: str, tmp_path: Path) -> None:
    """Attention stays within each, and no token is learned from the document before it."""
    data = open_data(config(FILES[form](tmp_path), documents=True))
    source = pickle.loads(pickle.dumps(data.train))  # as a loader process gets it
    plain = open_data(config(FILES[form](tmp_path))).train
    for i in range(len(source)):
        at, sample = 8 * i, source[i]
        number = np.searchsorted(STARTS, np.arange(at, at + 9), "right")
        assert (sample["document_ids"].numpy() == number[:-1] - number[0]).all()
        expected = np.where(number[1:] > number[:-1], IGNORE, IDS[at + 1 : at + 9])
        assert sample["targets"].tolist() == expected.tolist()
        assert sample["inputs"].tolist() == plain[i]["inputs"].tolist()
        assert plain[i]["targets"].tolist() == IDS[at + 1 : at + 9]
    assert source.fingerprint() != plain.fingerprint()


def test_a_folder_has_files_for_training_and_for_validation(tmp_path: Path) -> None:
    """nanoGPT's, and modded-nanogpt's of several; what is for a test is left alone."""
    raw(tmp_path / "train.bin", ids=[1] * 300)
    raw(tmp_path / "val.bin", ids=[2] * 100)
    raw(tmp_path / "test.bin", ids=[3] * 100)
    data = open_data(config(tmp_path))
    assert (data.train.count, data.validation.count) == (300, 100)
    assert {*data.train.read(0, 999)} == {1} and {*data.validation.read(0, 999)} == {2}
    assert "val.bin for validation" in data.description
    shards = tmp_path / "fineweb10B"
    shards.mkdir()
    for name in ("train_000001", "train_000002", "val_000000"):
        llm_c(shards / f"fineweb_{name}.bin")
    data = open_data(config(shards))
    assert (data.train.count, data.validation.count) == (2 * len(IDS), len(IDS))
    assert "llm.c's, by its header" in data.description


def parquet_file(path: Path) -> Path:
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2]]}), path)
    return path


def tar(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("00000.txt"), io.BytesIO())
    return path


def index(path: Path, content: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "index.json").write_text(json.dumps(content))
    (path / "shard.00000.mds").write_bytes(b"\0" * 100)
    return path


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-2])
    return path


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


REFUSED: list[tuple[Callable[[Path], Path], str, str]] = [
    (lambda f: megatron(f).with_suffix(".idx"), "the index of a Megatron", "data.path=.*_document$"),
    (lambda f: cut(megatron(f).with_suffix(".bin")), "by corpus_text_document.idx", "Give the"),
    (lambda f: cut(cut_index(f)), "does not have the 60 sequences", "Give the complete"),
    (lambda f: megatron(f, "f4", 7).with_suffix(".bin"), "version 1 and type 7", "Tokenize"),
    (lambda f: cut(llm_c(f / "a.bin")), "bytes, and by its header", "Give the complete file"),
    (lambda f: llm_c(f / "a.bin", version=2), "llm.c of version 2, and 1 is read", ""),
    (lambda f: llm_c(f / "a.bin", 20240522), "questions of llm.c", ""),
    (lambda f: written(f / "a.bin", b"LITPKDS" + bytes(40)), "lit-gpt's packed", "tail -c .25"),
    (lambda f: raw(f / "part-0.npy", "<u4", np.array(IDS) + 70_000), "OLMo", "data.format=raw data.dtype=uint32"),
    (lambda f: raw(f / "part-0.npy"), "OLMo", "data.format=raw data.dtype=uint16"),
    (lambda f: raw(f / "a.bin", "<u4", np.array(IDS) + 70_000), "the halves of uint32", "data.dtype=uint32"),
    (lambda f: parquet_file(f / "a.parquet"), "a Parquet file", "data=hf data.path=.* data.ids_key="),
    (lambda f: tar(f / "a.tar"), "a tar archive", "data=hf"),
    (lambda f: written(f / "a.bin.gz", gzip.compress(b"1234")), "compressed by gzip", "gunzip -k"),
    (lambda f: written(f / "a.bin", b'{"text": "of some length"}\n'), "is text", "data=text"),
    (lambda f: index(f / "mds", {"version": 2, "shards": []}), "Mosaic's MDS", "StreamingDataset"),
    (lambda f: index(f / "lit", {"chunks": [], "config": {}}), "litdata", "StreamingDataset"),
]  # fmt: skip


def cut_index(folder: Path) -> Path:
    path = megatron(folder)
    for _ in range(300):
        cut(path.with_suffix(".idx"))
    return path.with_suffix(".bin")


@pytest.mark.parametrize(("make", "reason", "fix"), REFUSED)
def test_a_file_that_holds_no_token_ids_is_refused(
    make: Callable[[Path], Path], reason: str, fix: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    problems = registry.problems(config(path))
    assert len(problems) == 1 and reason in str(problems[0]) and re.search(fix, problems[0].fix)
    with pytest.raises(DataError):
        open_data(config(path))


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda f: raw(f / "train.bin"), "data=tokens data.path="),
        (lambda f: raw(f / "train.bin").parent, "data=tokens data.path="),
        (lambda f: megatron(f).with_suffix(".idx"), "data=tokens data.path="),
        (lambda f: tar(f / "a.tar").parent, "data=hf data.path=.* data.text_key=txt"),
        (lambda f: index(f / "mds", {"version": 2, "shards": []}), "StreamingDataset"),
        (
            lambda f: index(f / "ours", {"tokenizer": "bytes", "files": []}),
            "data=tokens data.path=",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_binary_file_is_not_read_as_text(
    make: Callable[[Path], Path], fix: str, kind: str, tmp_path: Path
) -> None:
    path, cache = str(make(tmp_path)), str(tmp_path / "cache")
    data = {"text": TextData, "chat": ChatData}[kind](path=path, cache=cache)
    [problem] = registry.problems(replace(config(tmp_path), data=data))
    assert problem.key == "data.path" and re.search(fix, problem.fix)


def test_the_fix_for_raw_ids_and_for_their_number_works(tmp_path: Path) -> None:
    path = raw(tmp_path / "part-0.npy", "<u4", np.array(IDS) + 70_000)
    told = {"format": "raw", "dtype": "uint32", "vocab_size": None}
    [problem] = registry.problems(config(path, **told))
    assert problem.fix.startswith("data.vocab_size=70051,")
    assert read(path, **told | {"vocab_size": 70_051}) == [token + 70_000 for token in IDS]
