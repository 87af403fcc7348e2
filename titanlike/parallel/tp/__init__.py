"""Tensor parallelism: the ranks of the tp axis have a part of every layer each.

A plan (`plan.py`) names modules and how each is divided (`styles.py`). Modules hold plain tensors, this
rank's part of each parameter (`part.py`), and exchange activations around their forwards
(`collectives.py`). So all else, from FSDP to the optimizer, sees a smaller model.
"""
