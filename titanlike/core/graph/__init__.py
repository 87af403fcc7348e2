"""A model's forward: recorded on meta, cut into stages, and generated as each stage's forward.

May import data, launch, metrics, config, torch_private and what is below them.
"""
