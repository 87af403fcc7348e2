"""A corpus as token ids: `python tools/tokenize_corpus.py corpus/ out/ --tokenizer tokenizer.json`.

Not tokenize.py: as a script of this folder that would stand in for the module of the standard library that
inspect and linecache import, in every other tool."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import run  # noqa: E402

if __name__ == "__main__":
    run("tokenize")
