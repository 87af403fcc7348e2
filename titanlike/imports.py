"""Import paths: `package.module.attribute`, how a config names code of the user's own."""

from __future__ import annotations

import importlib
from typing import Any


def load(path: str) -> Any:
    """The object that an import path names.

    Raises ValueError that says which part is missing, and where it was looked for.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{path!r} is neither a built-in name nor package.module.attribute")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"cannot import {module_name!r}: {error}; its folder must be the current one or on "
            "PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"module {module_name!r} ({module.__file__}) has no {attribute!r}")
    return getattr(module, attribute)
