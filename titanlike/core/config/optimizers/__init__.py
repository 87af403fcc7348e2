"""The built-in optimizers, a file each: what one is, from its keys to its arithmetic.

Each file has one class, an `Optimizer` (`titanlike/core/config/optimizer.py`) whose `name` is the file's.
"""
