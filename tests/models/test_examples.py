"""The example package, as its users run it; that it trains is shown in `docs/test_docs.py`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support import forked
from support.models import tiny
from support.paths import ROOT
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.training.preflight import preflight

EXAMPLES = ROOT / "examples"
CONF = EXAMPLES / "my_models" / "conf"
SMALL = ["logger=none", "seq_len=16", "batch_size=8", "model=mixer", "model.width=16", "data=echo"]


def run(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [str(ROOT / program), "--config-dir", str(CONF), *SMALL, *arguments]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"}
    return forked.run(words, cwd, env)


def test_all_mistakes_of_an_example_are_reported_together(tmp_path: Path) -> None:
    own = ["loss.name=my_models.losses.focal", "loss.gama=1"]
    done = run("train.py", "model.widht=3", "model.depth=0", *own, cwd=tmp_path)
    assert done.returncode == 2
    for fix in ("write model.width=3", "write model.depth=1", "write loss.gamma=1"):
        assert fix in done.stderr, done.stderr


def test_an_unsupported_sequence_length_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    sizes = {"vocab_size": 64, "length": 12, "width": 8}
    (problem,) = preflight(tiny(model=Custom("my_models.mixer.Mixer", sizes)))
    assert "its forward on inputs [16, 16] raised RuntimeError" in str(problem)
