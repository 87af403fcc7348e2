"""Training data: text, token files, random tokens or a user's own, read in the run's global order.

Imports launch, metrics, config and torch_private; no other room.
"""
