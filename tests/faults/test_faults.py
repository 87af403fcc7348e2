"""Planted faults: each row of `tests/faults/*.yaml` breaks a line, and the test that it names
fails.

A row is one kind of wrong numbers, of a lost checkpoint, or of a hang: the proof that a default
test notices it. One row a kind: messages, tables and help have none. A fixed bug of these kinds
brings a row if no other row breaks the same mechanism. A test that goes, or is merged into another,
goes only as long as all of these are found. Rows:

    - fault: what is wrong, in words
      file: titanlike/room/file.py
      replace: a text that the file has exactly once
      by: what stands there instead
      test: tests/room/test_file.py::test_name[case]   # of the default suite

A row of wrong numbers may say in which layout they show, and is then one of the benchmark of silent
faults, too (`benchmarks/silent_faults`).

`pytest -m faults` plants each one in a copy of the checkout (15 s of CPU each); `-k` chooses some.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.silent_faults.faults import rows_of
from support.paths import ROOT

LEFT_OUT = shutil.ignore_patterns(".git", ".[!g]*", "outputs", "multirun", "wandb", "build", "dist")


FAULTS = rows_of(Path(__file__).parent)


def test_every_fault_can_be_planted_and_names_a_test() -> None:
    for fault in FAULTS.values():
        path = ROOT / fault.file
        planted = fault.planted(path.read_text())
        if path.suffix == ".py":
            compile(planted, fault.file, "exec")
        file, _, function = fault.test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(), fault.test


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_the_named_test_finds(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    path = copy / fault.file
    path.write_text(fault.planted(path.read_text()))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    words = ["-n", "0", "-x", "-m", "not gpu", "--durations=0", fault.test]
    words.append(f"--basetemp={tmp_path / 'tests'}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=copy,
        env=env | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and found, done.stdout[-3000:] + done.stderr[-1000:]
    assert "NameError" not in done.stdout, "the fault itself is broken:\n" + done.stdout[-3000:]
    print(f"{name}\n    {found[0]}")
