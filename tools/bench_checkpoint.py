"""Measure the checkpoints of a command line: `python tools/bench_checkpoint.py pp=2 dp=2` takes
the overrides of train.py.

How long training waits for a save in each mode, and how fast saving and loading are beside a plain
write and a plain read of the same bytes, all in one run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import main  # noqa: E402

if __name__ == "__main__":
    main("bench-checkpoint")
