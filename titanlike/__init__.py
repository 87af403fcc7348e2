"""Declarative pretraining in several dimensions of parallelism. Start reading at `cli.py`, then
`core/training/loop.py`. What users import is here, each name from its room on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlike.core.config.errors import ConfigError as ConfigError
    from titanlike.core.data.sources import IGNORE as IGNORE
    from titanlike.core.data.sources import Data as Data
    from titanlike.core.data.sources import Pad as Pad
    from titanlike.core.data.sources import VariableLength as VariableLength
    from titanlike.core.models.attention import attention as attention
    from titanlike.core.models.documents import attention_inputs as attention_inputs
    from titanlike.core.pipeline.order import Action as Action
    from titanlike.core.pipeline.order import Order as Order
    from titanlike.library import Callback as Callback
    from titanlike.library import build as build
    from titanlike.library import compose as config  # noqa: F401
    from titanlike.library import open_data as open_data
    from titanlike.library import plan as plan
    from titanlike.library import train as train
    from titanlike.use.training_run import StepOutput as StepOutput
    from titanlike.use.training_run import TrainingRun as TrainingRun

__version__ = "0.1.0"
_ROOMS = {  # name -> the module that it is imported from, with its name there if it is another
    "Action": "core.pipeline.order",
    "attention": "core.models.attention",
    "attention_inputs": "core.models.documents",
    "IGNORE": "core.data.sources",
    "Callback": "library",
    "ConfigError": "core.config.errors",
    "Data": "core.data.sources",
    "Order": "core.pipeline.order",
    "Pad": "core.data.sources",
    "StepOutput": "use.training_run",
    "TrainingRun": "use.training_run",
    "VariableLength": "core.data.sources",
    "build": "library",
    "config": "library:compose",
    "open_data": "library",
    "plan": "library",
    "train": "library",
}
__all__ = [*_ROOMS]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'titanlike' has no attribute {name!r}")
    module, _, theirs = _ROOMS[name].partition(":")
    return getattr(importlib.import_module(f"titanlike.{module}"), theirs or name)
