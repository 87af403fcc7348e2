"""Goodput: the share of a run's wall time spent in new training steps, and where the rest went.

Computed from the run's files, without importing torch. Seconds by kind, summed over all launches:

steps      the records of metrics.jsonl whose work was kept, without waiting for data; the first
           step of a launch counts at most as the median step
redone     steps after the checkpoint that a launch resumed from, which were trained again
start      from the begin of a launch to its first batch: processes, build, compiling, loading
first_step time of a launch's first step beyond the median: kernels, memory allocation
data       training waits for the next batch, on the rank that waits longest
save       training stalls for saves, including the full duration of a launch's final save
down       from the last trace of a launch to the begin of the next: hang, failure, queue; time
           after a launch that completed all steps is in no kind and not in the total
other      everything else: validation, samples, shutdown
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from titanlike.core.metrics.run_files import STARTS
from titanlike.core.metrics.summary import is_number, jsonl_records

KINDS = ("steps", "redone", "start", "first_step", "data", "save", "down", "other")
_SLOW = 0.05  # share of waiting for data above which more loader processes are suggested
_MOST = 256 << 20  # bytes; reading a larger metrics.jsonl would delay the end of a run


def goodput(run_dir: Path, end: float | None = None) -> dict[str, float] | None:
    """Seconds by KINDS, "total" and "share" (of new steps); None if no step or no launch is
    recorded.

    end: of the run, in seconds since the epoch; None = its last record or event.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_size > _MOST:
        return None
    needed = "time", "step_seconds"
    records = [r for r in jsonl_records(metrics) if all(is_number(r, key) for key in needed)]
    starts = [s for s in jsonl_records(run_dir / STARTS, b"time") if is_number(s, "time")]
    events = [e for e in jsonl_records(run_dir / "events.jsonl", b"time") if is_number(e, "time")]
    if not records or not starts:
        return None
    data = {id(r): min(r["step_seconds"], r.get("data_seconds", 0.0)) for r in records}
    compute = {id(r): r["step_seconds"] - data[id(r)] for r in records}
    usual = statistics.median(compute.values())
    seconds = dict.fromkeys(KINDS, 0.0)
    seconds["save"] = sum(r.get("save_stall_seconds", 0.0) for r in records)
    ended = [e.get("step") for e in events if e.get("event") == "data_end"]
    redone = [e for e in events if e.get("event") == "redone" and is_number(e, "seconds")]
    went_on = {e["step"] for e in redone}  # steps whose save did not end a launch
    saves = [
        e
        for e in events
        if e.get("event") in ("saved", "saved_model") and is_number(e, "seconds")
        if e["step"] not in went_on
    ]
    seconds["redone"] = sum(event["seconds"] for event in redone)
    traces = sorted([*(r["time"] for r in records), *(e["time"] for e in events)])
    last = end if end is not None else max([*traces, starts[-1]["time"]])
    launches = [
        (min(s["began"] if is_number(s, "began") else s["time"], s["time"]), s["time"])
        for s in [*starts, {"time": last}]
    ]
    first = previous = launches[0][0]
    pauses, complete, step = 0.0, False, 0  # seconds after completion; of the latest launch
    for start, ((began, opened), (following, _)) in zip(starts, pairwise(launches), strict=True):
        began = max(began, previous)
        if complete:
            pauses, previous = pauses + began - previous, began
        lost = sum(e["seconds"] for e in redone if began <= e["time"] < following)
        seconds["down"] += max(0.0, began - previous - lost)
        done = [r for r in records if opened <= r["time"] <= following]
        if done:
            excess = max(0.0, compute[id(done[0])] - usual)
            seconds["first_step"] += excess
            seconds["steps"] += sum(compute[id(r)] for r in done) - excess
            seconds["start"] += max(0.0, done[0]["time"] - compute[id(done[0])] - began)
            seconds["data"] += sum(data[id(r)] for r in done[1:])
            ends = done[-1]["step"], done[-1]["time"]  # no record has the stall of the final save
            saved = [e for e in saves if e["step"] == ends[0] and ends[1] <= e["time"] <= following]
            seconds["save"] += sum(e["seconds"] for e in saved)
        previous = max([opened, *(t for t in traces if opened <= t < following)])
        step, config = (done[-1]["step"] if done else step), start.get("config")
        complete = isinstance(config, dict) and (config.get("steps") == step or step in ended)
    total = max(last - first - pauses, sum(seconds.values()), 1e-9)
    seconds["other"] = total - sum(seconds.values())
    return {**seconds, "total": total, "share": seconds["steps"] / total}


def goodput_text(seconds: Any) -> str:
    """Format a result of `goodput`: "83.1% of 1234 s in new steps; start 9.1%, save 4.0%, other
    3.8%". Return "" for anything else."""
    if not isinstance(seconds, dict) or not all(is_number(seconds, k) for k in (*KINDS, "total")):
        return ""
    rest = [
        (k, seconds[k] / seconds["total"])
        for k in KINDS[1:]
        if seconds[k] >= 0.001 * seconds["total"]
    ]
    shares = ", ".join(
        f"{kind.replace('_', ' ')} {share:.1%}" for kind, share in sorted(rest, key=lambda x: -x[1])
    )
    steps = f"{seconds['steps'] / seconds['total']:.1%} of {seconds['total']:.0f} s in new steps"
    if seconds["data"] > _SLOW * seconds["total"]:
        shares += " (raise data.workers: training waits for its data)"
    return f"{steps}; {shares}" if shares else steps
