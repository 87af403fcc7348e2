"""Whole commands, as a user types them, on a tiny model."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.forked import run
from support.paths import ROOT

TORCHRUN = ["-m", "torch.distributed.run"]
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


def command(
    *words: str, cwd: Path, tool: str = "train.py", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run train.py or a tool with these overrides, as a fork; the finished process."""
    launcher = TORCHRUN if words and words[0] == "torchrun" else []
    return run([*launcher, str(ROOT / tool), *words[bool(launcher) :]], cwd, timeout=timeout)
