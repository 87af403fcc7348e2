"""Whole commands, as a user types them, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TINY = [
    "model.dim=32",
    "model.ffn_dim=64",
    "model.layers=8",
    "seq_len=16",
    "steps=5",
    "validation.every=0",
    "checkpoint.last=false",
    "logger=none",
]


def command(*words: str, cwd: Path, tool: str = "train.py", timeout: float = 120):
    """Run train.py or a tool with these overrides; the finished process."""
    launcher = [sys.executable]
    if words and words[0] == "torchrun":
        words, launcher = words[1:], TORCHRUN
    return subprocess.run(
        [*launcher, str(ROOT / tool), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
