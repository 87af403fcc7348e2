"""report.html: runs as one static page, without server or network.

Written when a run ends, and by `titanlike report RUN [RUN ...]`, which overlays several runs.
Damaged or missing files are skipped, so running jobs can be shown. The page contains its data,
style and script (report_page.html), which draws in the browser.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.core.config import files
from titanlike.core.metrics import summary
from titanlike.core.metrics.goodput import goodput_text
from titanlike.core.metrics.run_files import STARTS, changed_keys, flat, read_result

if TYPE_CHECKING:
    from titanlike.watch.chart import Chart

FILE = "report.html"
MOST_RUNS = 40
CURVES = {  # key of a record -> title
    "loss": "loss",
    "val_loss": "validation loss",
    "val_loss_ema": "validation loss of the average",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "step_seconds": "step time",
    "mfu": "MFU",
    "memory_bytes": "memory",
}
QUICK = 4 << 20  # bytes of metrics.jsonl, parsed in about 0.1 s
# limits of a page:
_POINTS = 1_000  # points of a curve
_ALL_POINTS = 4_000  # points of one metric over all runs
_PARTS = 32  # curves from lists and dicts
_EVENTS = 300  # saves; and as many other events
_SAMPLES = 40
_STARTS = 100
_SPANS = 6_000  # in a picture
_DRAWN_RUNS = 4  # runs; with more, pictures are omitted
_TEXT = 4_000  # characters in a sample


ChartsOf = Callable[[Path, dict[str, Any]], "Iterable[Chart]"]  # (run_dir, layout) -> charts


def write_reports(
    out: Path,
    runs: Sequence[Path],
    charts_of: ChartsOf | None = None,
    quick: bool = False,
    planned_goodput: Callable[[Path], str] | None = None,
) -> Path:
    """Write the page of one run, or of several overlaid, to `out`.

    runs: their directories. charts_of: makes a run's charts; not called for more than `_DRAWN_RUNS`
    runs. quick, planned_goodput: see `read_history`. Raises ValueError for more than MOST_RUNS, FileNotFoundError as
    `read_history` does.
    """
    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs are too many for a page: at most {MOST_RUNS}")
    points = min(_POINTS, _ALL_POINTS // len(runs))
    charts_of = charts_of if len(runs) <= _DRAWN_RUNS else None
    histories = [read_history(run, points, quick, charts_of, planned_goodput) for run in runs]
    files.atomic_write_text(out, page(histories))
    return out


def page(runs: Sequence[dict[str, Any]]) -> str:
    """Render the HTML page of runs, as `read_history` returns them."""
    # the keys in which the runs differ, except run_dir
    values = {
        key: [run["config"].get(key, "unset") for run in runs]
        for key in dict.fromkeys(key for run in runs for key in run["config"])
        if key != "run_dir"
    }
    data = {
        "titles": CURVES | {n: n for run in runs for n in run["curves"] if n not in CURVES},
        "written": time.time(),
        "runs": runs,
        "differences": {key: row for key, row in values.items() if len({*row}) > 1},
    }
    # "<" could end the script element or begin a comment in it
    text = files.dumps(data).replace("<", "\\u003c")
    template = package_files("titanlike.watch").joinpath("report_page.html").read_text("utf-8")
    return template.replace("@DATA@", text)


def read_history(
    run_dir: Path,
    points: int = _POINTS,
    quick: bool = False,
    charts_of: ChartsOf | None = None,
    planned_goodput: Callable[[Path], str] | None = None,
) -> dict[str, Any]:
    """Read what the page shows of a run.

    quick: read only evenly spaced records of a long run, and all validations. charts_of: makes its
    charts; planned_goodput: says what goodput was to be expected, beside the run's own. Raises FileNotFoundError if run_dir has no run's files.
    """
    starts = [*summary.jsonl_records(run_dir / STARTS, b'"config"')]
    metrics = run_dir / "metrics.jsonl"
    if not (starts or metrics.exists() or (run_dir / "config.yaml").exists()):
        raise FileNotFoundError(f"{run_dir} is no run's directory: it has no metrics.jsonl")
    sampled = quick and metrics.is_file() and metrics.stat().st_size > QUICK
    records = _spread_records(metrics, points) if sampled else [*summary.jsonl_records(metrics)]
    records = [*map(summary.flat_record, records)]
    parts = sorted({name for record in records for name in record if "/" in name})
    newest = starts[-1] if starts else {}
    custom = _object(_object(_object(newest.get("config")).get("metrics")).get("own"))
    parts = [name for each in custom for name in (each, f"val_{each}")] + parts
    try:
        result = read_result(run_dir) or {}
    except (OSError, ValueError):
        result = {}
    goodputs = [goodput_text(result.get("goodput"))]
    goodputs += [planned_goodput(run_dir)] if planned_goodput and goodputs[0] else []
    layout = _object(newest.get("layout"))
    charts = [*charts_of(run_dir, layout)] if charts_of else []
    samples = deque(summary.jsonl_records(run_dir / "samples.jsonl"), maxlen=_SAMPLES)
    return {
        "name": run_dir.resolve().name,
        "folder": str(run_dir),
        "result": result,  # {} if the run has not ended
        "last": records[-1] if records else {},
        "summary": asdict(summary.summarize(run_dir)),
        "logged": _link(run_dir / "wandb" / "run_url"),
        # name -> points (step, tokens or samples, value; None for nan)
        "curves": {
            name: curve
            for name in (*CURVES, *parts[:_PARTS])
            if (curve := _thinned(records, name, points))
        },
        "sampled": sampled,  # whether some records were skipped
        "events": _events(run_dir / "events.jsonl"),
        "starts": _starts(starts),
        "config": flat(_object(newest.get("config"))),
        "goodput": "; ".join(text for text in goodputs if text),
        "layout": {key: value for key, value in layout.items() if key not in ("order", "place")},
        "charts": [*map(_chart, charts)],
        "samples": [
            {"step": s["step"], "prompt": _text(s.get("prompt")), "text": _text(s.get("text"))}
            for s in samples
        ],
    }


def _chart(chart: Chart) -> dict[str, Any]:
    """Convert a chart to plain data, times as fractions of its length. With too many spans only the
    title is kept."""
    from titanlike.watch.chart import KINDS  # unneeded for a page without charts

    fits, total = sum(map(len, chart.rows)) <= _SPANS, chart.seconds or 1.0
    rows = [
        [[*span[:3], round(span.start / total, 5), round(span.end / total, 5)] for span in row]
        for row in (chart.rows if fits else [])
    ]
    title = chart.title + ("" if fits else " (more actions than this page draws)")
    seconds = chart.seconds if chart.timed else 0.0
    return {"title": title, "first": chart.first, "rows": rows, "kinds": KINDS, "seconds": seconds}


def _link(path: Path) -> str:
    """The http(s) address in a file, "" if there is none."""
    try:
        text = files.read_text(path, _TEXT).strip()
    except (OSError, ValueError):
        return ""
    return text if text.startswith(("https://", "http://")) else ""


def _thinned(records: list[dict[str, Any]], name: str, limit: int) -> list[list[float | None]]:
    """Reduce a curve to at most `limit` points: the first, the last, and the lowest and highest of
    equal parts, so that no spike disappears."""
    points = present = [record for record in records if summary.is_number(record, name)]
    if len(present) > limit:
        size = math.ceil(len(present) / max(1, (limit - 2) // 2))
        points = [present[0]]
        for begin in range(0, len(present), size):
            part = present[begin : begin + size]
            # nan counts as the highest value, so a part that has one shows it
            heights = [math.inf if math.isnan(r[name]) else r[name] for r in part]
            ends = {heights.index(min(heights)), heights.index(max(heights))}
            points += [part[index] for index in sorted(ends)]
        points.append(present[-1])
    done = "tokens" if any("tokens" in record for record in points) else "samples"
    return [[r["step"], _finite(r, done), _finite(r, name)] for r in points]


def _finite(record: dict[str, Any], key: str) -> float | None:
    """A number rounded to six digits; None if it is missing, nan or infinite."""
    if not summary.is_number(record, key) or not math.isfinite(value := record[key]):
        return None
    return value if type(value) is int else float(f"{value:.6g}")


def _time(record: dict[str, Any]) -> float | None:
    return record["time"] if _finite(record, "time") is not None else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:_TEXT] if isinstance(value, str) else ""


def _spread_records(path: Path, count: int) -> list[dict[str, Any]]:
    """Read records evenly spaced in the file, the last one, and those with a validation loss."""
    with files.open_regular(path) as file:
        # up to a hole, of which there is none but in a file that no run has written
        size = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        if not size:
            return []
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as text:
            begins = {0, text.rfind(b"\n", 0, size - 1) + 1}
            begins |= {text.find(b"\n", part * size // count) + 1 for part in range(1, count)}
            # all validations if there are few, else about as many as a curve has points
            position = text.find(b'"val_loss"')
            while position >= 0:
                begins.add(text.rfind(b"\n", 0, position) + 1)
                position = text.find(b'"val_loss"', position + max(1, size // (4 * count)))
            ends = {begin: text.find(b"\n", begin) for begin in sorted(begins)}
            lines = (text[begin : end if end >= 0 else size] for begin, end in ends.items())
            return [*summary.parse_records(lines)]


def _events(path: Path) -> list[dict[str, Any]]:
    """Evenly spaced saves, and the newest of the other events."""
    saves: list[dict[str, Any]] = []
    others = deque[dict[str, Any]](maxlen=_EVENTS)
    for event in summary.jsonl_records(path):
        if isinstance(kind := event.get("event"), str):
            path_or_reason = f"by {event.get('by')}" if kind == "stop" else _text(event.get("path"))
            shown = {"step": event["step"], "event": kind, "time": _time(event)}
            if (
                kind == "redone"
                and summary.is_number(event, "steps")
                and summary.is_number(event, "seconds")
            ):
                path_or_reason = f"{event['steps']} steps, which took {event['seconds']:.1f} s"
            shown["text"] = _text(event.get("text")) or path_or_reason
            (saves if kind in ("saved", "saved_model") else others).append(shown)
    saves = saves[:: math.ceil(len(saves) / _EVENTS) or 1]
    return sorted([*saves, *others], key=lambda event: event["step"])


def _starts(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The changed config keys of each launch, as "key old -> new", and its host and versions."""
    shown = []
    for before, start in itertools.pairwise([{}, *starts]):
        overrides = start.get("overrides")
        changed = changed_keys(_object(before.get("config")), _object(start["config"]))
        shown.append(
            {
                "time": _time(start),
                "step": start["step"],
                "host": _text(start.get("host")),
                "overrides": [*map(str, overrides)] if isinstance(overrides, list) else [],
                "versions": {k: str(v) for k, v in _object(start.get("versions")).items()},
                "changed": changed if before else [],
            }
        )
    return shown[-_STARTS:]
