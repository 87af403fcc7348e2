"""The lines that a run's output proposes do what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support.commands import TINY, command
from support.sources import write_corpus


def evaluated(cwd: Path, *words: str) -> str:
    done = command("run", *words, "--trust-code", cwd=cwd, tool="tools/evaluate.py")
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_lines_that_a_streams_run_proposes_work(tmp_path: Path) -> None:
    """ "continue with", and `evaluate RUN data.path=FILE`; of the run's own file, what is held out."""
    for name, first in (("a", 0), ("b", 500)):
        write_corpus("jsonl", tmp_path / name, first)
    words = [*TINY, f"data.path={tmp_path / 'a'}", "data=stream", "data.workers=0", "verify=off"]
    words += ["validation.every=5", "checkpoint.last=true", "run_dir=run"]
    trained = command(*words, cwd=tmp_path)
    (line,) = re.findall("^continue with: python (.*)", trained.stdout, re.MULTILINE)
    again = command(*shlex.split(line)[1:], cwd=tmp_path)
    assert again.returncode == 0 and " 10/10 " in again.stdout, again.stdout + again.stderr
    assert re.search(
        r"bytes +\d\d,\d{3}$", evaluated(tmp_path, f"data.path={tmp_path / 'b'}"), re.M
    )
    own = evaluated(tmp_path, f"data.path={tmp_path / 'a'}")
    assert re.search(r"bytes +(9\d\d|1,0[012]\d)$", own, re.M), "4 batches of 256 tokens"
    assert "has trained on others; write" in evaluated(tmp_path, "validation.batches=40")


@pytest.mark.slow
def test_a_run_that_saved_nothing_proposes_no_line_to_continue_with(tmp_path: Path) -> None:
    trained = command(*TINY, "data=synthetic", "verify=off", "run_dir=run", cwd=tmp_path)
    assert "training complete" in trained.stdout and "continue with" not in trained.stdout
