"""Text of every kind is really read, tokenized once, and split without leaks."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import orc, parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from support.commands import TINY, command
from titanlike.core.config.groups.data import TextData
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import DataError, open_data
from titanlike.formats.text import documents, find_files
from titanlike.formats.token_folder import cache_key
from titanlike.formats.tokenizer import ByteTokenizer, byte_tokenizer, open_tokenizer

GROWING = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 1000}
TEXTS = [f"Document {i}: größer, 日本, <|endoftext|>{'.' * (i % 7)}" for i in range(200)]


def tokenized(data: TextData) -> dict[str, list[str]]:
    """The documents of both parts as a run reads them, cut at the boundaries and decoded."""
    opened, found = open_data(Config(data=data, seq_len=1, batch_size=1)), {}
    for part, source in (("train", opened.train), ("validation", opened.validation)):
        ids = source.read(0, 1 << 30)
        assert ids[0] == opened.boundary, "every document begins with the boundary"
        starts = np.flatnonzero(ids == opened.boundary)
        found[part] = [opened.decode(one.tolist()) for one in np.split(ids, starts[1:])]
    return found


def files_in(cache: Path) -> dict[str, int]:
    """The files of all entries, and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(cache.glob("*/*"))}


def write_jsonl(path: Path, texts: list[str], text_key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, text_key: t}) + "\n" for i, t in enumerate(texts)))
    return path


def write_tokenizer(path: Path, special: list[str]) -> Path:
    """A small byte-level BPE, with a truncation and a template that must not touch the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    tokenizer.enable_truncation(max_length=8)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("text", ["", "plain", "größe 日本 🙂", "<|endoftext|>\x00\r\n"])
def test_byte_tokens_round_trip_any_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.boundary, *ids]) == text
    assert all(i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [("folder", "bytes"), ("jsonl", "endoftext"), ("parquet", "no boundary")],
)
def test_text_round_trips_and_train_and_validation_are_disjoint(
    tmp_path: Path, kind: str, tokenizer: str
) -> None:
    """Also text that spells a boundary, and a tokenizer.json that asks for truncation."""
    path = tmp_path / "texts"
    path.mkdir()
    if kind == "folder":
        for i, text in enumerate(TEXTS):
            (path / f"{i:03}.txt").write_text(text)
        (path / "picture.png").write_bytes(b"\xff\xfe")
    elif kind == "jsonl":
        path = write_jsonl(path / "a.jsonl", [*TEXTS, ""], "content")
    else:
        table = pyarrow.table({"content": [*TEXTS, None], "n": range(len(TEXTS) + 1)})
        parquet.write_table(table, path / "a.parquet", row_group_size=64)
    name = "bytes"
    if tokenizer != "bytes":
        special = ["<s>", "<|endoftext|>"] if tokenizer == "endoftext" else []
        name = str(write_tokenizer(tmp_path / "tokenizer.json", special))
    cache = str(tmp_path / "cache")
    data = TextData(path=str(path), text_key="content", tokenizer=name, cache=cache)
    train, held = tokenized(data).values()
    assert sorted(train + held) == sorted(TEXTS)
    assert len(set(train)) + len(set(held)) == len(TEXTS)
    assert 1 <= len(held) <= 30
    opened = open_tokenizer(name)
    boundaries = {"bytes": 256, "endoftext": 1, "no boundary": opened.vocab_size - 1}
    assert opened.boundary == boundaries[tokenizer]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    "kind",
    [
        *("jsonl.zst", "jsonl.gz", "json.gz", "json array", "gzip under another name"),
        *("arrow stream", "orc", "saved by datasets", "struct column"),
    ],
)
def test_every_text_format_in_a_folder_is_read(kind: str, tmp_path: Path) -> None:
    """RedPajama's, Dolma's, datasets': compressed, also .json of lines, text one level down."""
    folder, texts = tmp_path / "corpus", TEXTS[:20]
    (folder / "part").mkdir(parents=True)
    rows = [{"text": text, "meta": {"source": "web"}} for text in texts]
    file, key, table = folder / "part" / f"a.{kind}", "text", pyarrow.Table.from_pylist(rows)
    if kind == "jsonl.zst":
        file.write_bytes(zstandard.compress(lines(rows)))
    elif kind in ("jsonl.gz", "json.gz"):
        file.write_bytes(gzip.compress("\ufeff".encode() + lines(rows)))
    elif kind == "gzip under another name":
        file.with_name("a.jsonl").write_bytes(gzip.compress(lines(rows)))
    elif kind == "json array":
        file.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    elif kind == "arrow stream":
        with pyarrow.ipc.new_stream(file.with_name("a.arrow"), table.schema) as out:
            out.write_table(table)
    elif kind == "orc":
        orc.write_table(table, file)
    elif kind == "saved by datasets":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    else:
        key, nested = "content.text", [{"content": row, "id": 1} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(nested), file.with_name("a.parquet"))
        file.with_name("b.jsonl").write_bytes(lines(nested))
        file.with_name("c.json").write_text(json.dumps(nested))
        with pytest.raises(DataError, match="write data.text_key=content.text$"):
            list(documents(find_files(str(folder)), "text"))
        texts = texts * 3
    assert list(documents(find_files(str(folder)), key)) == texts


