"""Runs as one page: `python tools/report.py RUN [RUN ...]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import run  # noqa: E402

if __name__ == "__main__":
    run("report")
