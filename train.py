"""Train: `python train.py`, `python train.py pp=2 dp=2`, `torchrun train.py ...`; see --help."""

from titanlike.cli import run

if __name__ == "__main__":
    run("train")
