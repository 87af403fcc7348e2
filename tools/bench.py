"""Measure speed and memory: `python tools/bench.py pp=2 dp=2` takes the overrides of train.py.

Measures tokens/s, step time, peak memory per rank and the time to the first step, and in the same
run a plain torch loop of the same model and batch in one process.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import start_job  # noqa: E402
from titanlike.core.config.program import set_program  # noqa: E402

if __name__ == "__main__":
    set_program()
    start_job("benchmarks.speed.bench.bench", "bench")
