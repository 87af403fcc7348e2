"""The files of a run follow the umask of the shell that started it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import TINY
from support.paths import ROOT

TRAIN = [*TINY, "model.layers=2", "steps=2", "validation.every=2", "checkpoint.every=2"]
WANDB = ["logger=wandb", "logger.mode=offline"]
TITANLIKE = [sys.executable, "-m", "titanlike"]
COMMANDS = {
    "train": [sys.executable, str(ROOT / "train.py"), *TRAIN, "run_dir=all/run"],
    "resume": [*TITANLIKE, "train", *TRAIN, "steps=4", "run_dir=all/run"],
    "sweep": [*TITANLIKE, "train", "-m", *TRAIN, *WANDB, "pp=2", "seed=1,2", "run_dir=all/sweep"],
    "verify": [sys.executable, str(ROOT / "tools/verify.py"), *TINY, "pp=2", "run_dir=all/verify"],
    "export": [*TITANLIKE, "checkpoint", "consolidate", "all/run", "all/model.safetensors"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "umask"),
    [(["train", "resume"], 0o007), (["train", "sweep", "verify", "export"], 0o077)],
)
def test_every_file_of_a_run_follows_the_umask(
    names: list[str], umask: int, tmp_path: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    settings = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 240}
    for name in names:
        done = subprocess.run(COMMANDS[name], umask=umask, **settings)
        assert done.returncode == 0, done.stderr
    written = [path for path in (tmp_path / "all").rglob("*") if not path.is_symlink()]
    assert {"metrics.jsonl", "COMMITTED", "state.json", "config.yaml", "result.json"} <= {
        path.name for path in written
    }
    wrong = [
        f"{path.stat().st_mode & 0o777:o} {path.relative_to(tmp_path)}"
        for path in written
        if path.stat().st_mode & 0o777 != (0o777 if path.is_dir() else 0o666) & ~umask
    ]
    shutil.rmtree(tmp_path / "all")
    assert not wrong
