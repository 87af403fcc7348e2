"""Inspect and convert checkpoints: `python tools/checkpoint.py list RUN`, `show`, `verify`, `compare A B`,
`consolidate CHECKPOINT FILE.safetensors`, `restore FILE.safetensors FOLDER`; --help says more.

Local paths and URLs that fsspec knows. Exit code 1 where something is damaged or differs, 2 where
the command is wrong. Nothing that is in a checkpoint is ever run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import main  # noqa: E402

if __name__ == "__main__":
    main("checkpoint")
