"""Before torch is imported: two workers and their ranks share the cores, a thread each."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections import Counter
from typing import Any

import pytest

from support.grid_parts import GridPart, parse_part

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank starts compilers
os.environ["XDG_STATE_HOME"] = "/dev/null"  # runs that tests launch are not known to their tools
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # workers have the controller's
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchinductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

CELLS = 2  # slow ones of a long list (families, command lines) that .ci/run takes
TABLE = "tests/proof/test_layouts.py"  # whose slow cells are chosen by themselves
LONGEST = ("test_the_main_job", "test_resume_runs_the_failed")  # with -m slow, and without


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="with -m grid: the i-th of n parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    if text := config.getoption("--part"):
        config.pluginmanager.register(GridPart(parse_part(text)))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a list with more slow cases than CELLS the others are marked grid, too. The longest test
    comes first: as the last one, it would keep one worker busy and the other idle."""
    lists: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("grid"):
            lists.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in lists.items():
        count = len(cases) if name.startswith(TABLE) else min(CELLS, len(cases))
        taken = {at * len(cases) // count for at in range(count)}
        for at, item in enumerate(cases):
            if at not in taken:
                item.add_marker(pytest.mark.grid)
    items.sort(key=lambda item: not item.name.startswith(LONGEST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are marked gpu."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.device_count():
            pytest.skip("there is no GPU")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """In CI, the seconds of each file, so that growth is seen."""
    if not os.environ.get("CI"):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"seconds of tests by file, {sum(seconds.values()):.0f} in all")
    for file, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:7.1f} {file}")
