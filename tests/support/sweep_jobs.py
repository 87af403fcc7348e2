"""Jobs of sweeps, some of which go wrong the first time; run as a program, a command line.

`python sweep_jobs.py JOB [overrides]` is what `train.py` is, with a job of this file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))


def trains(config, worker):
    """Trains; but at their first start seed 3 fails, and seed 7 waits to be killed."""
    from titanlike.core.training.loop import train

    first = worker.run_dir / "first"
    if not first.exists():
        first.write_text(str(os.getpid()))
        if config.seed == 3:
            raise RuntimeError("seed 3 is not liked")
        if config.seed == 7:
            time.sleep(300)
    return train(config, worker)


def where(config, worker):
    """Leaves what it was given, and when it ran."""
    begin = time.time()
    time.sleep(0.5)
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    given = " ".join(str(os.environ.get(name)) for name in names)
    (worker.run_dir / "where").write_text(f"{begin} {time.time()} {given}")
    return {"value": float(config.seed)}


if __name__ == "__main__":
    from titanlike.cli import start_job

    start_job(f"sweep_jobs:{sys.argv.pop(1)}")
