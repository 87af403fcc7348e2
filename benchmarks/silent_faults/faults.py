"""Faults as one edit of one file each: the rows of `tests/faults` and of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Fault:
    """A row. What has a `layout` makes silently wrong numbers there, and is benchmarked."""

    fault: str
    file: str
    replace: str
    by: str
    test: str = ""  # of the default suite, which fails; of the rows of tests/faults
    source: str = ""  # where it was published; "titanlike" = found here
    layout: str = ""  # overrides
    # regular expressions of what verify says, written from the edit: the module (or the parameters,
    # or the quantity) in which numbers are wrong first; the operation, collective or axis that does it
    module: str = ""
    line: str = ""
    hangs: bool = False
    note: str = ""  # what the published fault did, if this is one of its kind; why verify misses it

    def planted(self, source: str) -> str:
        count = source.count(self.replace)
        assert count == 1, f"{self.fault}: {self.file} has the text {count} times"
        return source.replace(self.replace, self.by)


def rows_of(folder: Path) -> dict[str, Fault]:
    """The rows of a folder's YAML files, by "FILE: FAULT"."""
    return {
        f"{path.stem}: {row['fault']}": Fault(**row)
        for path in sorted(folder.glob("*.yaml"))
        for row in yaml.safe_load(path.read_text())
    }


def benchmarked() -> dict[str, Fault]:
    """Those that are compared: published ones, held-out ones, and those of the tests."""
    every = rows_of(HERE) | rows_of(ROOT / "tests" / "faults")
    return {name: fault for name, fault in every.items() if fault.layout}


def published_in(source: str) -> str:
    """A source as a link: of GitHub by repository and number, of arXiv by number."""
    parts = source.removeprefix("https://").split("/")
    if parts[0] == "github.com":
        return f"[{parts[2]}#{parts[4]}]({source})"
    if parts[0] == "arxiv.org":
        return f"[{parts[2]}]({source})"
    return source
