"""What a newcomer to the repository relies on: CI runs what CONTRIBUTING says, and the site has
every page, and no tree grows unseen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import titanlike
from support.paths import ROOT

WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text("utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}


def steps(job: dict[str, Any]) -> str:
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


def test_ci_runs_every_check_and_every_planted_fault() -> None:
    """Each job ends by itself, may only read, and uses GitHub's own actions."""
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 360
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)
    jobs = WORKFLOWS["ci.yml"]["jobs"]
    run = "\n".join(map(steps, jobs.values())).splitlines()
    wanted = ["ruff check .", "ruff format --check .", "lint-imports", "mypy", "pytest"]
    assert {*wanted, "mkdocs build --strict"} <= {*run}
    slow = WORKFLOWS["slow.yml"]["jobs"]
    assert steps(slow["everything"]) == ".ci/run"
    rooms = [path.stem for path in sorted((ROOT / "tests" / "faults").glob("*.yaml"))]
    assert sorted(slow["faults"]["strategy"]["matrix"]["room"]) == rooms


@pytest.mark.parametrize("tree", ["titanlike", "tests"])
def test_no_package_has_more_lines_than_its_budget(tree: str) -> None:
    budgets = yaml.safe_load((ROOT / "tests" / "budgets.yaml").read_text("utf-8"))[tree]
    lines: Counter[str] = Counter()
    for path in (ROOT / tree).rglob("*.py"):
        *folders, _ = path.relative_to(ROOT / tree).parts
        folder = "/".join(folders[: 2 if folders[:1] == ["core"] else 1]) or "files"
        lines[folder] += len(path.read_text("utf-8").splitlines())
    budget = budgets.pop("all")
    for folder, most in budgets.items():
        told = f"{tree}/{folder} has {lines[folder]} lines, tests/budgets.yaml says"
        assert most <= 1.1 * lines[folder] + 100, f"{told} {most}: write the lower figure there"
    over = {
        f"{tree}/{folder}": f"{count - budgets.get(folder, 0)} lines more than its budget"
        for folder, count in lines.items()
        if count > budgets.get(folder, 0)
    }
    assert not over, f"{over}: delete as many there, or lower other figures by as many"
    assert sum(budgets.values()) <= budget, (
        f"the figures of {tree}/ in tests/budgets.yaml are {sum(budgets.values())} lines, which may "
        f"be {budget} in all: lower another figure by as many"
    )


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == titanlike.__version__ and citation["license"] == "Apache-2.0"


def test_every_page_is_in_the_sites_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert [page for page in pages if f"- {page}\n" not in contents] == []


@pytest.mark.slow
def test_the_site_has_every_page_and_finds_its_words(tmp_path: Path) -> None:
    """Strict: a link or an anchor that leads nowhere ends the build."""
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    for page in (*pages, "CONTRIBUTING", "CHANGELOG", "SECURITY"):
        assert (tmp_path / page / "index.html").exists(), page
    index = json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))
    found = {entry["location"].partition("/")[0] for entry in index["docs"]}
    assert found >= {*pages, "CONTRIBUTING"}
    first = (tmp_path / "index.html").read_text("utf-8")
    outside = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?://[^"]+)"', first)
    assert [link for link in outside if "canonical" not in link] == [], "nothing is loaded"
