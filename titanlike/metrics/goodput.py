"""Goodput: the share of a run's wall time that was spent in new training steps, and where the rest
went. Read from the run's own files; imports no torch.

Seconds of each kind, of all launches of the run together:

steps      of the records of metrics.jsonl, whose work the run still has; of the first of a launch
           what a later one takes
redone     steps after the checkpoint that a launch resumed from, which were done again
start      from a launch's begin to its first batch: processes, build, compiled blocks, loading
first_step what the first step of a launch takes longer than the median: kernels, memory
data       training waits for the next batch, on the rank that waits longest
save       stalls of training by saves; all of the save that a launch ends with, for which it waits
down       from the last trace of a launch to the begin of the next: hang, failure, queue; the time
           after a launch that had done all its steps is of no kind, and not of the total
other      all else: validation, samples, the end
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from titanlike.metrics.run_files import STARTS
from titanlike.metrics.summary import is_number, jsonl_records

KINDS = ("steps", "redone", "start", "first_step", "data", "save", "down", "other")
_SLOW = 0.05  # of a run that waited for its data: more loader processes would help
_MOST = 256 << 20  # bytes of metrics.jsonl: reading more would delay the end of a run


def goodput(run_dir: Path, end: float | None = None) -> dict[str, float] | None:
    """Seconds by KINDS, "total" and "share"; None where nothing was trained, or no launch recorded.

    end: of the run, in seconds since the epoch; None = its last trace.
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
    own = {id(r): r["step_seconds"] - data[id(r)] for r in records}
    usual = statistics.median(own.values())
    seconds = dict.fromkeys(KINDS, 0.0)
    seconds["save"] = sum(r.get("save_stall_seconds", 0.0) for r in records)
    ended = [e.get("step") for e in events if e.get("event") == "data_end"]
    redone = [e for e in events if e.get("event") == "redone" and is_number(e, "seconds")]
    went_on = {e["step"] for e in redone}  # after the save of these steps, which are the newest
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
    pauses, complete, step = 0.0, False, 0  # of launches so far: after all steps, the last one's
    for start, ((began, opened), (following, _)) in zip(starts, pairwise(launches), strict=True):
        began = max(began, previous)
        if complete:
            pauses, previous = pauses + began - previous, began
        lost = sum(e["seconds"] for e in redone if began <= e["time"] < following)
        seconds["down"] += max(0.0, began - previous - lost)
        done = [r for r in records if opened <= r["time"] <= following]
        if done:
            excess = max(0.0, own[id(done[0])] - usual)
            seconds["first_step"] += excess
            seconds["steps"] += sum(own[id(r)] for r in done) - excess
            seconds["start"] += max(0.0, done[0]["time"] - own[id(done[0])] - began)
            seconds["data"] += sum(data[id(r)] for r in done[1:])
            ends = done[-1]["step"], done[-1]["time"]  # the stall of its save is in no record
            saved = [e for e in saves if e["step"] == ends[0] and ends[1] <= e["time"] <= following]
            seconds["save"] += sum(e["seconds"] for e in saved)
        previous = max([opened, *(t for t in traces if opened <= t < following)])
        step, config = (done[-1]["step"] if done else step), start.get("config")
        complete = isinstance(config, dict) and (config.get("steps") == step or step in ended)
    total = max(last - first - pauses, sum(seconds.values()), 1e-9)
    seconds["other"] = total - sum(seconds.values())
    return {**seconds, "total": total, "share": seconds["steps"] / total}


def goodput_text(found: Any) -> str:
    """83.1% of 1234 s in new steps; start 9.1%, save 4.0%, other 3.8%. "" for what `goodput` has
    not returned."""
    found = {"data": 0.0} | found if isinstance(found, dict) else found  # of an earlier version
    if not isinstance(found, dict) or not all(is_number(found, k) for k in (*KINDS, "total")):
        return ""
    rest = [(k, found[k] / found["total"]) for k in KINDS[1:] if found[k] >= 0.001 * found["total"]]
    shares = ", ".join(
        f"{kind.replace('_', ' ')} {share:.1%}" for kind, share in sorted(rest, key=lambda x: -x[1])
    )
    steps = f"{found['steps'] / found['total']:.1%} of {found['total']:.0f} s in new steps"
    if found["data"] > _SLOW * found["total"]:
        shares += " (raise data.workers: training waits for its data)"
    return f"{steps}; {shares}" if shares else steps
