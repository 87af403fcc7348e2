"""report.html: runs as one static page, without a server or a network. Written when a run ends, and by
`python tools/report.py RUN [RUN ...]`, which lays several over each other.

What is damaged or missing is left out: of a run that still goes on, too. The page holds its data, style and script (report_page.html); the script draws them in the browser.
"""

from __future__ import annotations

import argparse
import itertools
import math
import mmap
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.config.program import program
from titanlike.metrics.run_files import STARTS, changed_keys, flat, read_result
from titanlike.metrics.summary import parse_records

FILE = "report.html"
_POINTS = 1_000  # of a curve
_ALL_POINTS = 4_000  # of one quantity, of all runs
MOST_RUNS = 40


def write_report(run_dir: Path) -> Path:
    """The page of a run that has ended, quickly."""
    path = run_dir / FILE
    files.atomic_write_text(path, page([read_history(run_dir, _POINTS, quick=True)]))
    return path


def page(runs: Sequence[RunHistory]) -> str:
    data = {
        "titles": CURVES,
        "written": time.time(),
        "runs": [asdict(run) for run in runs],
        "differences": differences(runs),
    }
    # "<" could end the script element, or begin a comment in it
    text = files.dumps(data).replace("<", "\\u003c")
    template = package_files("titanlike.metrics").joinpath("report_page.html").read_text("utf-8")
    return template.replace("@DATA@", text)


