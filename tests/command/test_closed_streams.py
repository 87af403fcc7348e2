"""Commands whose caller has closed their streams."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import TINY
from support.paths import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_run_completes_though_its_streams_are_closed(closed: str, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "train.py"), *TINY, "model.layers=2", "pp=2", "run_dir=run"]
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(words)} {closed}"], cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
