"""Declarative pretraining on a mesh of ranks. Start reading at `cli.py`, then `training/loop.py`."""

__version__ = "0.1.0"
