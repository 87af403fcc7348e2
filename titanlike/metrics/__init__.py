"""Output of rank 0: console, metrics.jsonl, events.jsonl, result.json, report, W&B, TensorBoard.

May import only config.
"""
