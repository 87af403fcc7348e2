"""Output of rank 0: console, metrics.jsonl, events.jsonl, result.json.

May import only config.
"""
