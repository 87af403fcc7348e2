"""Where the host waits for the GPU: `python tools/waits.py` takes the overrides of train.py.

Trains a few steps and counts, after the first ones, the calls in which the host waits for a CUDA
device: their number a step, and by file and line. A CPU has none to count.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import start_job  # noqa: E402
from titanlike.core.config.program import set_program  # noqa: E402

if __name__ == "__main__":
    set_program()
    start_job("benchmarks.speed.waits.waits", "waits")
