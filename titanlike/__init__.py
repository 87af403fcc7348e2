"""titanlike: train a model on a declared mesh. Start reading at `build.py` and `training.py`."""

__version__ = "0.1.0"
