"""Measure speed and memory: `python tools/bench.py pp=2 dp=2` takes the overrides of train.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import run  # noqa: E402

if __name__ == "__main__":
    run("bench")
