"""Training data in the run's global order: loaders, random tokens, a user's own; files are read in formats/.

Imports launch, metrics, config and torch_private; no other room.
"""
