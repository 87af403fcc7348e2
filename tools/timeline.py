"""What a run did: `python tools/timeline.py RUN` prints its timeline beside its plan."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import run  # noqa: E402

if __name__ == "__main__":
    run("timeline")
