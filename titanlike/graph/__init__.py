"""A model's forward: recorded on meta, cut into stages, generated as each stage's forward.

Imports data, launch, metrics, config, torch_private and what is below them; no other room.
"""
