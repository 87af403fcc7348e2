"""What a run has recorded."""

from __future__ import annotations

from pathlib import Path

from titanlike.core.metrics.sinks import read_jsonl


def losses(run_dir: Path) -> list[float]:
    """Of each step."""
    return [row["loss"] for row in read_jsonl(run_dir / "metrics.jsonl")]


def numbers(run_dir: Path) -> list[tuple[int, float, float, float]]:
    """step, loss, grad_norm and lr of each record, which a resumed run has to the last bit."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]
