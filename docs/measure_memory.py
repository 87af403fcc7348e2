"""Print the table of docs/layouts.md: the memory that is estimated for a rank, and that it takes.

python docs/measure_memory.py  (about two minutes; live storages of the fullest rank, so exact)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> None:
    from support.memory_layouts import LAYOUTS, estimated_and_measured

    print("| layout | estimated | measured | ratio |\n| --- | --- | --- | --- |")
    for name, config in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            expected, taken = estimated_and_measured(config, Path(folder))
        sizes = f"{expected / 2**20:.1f} MiB | {taken / 2**20:.1f} MiB"
        print(f"| {name} | {sizes} | {expected / taken:.3f} |", flush=True)


if __name__ == "__main__":
    main()
