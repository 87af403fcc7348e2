"""What planning a save costs rank 0: `python tools/bench_checkpoint_plan.py --ranks 1024`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.proof.benchmark_plan import main  # noqa: E402

if __name__ == "__main__":
    main()
