"""Tensor parallelism: the ranks of the tp axis have a part of every layer each.

A plan (`plan.py`) names modules and how each is divided (`styles.py`). Modules hold plain tensors, this
rank's part of each parameter, and exchange activations around their forwards. So all else, from FSDP to the optimizer, sees a smaller model.
"""
