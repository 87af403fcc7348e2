"""What rank 0 prints and writes: console, metrics.jsonl, events.jsonl, result.json, W&B, TensorBoard.

Imports config alone.
"""
