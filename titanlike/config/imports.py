"""Import paths, `package.module.attribute`: how a config names the user's code."""

from __future__ import annotations

import difflib
import importlib
from typing import Any


def import_object(path: str) -> Any:
    """The object at an import path. Raises ValueError that names the missing part."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{path!r} is neither a built-in name nor package.module.attribute")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module raises during its import
        raise ValueError(
            f"importing {module_name} failed with {type(error).__name__}: {error} "
            "(its folder must be the current one or on PYTHONPATH)"
        ) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise ValueError(f"module {module_name} has no {attribute}{hint}")
    return getattr(module, attribute)
