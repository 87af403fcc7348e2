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

LONGEST = ("test_the_main_job", "test_of_five_jobs")  # with -m slow, and without


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first: as the last one, it would keep one worker busy and the other idle."""
    items.sort(key=lambda item: not item.name.startswith(LONGEST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are marked gpu."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.device_count():
            pytest.skip("there is no GPU")
