"""Measure a command line: `python tools/bench.py pp=2 dp=2` takes the overrides of train.py.

Tokens/s, step time, peak memory a rank, time to the first step; and beside it, in the same run, a
plain torch loop of the same model and batch in one process.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import main  # noqa: E402

if __name__ == "__main__":
    main("bench")
