"""What a run says and keeps: console, metrics.jsonl, result.json, W&B, TensorBoard. Rank 0 only."""
