"""Losses, optimizers, the learning rate, gradient norms and weight averages (EMA).

May import graph, parallel, data, launch, metrics, config and torch_private.
"""
