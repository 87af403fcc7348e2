"""Parallelism inside a stage: mesh, FSDP, tied weights, batch norms, initial weights.

May import data, launch, metrics, config and torch_private.
"""
