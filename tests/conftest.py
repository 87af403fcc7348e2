"""Before torch is imported: two workers and their ranks share the cores, a thread each."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank starts compilers

LONGEST = ("test_the_main_job", "test_of_twelve_jobs")  # with -m slow, and without


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first: as the last one, it would keep one worker busy and the other idle."""
    items.sort(key=lambda item: not item.name.startswith(LONGEST))
