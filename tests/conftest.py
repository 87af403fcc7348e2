"""Before torch is imported: two workers and their ranks share the cores, a thread each."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("any machine", settings(), deadline=None)
settings.load_profile("any machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell's script
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank starts compilers
os.environ["XDG_STATE_HOME"] = "/dev/null"  # runs that tests launch are not known to their tools
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # workers have the controller's
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchinductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

TABLE = "tests/proof/test_layouts.py"  # of whose slow cells .ci/run takes each twelfth
LONGEST = ("test_the_main_job", "test_resume_runs_the_failed")  # with -m slow, and without


def pytest_addoption(parser: pytest.Parser) -> None:
    parts = [f"{part}/{count}" for count in range(1, 10) for part in range(1, count + 1)]
    parser.addoption("--part", choices=parts, default="1/1", help="a part of the tests, as 3/9")


@pytest.hookimpl(wrapper=True)  # before -m chooses, and after
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Of a list with several slow cases (families, command lines) all but the first are marked
    grid, too. The longest test comes first: as the last one, it would keep one worker busy and the
    other idle."""
    lists: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("grid"):
            lists.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in lists.items():
        apart = 12 if name.startswith(TABLE) else len(cases)
        for at, item in enumerate(cases):
            if at % apart:
                item.add_marker(pytest.mark.grid)
    for item in items:
        if item.get_closest_marker("grid"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(3600))
    items.sort(key=lambda item: not item.name.startswith(LONGEST))
    yield
    number, _, count = config.getoption("--part").partition("/")
    others = [item for at, item in enumerate(items) if at % int(count) != int(number) - 1]
    config.hook.pytest_deselected(items=others)
    items[:] = items[int(number) - 1 :: int(count)]


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
