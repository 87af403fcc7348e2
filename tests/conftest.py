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
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # workers have the controller's
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchinductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

LONGEST = ("test_the_main_job", "test_of_five_jobs")  # with -m slow, and without


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="with -m grid: the i-th of n parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    if text := config.getoption("--part"):
        config.pluginmanager.register(GridPart(parse_part(text)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test comes first: as the last one, it would keep one worker busy, the other idle."""
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
