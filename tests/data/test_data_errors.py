"""Errors in the user's data are errors in the config: exit code 2, the file, and the line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.cells import slow
from support.commands import TINY, command

LINES = {
    "cut": b'{"text": "a',
    "deep": b'{"text": ' + b"[" * 100_000,
    "a list": b'["text"]',
    "another field": b'{"words": "a"}',
    "a number": b'{"text": 3}',
    "not UTF-8": b'{"text": "\xff"}',
}


QUICK = ("cut", "not UTF-8")
OTHERS = [case for case in LINES if case not in QUICK]


@pytest.mark.parametrize(
    "names, pp", [(QUICK, 1), *slow((OTHERS, 1), (QUICK[:1], 2))], ids=["some", "others", "pp=2"]
)
def test_a_line_that_is_no_document_is_named(names: list[str], pp: int, tmp_path: Path) -> None:
    for number, case in enumerate(names):
        line = LINES[case]
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b'{"text": "a good line"}\n' + line + b"\n")
        words = [f"data.path={path}", f"data.cache={tmp_path / 'cache'}", f"pp={pp}"]
        done = command(*TINY, *words, f"run_dir=run{number}", cwd=tmp_path)
        assert done.returncode == 2, (case, done.stderr)
        assert str(path) in done.stderr and "line 2" in done.stderr, (case, done.stderr)
        assert "Traceback" not in done.stderr, case
        result = json.loads((tmp_path / f"run{number}" / "result.json").read_text())
        assert result["status"] == "invalid" and "line 2" in result["error"], case


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {}, "unk_token": "x"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    done = command(*TINY, f"data.tokenizer={path}", "run_dir=run", cwd=tmp_path)
    assert done.returncode == 2
    assert f"data.tokenizer={path}: it has no vocabulary" in done.stderr


def test_a_fifo_among_the_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    os.mkfifo(tmp_path / "texts" / "a.txt")
    words = [f"data.path={tmp_path / 'texts'}", f"data.cache={tmp_path / 'cache'}"]
    done = command(*TINY, *words, "run_dir=run", cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "a.txt" in done.stderr and "regular file" in done.stderr
