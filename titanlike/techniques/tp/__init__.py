"""Tensor parallelism: each rank of the tp axis has a shard of every layer.

A plan (`plan.py`) names modules and how each is sharded (`styles.py`). Modules hold plain tensors,
this rank's shard of each parameter, and run collectives around their forwards: all else, from FSDP
to the optimizer, sees a smaller model.
"""
