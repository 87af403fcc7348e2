"""`python -m titanlike [COMMAND] ...`: the same as `titanlike`."""

import os
import sys

if __name__ == "__main__":
    here, root = os.getcwd(), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path[0] == here != root:  # its files must not shadow libraries: see cli.start_job
        del sys.path[0]
    from titanlike.cli import run

    run()
