"""The benchmark of silent faults: benchmarks/silent_faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.silent_faults.faults import HERE, benchmarked
from support.paths import ROOT


def test_every_silent_fault_can_be_planted_and_has_a_source() -> None:
    """And says what verify should name; a published one is of one issue, paper, or file."""
    faults = benchmarked()
    assert len(faults) >= 60
    for name, fault in faults.items():
        planted = fault.planted((ROOT / fault.file).read_text())
        if not fault.test:  # test_faults.py compiles the others
            compile(planted, fault.file, "exec")
        assert fault.module and fault.line, name
        for pattern in (fault.module, fault.line):
            re.compile(pattern)
        if fault.source.startswith("https://"):
            assert re.match(
                r"https://(github\.com/[^/]+/[^/]+/(issues|pull)|arxiv\.org)/", fault.source
            )
        else:
            file = fault.source.rpartition(": ")[2]
            assert fault.source == "titanlike" or (ROOT / file).is_file(), name


@pytest.mark.grid
def test_the_benchmark_finds_a_fault_of_tensor_and_of_data_parallelism(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    for text in ("does not mask the ids of other ranks", "averaged over data-parallel ranks"):
        words = ["--only", text, "--results", str(results)]
        subprocess.run(
            [sys.executable, str(HERE / "run.py"), *words], check=True, timeout=300, cwd=tmp_path
        )
    found = json.loads(results.read_text())
    assert len(found["faults"]) == 2
    for name, of in found["faults"].items():
        assert of["caught"]["verify"] and of["module"] and of["line"], (name, of)
        assert not of["caught"]["again"], "the same losses in both runs"
    for layout, of in found["right"].items():
        assert of["verify"]["exit_code"] == 0, layout
