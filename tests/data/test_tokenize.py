"""A corpus of many files as token ids: the same bytes whoever is killed, and nothing lost
silently."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from support.models import tiny
from support.paths import ROOT
from titanlike.core.config.groups.data import TokenData
from titanlike.core.config.parse import parse
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import DataError, open_data
from titanlike.formats import packed
from titanlike.formats.tokenize_corpus import Settings, main, tokenize_corpus_files
from titanlike.formats.tokenizer import ByteTokenizer, open_tokenizer

BYTES = ByteTokenizer()
TEXTS = ["def größe():\n", "x = 1\n", "Jo", "été", "12 34", "last"]


def ids_of(texts: list[str]) -> list[int]:
    """Each document begins with the token between documents."""
    return [token for text in texts for token in [BYTES.boundary, *BYTES.encode(text)]]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """In the order of TEXTS."""
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.py").write_text(TEXTS[0])
    (folder / "c.jsonl").write_bytes(jsonl(TEXTS[1:5]) + b"\n")
    (folder / "sub" / "f.txt").write_text(TEXTS[5])
    (folder / ".hidden.txt").write_text("no")
    (folder / "image.png").write_bytes(b"\x89")
    return folder


def tokens_in(out: Path) -> list[int]:
    index = json.loads((out / "index.json").read_text())
    parts = [np.fromfile(out / one["name"], f"<{index['dtype'][0]}2") for one in index["files"]]
    return np.concatenate(parts).tolist()


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


def test_a_corpus_is_tokenized_and_verified(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(corpus), str(tmp_path / "out"), "--workers", "1"]) == 0
    assert f"{len(ids_of(TEXTS)):,} tokens in 6 documents" in capsys.readouterr().out
    assert tokens_in(tmp_path / "out") == ids_of(TEXTS)
    assert main(["", str(tmp_path / "out"), "--verify"]) == 0
    file = tmp_path / "out" / "tokens-00000.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    assert main(["", str(tmp_path / "out"), "--verify"]) == 1
    assert "tokens-00000.bin does not match" in capsys.readouterr().out


def test_bad_records_are_refused_by_name_or_counted_named_and_skipped(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = jsonl(["good"]) + b'{"text": 3}\n{"txt": "x"}\n{broken\n' + jsonl(["end"])
    (corpus / "g.jsonl").write_bytes(lines)
    (corpus / "h.txt").write_bytes(b"\xff\xfe")
    (corpus / "i.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-20])
    (corpus / "sub" / "f.txt").unlink()
    words = [str(corpus), str(tmp_path / "refused"), "--workers", "1"]
    assert main(words) == 1
    assert "g.jsonl: record 2: holds int in text" in capsys.readouterr().err
    assert not (tmp_path / "refused" / "index.json").exists()
    assert main([str(corpus), str(tmp_path / "out"), "--workers", "1", "--bad", "skip"]) == 0
    assert "5 bad records were skipped" in capsys.readouterr().out
    assert tokens_in(tmp_path / "out") == ids_of([*TEXTS[:5], "good", "end"])
    named = [json.loads(line) for line in (tmp_path / "out" / "bad.jsonl").read_text().splitlines()]
    places = [(Path(one["file"]).name, one["record"]) for one in named]
    assert places == [("g.jsonl", n) for n in (2, 3, 4)] + [("h.txt", 0), ("i.txt.gz", 0)]


KILLED = """
import os, sys
from pathlib import Path
from titanlike.formats import tokenize_corpus as t
written = 0
after = t._tokenize_unit
def tokenize_unit(*args):
    global written
    if written == 3:
        os.kill(os.getpid(), 9)
    written += 1
    return after(*args)
