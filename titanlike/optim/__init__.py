"""Losses, optimizers, the learning rate, and the state that a rank trains of a stage.

May import graph, parallel, data, launch, metrics, config and torch_private.
"""
