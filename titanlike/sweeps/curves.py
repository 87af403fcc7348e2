"""The loss curves of jobs, thinned out for a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from titanlike.metrics.summary import parse_records
from titanlike.sweeps.job_status import JobRow

_BINS = 60  # points of a smoothed curve, each the mean of its neighbours


@dataclass
class Curve:
    """The points of a job that are drawn; all losses are finite."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    val_steps: list[int] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    diverged: bool = False  # a loss was not finite


def read_curve(run_dir: Path, most: int) -> Curve:
    """At most about `most` steps of a run, and as many validations."""
    try:
        lines = (run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:  # the run is being restarted
        return Curve()
    stride = -(-len(lines) // most) or 1
    chosen = [line for i, line in enumerate(lines) if (len(lines) - 1 - i) % stride == 0 or i == 0]
    curve = Curve()
    for record in parse_records(chosen):
        loss = record.get("loss")
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            curve.steps.append(record["step"])
            curve.losses.append(loss)
        else:
            curve.diverged = True
    validated = [line for line in lines if b'"val_loss"' in line]
    for record in parse_records(validated[-1 :: -(-len(validated) // most) * -1 or -1]):
        loss = record.get("val_loss")
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            curve.val_steps.insert(0, record["step"])
            curve.val_losses.insert(0, loss)
    return curve


def smooth(curve: Curve) -> Curve:
    """Means of neighbours; the first point is unchanged."""
    size = -(-len(curve.steps) // _BINS)
    if size < 2:
        return curve
    cuts = [0, *range(1, len(curve.steps), size), len(curve.steps)]
    spans = list(zip(cuts, cuts[1:], strict=False))
    steps = [curve.steps[end - 1] for _, end in spans]
    losses = [sum(curve.losses[start:end]) / (end - start) for start, end in spans]
    return replace(curve, steps=steps, losses=losses)


def coinciding(rows: list[JobRow], curves: dict[int, Curve]) -> dict[int, int]:
    """Job number -> how many curves hide its own.

    Layouts of one model have the same losses: those below are drawn wider, so that all are seen.
    """
    hidden = {}
    for i, row in enumerate(rows):
        own = dict(zip(curves[row.job.number].steps, curves[row.job.number].losses, strict=True))
        hidden[row.job.number] = 0
        for above in rows[i + 1 :]:
            other = curves[above.job.number]
            pairs = [
                abs(own[step] - loss) / (abs(loss) or 1)
                for step, loss in zip(other.steps, other.losses, strict=True)
                if step in own
            ]
            hidden[row.job.number] += bool(pairs) and max(pairs) <= 1e-3
    return hidden
