"""Print the table of docs/proof.md: what a step costs the host, compared with a plain loop.

python docs/measure_host_time.py  (about five minutes; a model so small that the host is the limit)
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> None:
    from benchmarks.speed.bench import bench
    from support.models import tiny
    from support.world import run_world
    from titanlike.core.config.groups.computation import Fsdp
    from titanlike.core.config.groups.pipeline import Schedule

    layouts = {
        "one process": tiny(1, 1),
        "`pp=2`": tiny(2, 1),
        "`dp=2 fsdp.zero=1`": tiny(1, 2, fsdp=Fsdp(1)),
        "`dp=2`": tiny(1, 2),
        "`pp=2 dp=2`": tiny(2, 2),
    }
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        "| layout | microbatches | titanlike | plain loop | ratio | overhead per schedule action |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, layout in layouts.items():
        for microbatches in (16, 64):
            config = replace(layout, schedule=Schedule("1f1b", microbatches))
            config = replace(config, batch_size=2 * microbatches * layout.dp)
            with tempfile.TemporaryDirectory() as folder:
                figures = run_world(bench, config, Path(folder), timeout=600)[0]
            each = [
                figures[key] / microbatches * 1e3 for key in ("cpu_seconds", "plain_cpu_seconds")
            ]
            more = figures["cpu_more_seconds"] / figures["computations"] * 1e6
            cells = (f"{each[0]:.2f} ms", f"{each[1]:.2f} ms", f"{figures['cpu_ratio']:.3f}")
            print(
                f"| {name} | {microbatches} |", " | ".join(cells), f"| {more:.0f} us |", flush=True
            )


if __name__ == "__main__":
    main()
