"""Directories of sweeps, written by what a run writes them with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from titanlike.core.metrics.run_files import write_result
from titanlike.core.metrics.sinks import JsonlSink
from titanlike.run.sweep import JobRow, SweepRun, add_job


def a_sweep(folder: Path, *jobs: list[str]) -> None:
    """A directory with the jobs of a sweep, none of which has begun."""
    folder.mkdir(exist_ok=True)
    for number, overrides in enumerate(jobs):
        add_job(folder, number, overrides)


def rows(folder: Path, value: str = "loss", inner: str = "") -> list[JobRow]:
    return SweepRun(folder, value=value, inner=inner).rows()


def log(run_dir: Path, records: list[dict[str, Any]], start: int = 0) -> Path:
    """metrics.jsonl of a run that goes on from step `start`."""
    sink = JsonlSink(run_dir / "metrics.jsonl", start)
    for record in records:
        sink.log(record)
    sink.close("completed")
    return run_dir / "metrics.jsonl"


def steps(count: int, level: float = 2.0, speed: float = 1e4, val_every: int = 10) -> list[dict]:
    """Records of steps 1 to `count`, whose last loss is about `level`."""
    records = []
    for step in range(1, count + 1):
        record = {
            "step": step,
            "loss": level + 3 * math.exp(-step / 8),
            "grad_norm": 1.0,
            "tokens_per_second": speed if step > 1 else speed / 50,  # the first compiles
            "step_seconds": 2048 / speed,
            "memory_bytes": 400 << 20,
        }
        if val_every and step % val_every == 0:
            record["val_loss"] = record["loss"] + 0.125
        records.append(record)
    return records


def done(run_dir: Path, status: str = "completed", error: str | None = None, **fields: Any) -> None:
    """result.json, as the driver leaves it."""
    result = {"value": None, "seconds": 12.5, "overrides": [], **fields}
    write_result(run_dir, status=status, error=error, **result)


def config(run_dir: Path) -> None:
    """config.yaml of a run that has begun."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text("defaults:\n- _self_\npp: 1\n")


def every_status(folder: Path) -> None:
    """Twelve jobs, of which each came to another end."""
    schedules = ("gpipe", "1f1b", "interleaved1f1b")
    jobs = [
        ["steps=40", f"schedule={schedules[n // 4]}", f"pp={1 + n // 2 % 2}", f"seed={n % 2}"]
        for n in range(12)
    ]
    a_sweep(folder, *jobs)
    for number in (0, 1, 2, 11):
        log(folder / str(number), steps(40, 2 + number / 7, 1e4 + number))
        done(folder / str(number), value=2.5 + number, overrides=jobs[number])
    losses = steps(15)
    losses[-1]["loss"] = math.nan
    log(folder / "3", losses)
    done(folder / "3", "failed", "the loss of step 15 is nan\nlower optimizer.lr")
    done(folder / "4", "invalid", "pp=2: the model has 1 layer; write pp=1")
    log(folder / "5", steps(20))
    done(folder / "5", "stopped", "stopped early by SIGTERM, with a checkpoint")
    log(folder / "6", steps(7))
    done(folder / "6", "interrupted", "SIGINT (Ctrl-C)")
    log(folder / "7", steps(30))
    done(
        folder / "7",
        "failed",
        "rank 1 failed: killed by SIGKILL; often by the kernel's out-of-memory killer",
    )
    config(folder / "8")
    log(folder / "8", steps(25))
    # and no result: the machine went down
    config(folder / "9")
    log(folder / "9", steps(12))


STATUSES = [
    *("completed", "completed", "completed", "failed", "invalid", "stopped"),
    *("interrupted", "killed", "killed", "running", "waiting", "completed"),
]
