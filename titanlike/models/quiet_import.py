"""Imports of torchao, direct or by transformers, which finds it by itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Within it nothing is logged but errors.

    Symptom without it: importing torchao logs each of its libraries that is for another device, and
    torch a deprecation. Test:
    `test_float8.py::test_a_run_says_that_it_is_emulated_and_nothing_of_torchao`.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
