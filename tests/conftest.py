"""Before torch is imported: two workers and their ranks share the cores, a thread each."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank starts compilers
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # workers have the controller's
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchinductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

CELLS = 6  # slow ones of a table that .ci/run takes
LONGEST = ("test_the_main_job", "test_of_five_jobs")  # with -m slow, and without


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a table with more slow cells than CELLS the others are marked grid, too. The longest test
    comes first: as the last one, it would keep one worker busy and the other idle."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("grid"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in tables.values():
        count = min(CELLS, len(cells))
        taken = {at * len(cells) // count for at in range(count)}
        for at, item in enumerate(cells):
            if at not in taken:
                item.add_marker(pytest.mark.grid)
    items.sort(key=lambda item: not item.name.startswith(LONGEST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are marked gpu."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.device_count():
            pytest.skip("there is no GPU")
