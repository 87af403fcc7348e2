"""report.html: runs as one static page, without a server or a network. Written when a run ends, and by
`python tools/report.py RUN [RUN ...]`, which lays several over each other.

The page holds its data, style and script (report_page.html); the script draws them in the browser.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files as package_files
from pathlib import Path

from titanlike.config import files
from titanlike.config.program import program
from titanlike.metrics.run_history import CURVES, RunHistory, read_history

FILE = "report.html"
_POINTS = 1_000  # of a curve, of few runs
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
