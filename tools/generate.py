"""Text from a trained model: `python tools/generate.py RUN --prompt "def main" temperature=0.8`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import run  # noqa: E402

if __name__ == "__main__":
    run("generate")