def test_a_json_file_without_texts_is_a_document_itself(tmp_path: Path) -> None:
    for name, text in (("a", '{"name": "x"}'), ("b", "[1, 2]"), ("c", "{not json\n{")):
        (tmp_path / f"{name}.json").write_text(text)
        assert list(documents([tmp_path / f"{name}.json"], "text")) == [text]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_few_documents_are_split_into_train_and_validation(
    tmp_path: Path, count: int, fraction: float
) -> None:
    """A single document is cut in two; of several, each is whole in one part."""
    texts = [chr(ord("a") + i) * 1000 for i in range(count)]
    path = write_jsonl(tmp_path / "few.jsonl", texts)
    data = TextData(path=str(path), validation_fraction=fraction, cache=str(tmp_path / "cache"))
    train, held = tokenized(data).values()
    assert all(train) and all(held)
    if count == 1:
        assert train[0] + held[0] == texts[0]
        assert len(held[0]) == 1000 * fraction
    else:
        assert sorted(train + held) == texts


def test_the_token_cache_is_reused_until_an_input_changes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    data = TextData(path=str(path), cache=str(tmp_path / "cache"))
    first, written = tokenized(data), files_in(tmp_path / "cache")
    assert tokenized(data) == first and files_in(tmp_path / "cache") == written

    name = str(write_tokenizer(tmp_path / "tokenizer.json", ["</s>"]))
    assert tokenized(replace(data, tokenizer=name)) == first
    assert len(files_in(tmp_path / "cache")) == 2 * len(written)

    write_jsonl(path, [text.lower() for text in TEXTS])
    lower = tokenized(data)
    assert sorted(sum(lower.values(), [])) == sorted(text.lower() for text in TEXTS)

    ids = [str(number) for number in range(len(TEXTS))]
    path.write_bytes(lines([{"text": text, "id": n} for text, n in zip(TEXTS, ids, strict=True)]))
    assert tokenized(data) == first
    assert sorted(sum(tokenized(replace(data, text_key="id")).values(), [])) == sorted(ids)

    before = files_in(tmp_path / "cache")
    write_jsonl(path, [*TEXTS, "one more"])
    more = tokenized(data)
    assert len(sum(more.values(), [])) == len(TEXTS) + 1

    for name in files_in(tmp_path / "cache").keys() - before.keys():
        with open(name, "r+b") as file:  # as after a power cut
            file.truncate(10)
        assert tokenized(data) == more and os.path.getsize(name) > 10


