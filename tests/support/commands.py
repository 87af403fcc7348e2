"""Whole commands, as a user types them, on a tiny model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from support.forked import run
from support.paths import ROOT

SCRIPTS = Path(sys.executable).parent
TORCHRUN = ["-m", "torch.distributed.run"]
TINY = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=4",
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


def shell(
    line: str, cwd: Path, env: dict[str, str], timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """Run a line of the documentation: `python`, `titanlike` and `torchrun` as forks."""
    settings, rest = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)(.*)", line, re.DOTALL).groups()
    env = env | dict(setting.split("=", 1) for setting in settings.split())
    words = [] if re.search(r"[|&;<>]|\$\(", rest) else shlex.split(rest)
    forks = "gpu_check" in rest and "--list" not in rest  # a fork's fork cannot be forked again
    if words and words[0] in ("python", "titanlike", "torchrun") and not forks:
        program = {"python": [], "titanlike": [str(SCRIPTS / "titanlike")], "torchrun": TORCHRUN}
        return run([*program[words[0]], *words[1:]], cwd, env, timeout)
    return subprocess.run(
        line, shell=True, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )
