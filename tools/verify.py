"""Verify a layout: `python tools/verify.py pp=2 dp=2 schedule=zbvzerobubble` takes the overrides of train.py.

It trains one step in that layout and one in a single process of plain torch, and compares loss,
gradients and updated parameters by name. Exit code 1 if they differ.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import main  # noqa: E402

if __name__ == "__main__":
    main("verify")
