"""Checkpoints: saving, loading, checking, retention, conversion.

Imports optim, data, metrics, config, torch_private; no model, pipeline or training.
"""
