"""A checkpoint as a folder for transformers: `python tools/export.py RUN out/ --dtype bf16`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import run  # noqa: E402

if __name__ == "__main__":
    run("export")
