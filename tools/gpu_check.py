"""Check the GPUs of this machine, and write a report: `python tools/gpu_check.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from benchmarks.gpu_check.check import main  # noqa: E402
from titanlike.cli import run_as_process  # noqa: E402

if __name__ == "__main__":
    run_as_process(lambda: sys.exit(main()))