t._tokenize_unit = tokenize_unit
t.tokenize_corpus_files(Path(sys.argv[1]), Path(sys.argv[2]), t.Settings("bytes", unit_bytes=64), 1)
"""


def test_a_killed_tokenization_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02d}.txt").write_text(f"{number} " * 20)
    settings, said = Settings("bytes", unit_bytes=64), list[str]()
    tokenize_corpus_files(folder, tmp_path / "whole", settings, 1)
    words = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(words, env=environment).returncode == -signal.SIGKILL
    units = [path for path in (tmp_path / "out").glob("tokens-*.json")]
    assert len(units) == 3 and not (tmp_path / "out" / "index.json").exists()
    half = tmp_path / "out" / "tokens-00003.bin"
    half.write_bytes(b"half a file")  # as of a machine that lost its power
    tokenize_corpus_files(folder, tmp_path / "out", settings, 2, said.append)
    assert "going on: 3 of 12" in said[0]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    (folder / "00.txt").write_text("9 " * 20)  # as many bytes as before
    with pytest.raises(DataError, match="another state of the corpus"):
        tokenize_corpus_files(folder, tmp_path / "out", settings, 1)
    with pytest.raises(DataError, match="has other files"):
        tokenize_corpus_files(folder, folder, settings, 1)


def test_many_small_files_are_packed_into_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(500):
        (folder / f"{number:05d}.txt").write_text(f"{number} ")
    index = tokenize_corpus_files(folder, tmp_path / "out", Settings("bytes"), 1)
    assert index["documents"] == 500 and len(index["files"]) == 1
    mapped = mock.Mock(wraps=packed.open_tokens)
    monkeypatch.setattr(packed, "open_tokens", mapped)
    open_data(of(tmp_path / "out"))
    assert mapped.call_count == 2, "once for each part"


# --- data=tokens of several folders
# ----------------------------------------------------------------------


def of(*paths: Path, **changes: object) -> Config:
    data = TokenData(path=[str(path) for path in paths], validation_fraction=0.1)
    return replace(tiny(), data=replace(data, **changes), seq_len=8, batch_size=4)


def a_folder(tmp_path: Path, name: str, numbers: range) -> Path:
    source = tmp_path / f"{name}-text"
    source.mkdir()
    for number in numbers:
        (source / f"{number:03d}.txt").write_text(f"{name} {number} " * 5)
    tokenize_corpus_files(source, tmp_path / name, Settings("bytes", unit_bytes=200), 1)
    return tmp_path / name


def test_several_folders_and_files_are_one_corpus(tmp_path: Path) -> None:
    a, b = a_folder(tmp_path, "a", range(20)), a_folder(tmp_path, "b", range(30))
    raw = np.arange(200, dtype="<u2")
    raw.tofile(tmp_path / "c.bin")
    config = of(a, b, tmp_path / "c.bin", vocab_size=257)
    data = open_data(config)
    assert data.boundary == BYTES.boundary and data.encode is not None
    every = tokens_in(a) + tokens_in(b) + raw.tolist()
    cut = len(every) - round(len(every) * 0.1)
    assert data.train.count == cut and data.train.read(3, cut).tolist() == every[3:cut]
    assert data.validation.read(0, 10_000).tolist() == every[cut:]
    seen = [data.train[i] for i in range(len(data.train))]
    for sample in seen:  # consecutive tokens of one file
        text = sample["inputs"].tolist() + sample["targets"].tolist()[-1:]
        assert any(every[i : i + 9] == text for i in range(len(every)))
    assert len(seen) * 8 > 0.85 * cut
    first = next(batches(data.train, config, dp_rank=0))
    assert first["inputs"].shape == (4, 8)


def test_inconsistent_options_are_reported(tmp_path: Path) -> None:
    a = a_folder(tmp_path, "a", range(20))
    with pytest.raises(DataError, match="has no index.json"):
        open_data(of(tmp_path))
    np.arange(200, dtype="<u2").tofile(tmp_path / "c.bin")
    with pytest.raises(DataError, match="data.vocab_size=null"):
        open_data(of(tmp_path / "c.bin"))
    index = json.loads((a / "index.json").read_text())
    b = tmp_path / "b"
    b.mkdir()
    (b / "index.json").write_text(json.dumps(index | {"tokenizer": "other", "files": []}))
    with pytest.raises(DataError, match="another tokenizer"):
        open_data(of(a, b))
    (a / "index.json").write_text(json.dumps(index | {"files": index["files"] * 2}))
    with pytest.raises(DataError, match="index.json names a file twice"):
        open_data(of(a))
    (a / "index.json").write_text(json.dumps(index | {"files": [{"name": "x" * 300, "tokens": 1}]}))
    with pytest.raises(DataError, match="names x+, which is not in it"):
        open_data(of(a))
    (a / "index.json").write_text(json.dumps(index))
    file = a / index["files"][0]["name"]
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match="does not have the"):
        open_data(of(a))
    _, problems = parse({"data": {"name": "tokens", "path": ["a", 3]}})
    assert "write data.path=[a/,b/]" in str(problems[0])


# --- tokenizers
# ------------------------------------------------------------------------------------------


def test_a_folder_and_a_sentencepiece_model_are_tokenizers(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [f"def f{n}(x): return x + {n}" for n in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=60,
        minloglevel=2,
    )
    one = open_tokenizer(str(tmp_path / "tokenizer.model"))
    ids = one.encode(lines[7])
    assert one.decode([*ids, one.boundary]) == lines[7] and max(ids) < one.vocab_size
    assert [list(each) for each in one.encode_many(lines[:3])] == [one.encode(x) for x in lines[:3]]
    assert open_tokenizer(str(tmp_path)).fingerprint == one.fingerprint
    from titanlike.formats.tokenizer import write_tokenizer

    (tmp_path / "bytes").mkdir()
    write_tokenizer("bytes", tmp_path / "bytes")
    folder = open_tokenizer(str(tmp_path / "bytes"))
    assert (folder.boundary, folder.vocab_size) == (BYTES.boundary, BYTES.vocab_size)
    assert folder.encode("größe <|endoftext|>") == BYTES.encode("größe <|endoftext|>")
    with pytest.raises(DataError, match="neither tokenizer.json"):
        open_tokenizer(str(ROOT / "docs"))
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(DataError, match="not a sentencepiece model"):
        open_tokenizer(str(tmp_path / "bad.model"))


def test_no_tool_hides_a_module_of_the_standard_library() -> None:
    """A script's folder comes first on sys.path."""
    tools = {path.stem for path in (ROOT / "tools").glob("*.py")}
    assert tools & set(sys.stdlib_module_names) == set()
