"""What a training step computes on an accelerator stays there, and asks for no value of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.cells import GRID, slow
from support.fake_accelerator import LAYOUTS
from support.paths import ROOT

pytestmark = pytest.mark.slow

FEW = ["chunked loss", "dp", "pp"]
OTHERS = slow([name for name in LAYOUTS if name not in FEW], marks=GRID)


@pytest.mark.parametrize("names", [FEW, *OTHERS], ids=len)
def test_a_step_mixes_no_devices_and_never_synchronizes(names: list[str]) -> None:
    """In a process of its own, where torch is told of a device that it has no kernels for."""
    command = [sys.executable, "-m", "support.fake_accelerator", *names]
    done = subprocess.run(
        command,
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "" and done.returncode == 0, done.stdout + done.stderr