def test_concurrent_processes_write_one_cache(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 20)
    data = TextData(path=str(path), cache=str(tmp_path / "cache"))
    with ProcessPoolExecutor(4) as pool:
        made = list(pool.map(tokenized, [data] * 8, timeout=60))
    assert all(one == made[0] for one in made)
    assert len(os.listdir(tmp_path / "cache")) == 1


def table_in(texts: list[str]) -> bytes:
    parquet.write_table(pyarrow.table({"body": texts, "n": [1] * len(texts)}), buffer := BytesIO())
    return buffer.getvalue()


BAD_TEXT = {
    "no such path": (None, "data.path", "no such file or folder"),
    "no file in the folder": ({"a.png": b"x"}, "data.path", ".jsonl"),
    "no text in the files": ({"a.txt": b"", "b.jsonl": b"\n"}, "data.path", "no text"),
    "no UTF-8": ({"a.txt": "größer".encode("latin-1")}, "data.path", "UTF-8"),
    "a broken line": ({"a.jsonl": b'{"text": "a"}\n{"text": "b\n'}, "data.path", "line 2"),
    "a deep line": ({"a.jsonl": b'{"text": ' + b"[" * 100_000}, "data.path", "line 1"),
    "a line without UTF-8": ({"a.jsonl": b'{"text": "\xff"}\n'}, "data.path", "line 1"),
    "no object in a line": ({"a.jsonl": b'{"text": "a"}\n[1]\n'}, "data.text_key", "line 2"),
    "no such field": ({"a.jsonl": b'{"body": "a", "n": 1}\n'}, "data.text_key", "body, n"),
    "a field without text": ({"a.jsonl": b'{"text": 3}\n'}, "data.text_key", "int"),
    "no Parquet": ({"a.parquet": b"abc"}, "data.path", "Parquet"),
    "half a file": (
        {"a.txt.gz": gzip.compress(b"a" * 99)[:-9]},
        "data.path",
        "a.txt.gz: cannot be",
    ),
    "no such column": ({"a.parquet": table_in(["x"])}, "data.text_key", "line 1 .* are body, n"),
}


def much(begin: str = "", end: str = "") -> bytes:
    """65 MiB of text."""
    return begin.encode() + b"a" * (65 << 20) + end.encode()


def hollow(path: Path) -> None:
    path.write_bytes(b"some text")
    os.truncate(path, 1 << 40)


LARGER: dict[str, tuple[Callable[[Path], object], str]] = {
    "line.jsonl.gz": (lambda p: p.write_bytes(gzip.compress(much('{"text": "', '"}'), 1)), "line 1 is longer than 64 MiB"),
    "line.jsonl.zst": (lambda p: p.write_bytes(zstandard.compress(much('{"text": "', '"}'))), "line 1 is longer than 64 MiB"),
    "text.txt.gz": (lambda p: p.write_bytes(gzip.compress(much(), 1)), "unpacks to more than 64 MiB"),
    "array.json.gz": (lambda p: p.write_bytes(gzip.compress(much('[{"text": "', '"}]'), 1)), "unpacks to more than 64 MiB"),
    "hole.txt": (hollow, "has holes"),
    "cut.orc": (lambda p: p.write_bytes(b"ORC" + bytes(100)), "cannot be read to its end .cut.orc: "),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGER)
def test_a_file_that_unpacks_to_much_more_or_is_damaged_is_named(name: str, tmp_path: Path) -> None:
    """And not read whole: of gigabytes in some kilobytes nobody has the memory."""
    write, said = LARGER[name]
    write(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}.*{said}"):
        list(documents([tmp_path / name], "text"))


@pytest.mark.parametrize("case", BAD_TEXT)
def test_a_mistake_in_text_names_the_key_and_the_place(tmp_path: Path, case: str) -> None:
    files, key, words = BAD_TEXT[case]
    folder = tmp_path / "texts"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    data = TextData(path=str(folder), cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=words) as raised:
        tokenized(data)
    assert str(raised.value).startswith(f"{key}=")
    cache = tmp_path / "cache"
    assert not cache.exists() or not os.listdir(cache), "nothing half-made is left"


def test_a_bad_line_ends_a_run_as_a_bad_config_does(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a good line"}\n{"text": "a')
    words = [f"data.path={tmp_path / 'a.jsonl'}", f"data.cache={tmp_path / 'cache'}"]
    done = command(*TINY, *words, "run_dir=run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert str(tmp_path / "a.jsonl") in done.stderr and "line 2" in done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "invalid" and "line 2" in result["error"]


def test_a_lone_surrogate_in_json_is_handled(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert list(documents([path], "text")) == ["a?b"]


def test_a_cache_that_cannot_be_written_and_a_fifo_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x" * 1000)
    data = TextData(path=str(tmp_path / "file"), cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="data.cache=.*cannot be written"):
        tokenized(data)
    for name in ("a.txt", "a.jsonl.gz", "a.txt.zst"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match=f"{name}.*regular file"):
            list(documents([tmp_path / name], "text"))


def test_the_key_of_a_cache_entry_does_not_depend_on_the_order_of_keys() -> None:
    assert cache_key([{"a": 1, "b": [2]}]) == cache_key([{"b": [2], "a": 1}])
    assert cache_key([{"a": 1, "b": [2]}]) != cache_key([{"a": 1, "b": [3]}])


EMPTY = {"type": "WordLevel", "vocab": {}, "unk_token": "x"}
WITHOUT_VOCABULARY = json.dumps({"version": "1.0", "added_tokens": [], "model": EMPTY})


@pytest.mark.parametrize("content", [None, "{}", "not json", WITHOUT_VOCABULARY])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    words = ": it has no vocabulary" if content == WITHOUT_VOCABULARY else ""
    with pytest.raises(DataError, match=f"data.tokenizer=.*tokenizer.json{words}"):
        open_tokenizer(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
        {"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 3}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"added_tokens": [{}] * 50_000},
        {"normalizer": 10**400},
    ],
)
def test_a_tokenizer_without_bounds_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(byte_tokenizer("<|endoftext|>") | change))
    with pytest.raises(DataError, match="data.tokenizer=.*not a tokenizer.json"):
        open_tokenizer(str(path))


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pip install 'titanlike\[text\]'"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"pip install 'titanlike\[text\]'"):
        list(documents([tmp_path / "a.parquet"], "text"))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "O"},
        {"dtype": "S4"},
        {"dtype": "datetime64[s]"},
        {"dtype": "<u2"},
        {"dtype": ["uint16"]},
        {"vocab_size": "x"},
        {"tokens": True},
        {"tokens": -1},
        {"files": None},
        {"boundary": 1e400},
        {"name": "../other.bin"},
    ],
)
def test_a_cache_that_somebody_prepared_is_not_believed(
    change: dict[str, Any], tmp_path: Path
) -> None:
    """An entry of another form is written anew: with dtype "O" the bytes of its file would be
    addresses of Python's objects."""
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    data = TextData(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    right = tokenized(data)
    [index] = (tmp_path / "cache").glob("*/index.json")
    itemsize = {"O": 8, "S4": 4, "datetime64[s]": 8}.get(str(change.get("dtype")), 2)
    plain = json.loads(index.read_text())
    (tmp_path / "cache" / "other.bin").write_bytes(b"\x42" * 4000)
    for entry in plain["files"]:
        (index.parent / entry["name"]).write_bytes(b"\x42" * 4000)
        entry["tokens"] = 4000 // itemsize
    plain["files"][0] |= {name: change[name] for name in change.keys() & {"name", "tokens"}}
    index.write_text(json.dumps(plain | {k: v for k, v in change.items() if k != "tokens"}))
    assert tokenized(data) == right
