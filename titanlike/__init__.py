"""Declarative pretraining in several dimensions of parallelism. Start reading at `cli.py`, then
`training/loop.py`. The Python interface (`titanlike.config`, `train`, `build` and others) is
library.py, imported on first use."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import titanlike.config as _config

if TYPE_CHECKING:
    from titanlike.config.errors import ConfigError as ConfigError
    from titanlike.library import Callback as Callback
    from titanlike.library import build as build
    from titanlike.library import compose as config  # noqa: F401
    from titanlike.library import open_data as open_data
    from titanlike.library import plan as plan
    from titanlike.library import train as train
    from titanlike.training.training_run import StepOutput as StepOutput
    from titanlike.training.training_run import TrainingRun as TrainingRun

__version__ = "0.1.0"
_LIBRARY = ("build", "open_data", "plan", "train", "Callback")
_LOOP = ("StepOutput", "TrainingRun")
__all__ = ["ConfigError", "config", *_LIBRARY, *_LOOP]


def __getattr__(name: str) -> Any:
    if name in _LIBRARY:
        return getattr(importlib.import_module("titanlike.library"), name)
    if name in _LOOP:
        return getattr(importlib.import_module("titanlike.training.training_run"), name)
    if name == "ConfigError":
        return importlib.import_module("titanlike.config.errors").ConfigError
    raise AttributeError(f"module 'titanlike' has no attribute {name!r}")


class _CallableRoom(ModuleType):
    """`titanlike.config`: a package, and when called a function that composes a config."""

    def __call__(self, *overrides: str, **values: Any) -> Any:
        return importlib.import_module("titanlike.library").compose(*overrides, **values)


sys.modules[_config.__name__].__class__ = _CallableRoom
