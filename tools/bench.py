"""Measure a command line: `python tools/bench.py pp=2 dp=2` takes train.py's overrides.

Tokens/s, step time, peak memory a rank, time to the first step; and beside it, in the same run, a
plain torch loop of the same model and batch in one process.
"""

from titanlike.cli import main

if __name__ == "__main__":
    main("titanlike.benchmark:bench")
