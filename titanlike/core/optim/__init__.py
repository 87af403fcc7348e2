"""Losses, optimizers, the learning rate and gradient norms.

May import graph, data, launch, metrics, config and torch_private.
"""