def differences(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    """Key -> its value in each run, of the keys in which they differ, but for where they write."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = {key: [run.config.get(key, "unset") for run in runs] for key in keys}
    return {key: row for key, row in rows.items() if len({*row}) > 1 and key != "run_dir"}


def main(argv: list[str]) -> int:
    """tools/report.py; the exit code: 2 for a folder that is no run's."""
    parser = argparse.ArgumentParser(
        prog=shlex.join(program()),
        description="Write a run's curves, events, configuration, layout and samples as one page, also "
        "while it runs; several runs are laid over each other.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run_dir")
    parser.add_argument("--out", type=Path, help=f"the page (RUN/{FILE}; of several runs ./{FILE})")
    arguments = parser.parse_args(argv)
    folders: list[Path] = arguments.runs
    out = arguments.out or (folders[0] / FILE if len(folders) == 1 else Path(FILE))
    try:
        if len(folders) > MOST_RUNS:
            raise ValueError(f"{len(folders)} runs are too many for a page: at most {MOST_RUNS}")
        points = min(_POINTS, _ALL_POINTS // len(folders))
        files.atomic_write_text(out, page([read_history(folder, points) for folder in folders]))
    except (OSError, ValueError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"written: {out}")
    return 0


CURVES = {  # key of a record -> title
    "loss": "loss",
    "val_loss": "validation loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens/s",
    "memory_bytes": "memory",
}
_SAVES = ("saved", "saved_model")
QUICK = 4 << 20  # bytes of metrics.jsonl that are parsed in a tenth of a second
_RECORD = 4 << 10  # bytes, more than a record has
_EVENTS = 300  # of each kind: saves, and others
_SAMPLES = 40
_STARTS = 100
_TEXT = 4_000  # characters of a sample


@dataclass(frozen=True)
class RunHistory:
    """All of it can be written as JSON."""

    name: str
    folder: str
    result: dict[str, Any]  # of result.json; {} of a run that has not ended
    last: dict[str, Any]  # newest record
    curves: dict[str, list[list[float | None]]]  # name -> points (step, tokens, value; None: nan)
    sampled: bool  # whether not all records were read
    events: list[dict[str, Any]]
    starts: list[dict[str, Any]]  # what each changed, as "key old -> new"
    config: dict[str, str]  # of the newest start
    layout: dict[str, Any]  # its mesh and stages; {} where it is not known
    samples: list[dict[str, Any]]


def read_history(run_dir: Path, points: int = _POINTS, quick: bool = False) -> RunHistory:
    """quick: of a long run read evenly spaced records, not all; every validation is read.

    Raises FileNotFoundError where no run has written anything.
    """
    starts = [*_lines(run_dir / STARTS, b'"config"')]
    metrics = run_dir / "metrics.jsonl"
    if not (starts or metrics.exists() or (run_dir / "config.yaml").exists()):
        raise FileNotFoundError(f"{run_dir} is no run's directory: it has no metrics.jsonl")
    sampled = quick and metrics.exists() and metrics.stat().st_size > QUICK
    records = _spread_records(metrics, points) if sampled else [*_lines(metrics)]
    newest = starts[-1] if starts else {}
    return RunHistory(
        name=run_dir.resolve().name,
        folder=str(run_dir),
        result=_result(run_dir),
        last=records[-1] if records else {},
        curves={name: found for name in CURVES if (found := thinned(records, name, points))},
        sampled=sampled,
        events=_events(run_dir / "events.jsonl"),
        starts=_starts(starts),
        config=flat(_object(newest.get("config"))),
        layout=_object(newest.get("layout")),
        samples=_samples(run_dir / "samples.jsonl"),
    )


def thinned(records: list[dict[str, Any]], name: str, most: int) -> list[list[float | None]]:
    """At most `most` points of a curve: the first, the last, and the lowest and highest of each of
    equal parts, so that no spike disappears."""
    found = [record for record in records if _is_number(record.get(name))]
    each = math.ceil(len(found) / max(1, (most - 2) // 2))
    kept = found
    if len(found) > most:
        kept = [found[0]]
        for begin in range(0, len(found), each):
            part = found[begin : begin + each]
            # nan is higher than any number: a part that has one shows it
            heights = [math.inf if math.isnan(r[name]) else r[name] for r in part]
            ends = {heights.index(min(heights)), heights.index(max(heights))}
            kept += [part[index] for index in sorted(ends)]
        kept.append(found[-1])
    return [[r["step"], _finite(r.get("tokens")), _finite(r[name])] for r in kept]


def _finite(value: Any) -> float | None:
    """With six digits, which a curve shows."""
    if not _is_number(value) or not math.isfinite(value):
        return None
    return value if type(value) is int else float(f"{value:.6g}")


def _time(record: dict[str, Any]) -> float | None:
    return record["time"] if _finite(record.get("time")) is not None else None


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < files.LARGEST)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:_TEXT] if isinstance(value, str) else ""


def _result(run_dir: Path) -> dict[str, Any]:
    try:
        return read_result(run_dir) or {}
    except (OSError, ValueError):
        return {}


def _lines(path: Path, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """The records of a JSONL file whose line has these bytes; of no file, none."""
    try:
        with files.open_regular(path) as file:
            yield from parse_records(line for line in file if having in line)
    except OSError:
        return


def _spread_records(path: Path, count: int) -> list[dict[str, Any]]:
    """Records at equal distances in the file, the last one, and those that validated."""
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            begins = {_line_start(text, at * size // count) for at in range(count)}
            begins.add(_line_start(text, text.rfind(b"\n", 0, size - 1)))
            at, step = text.find(b'"val_loss"'), 1
            while at >= 0:  # with rare ones each, else as many as curves have points
                begins.add(text.rfind(b"\n", 0, at) + 1)
                step = max(1, size // (4 * count))
                at = text.find(b'"val_loss"', at + step)
            lines = (text[begin : begin + _RECORD].partition(b"\n")[0] for begin in sorted(begins))
            return [*parse_records(lines)]


def _line_start(text: mmap.mmap, near: int) -> int:
    return 0 if near <= 0 else text.find(b"\n", near) + 1


def _events(path: Path) -> list[dict[str, Any]]:
    """Few saves, and the newest of the others."""
    saves: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for event in _lines(path):
        kind = event.get("event")
        if isinstance(kind, str):
            shown = {"step": event["step"], "event": kind, "text": _event_text(event)}
            shown["time"] = _time(event)
            (saves if kind in _SAVES else others).append(shown)
    saves = saves[:: math.ceil(len(saves) / _EVENTS) or 1]
    return sorted([*saves, *others[-_EVENTS:]], key=lambda event: event["step"])


def _event_text(event: dict[str, Any]) -> str:
    if text := _text(event.get("text")):
        return text
    if event["event"] == "stop":
        return f"by {event.get('by')}"
    return _text(event.get("path"))


def _starts(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = []
    for before, start in itertools.pairwise([None, *starts]):
        assert start is not None  # the first alone has none before it
        overrides = start.get("overrides")
        changed = before and changed_keys(_object(before.get("config")), _object(start["config"]))
        shown.append(
            {
                "time": _time(start),
                "step": start["step"],
                "host": _text(start.get("host")),
                "overrides": [*map(str, overrides)] if isinstance(overrides, list) else [],
                "versions": {k: str(v) for k, v in _object(start.get("versions")).items()},
                "changed": changed or [],
            }
        )
    return shown[-_STARTS:]


def _samples(path: Path) -> list[dict[str, Any]]:
    return [
        {"step": row["step"], "prompt": _text(row.get("prompt")), "text": _text(row.get("text"))}
        for row in deque(_lines(path), maxlen=_SAMPLES)
    ]
