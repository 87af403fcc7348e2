"""The table of a sweep: `python tools/sweep.py DIR` prints it at any time, also while it runs.

It writes sweep.csv, sweep.md and the picture sweep.png into DIR, and says what is left.

Exit code 0 if all jobs are done, 1 if some are left, 2 if DIR is no sweep's.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import main  # noqa: E402

if __name__ == "__main__":
    main("sweep")
