"""`titanlike timeline RUN [RUN]`: what a run did, beside what its plan says. Starts nothing."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.config.errors import ConfigError
from titanlike.config.program import program
from titanlike.driver.report import print_problems

if TYPE_CHECKING:
    from titanlike.costs.timeline_report import TimelineReport

_DESCRIPTION = (
    "Prints the timeline that a run has recorded (timeline=true) beside its plan: what each rank "
    "computed and waited for, how heavy stages are, and what would make the step shorter. Several "
    "runs are compared."
)


def main(argv: list[str]) -> int:
    """The exit code: 0; 2 where a run has no timeline."""
    parser = argparse.ArgumentParser(
        prog=shlex.join(program()), description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object a run")
    flags = parser.parse_args(argv)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the user's models
    from titanlike.costs.timeline_report import report_of
    from titanlike.costs.timeline_text import as_data, as_text

    reports: list[tuple[str, TimelineReport]] = []
    for run in flags.runs:
        try:
            reports.append((str(run), report_of(run)))
        except ConfigError as error:
            return print_problems(error.problems)
    if flags.json:
        for _, report in reports:
            print(json.dumps(as_data(report)))
    else:
        print(as_text(reports, max(60, shutil.get_terminal_size().columns)))
    return 0
