"""The model in a checkpoint, and the config that trained it, from its state.json alone."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from titanlike.checkpoint.integrity import read_state
from titanlike.checkpoint.storage import Storage
from titanlike.config.errors import ConfigError
from titanlike.config.imports import imports_line
from titanlike.config.parse import parse
from titanlike.config.schema import Config, Custom
from titanlike.models.registry import MODELS, resolve_model


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model with all arguments of its constructor."""

    model: Custom
    config: Config
    step: int
    complete: bool = True  # else the model has the arguments that its config gives


def saved_model(folder: Storage) -> SavedModel:
    """Raises ValueError where the checkpoint does not say what it is of; DamagedCheckpoint."""
    state = read_state(folder)
    plain: dict[str, Any] = state.get("config", {})
    if not plain:
        raise ValueError(
            f"{folder} does not say which model it has: it was restored from a file of another "
            "program; train a step from it first (checkpoint.start_from)"
        )
    config, _ = parse(plain)  # keys that later versions lack change no model
    if "model" in state:
        args = {key: value for key, value in state["model"].items() if key not in _OTHERS}
        return SavedModel(Custom(state["model"]["name"], args), config, state["step"])
    if config.model.name not in MODELS:  # else its code would run here
        return SavedModel(config.model, config, state["step"], complete=False)
    try:  # of an earlier version
        return SavedModel(resolve_model(config), config, state["step"])
    except ConfigError as error:
        raise ValueError(f"{folder}: its model is not known: {error}") from None


def model_to_build(saved: SavedModel, place: object, trust_code: bool) -> Custom:
    """The model, if its code may run here: titanlike's own, or that of others if the user has said
    so; then what is imported is printed first. Raises ValueError."""
    name = saved.model.name
    if name in MODELS:
        return saved.model
    if not trust_code:
        raise ValueError(
            f"{place} names its model {name}, which is none of titanlike's ({', '.join(MODELS)}): "
            "its code would run here; if you trust both, add --trust-code"
        )
    print(imports_line(name, f"the model of {place}"), file=sys.stderr)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the user's models
    return saved.model if saved.complete else resolve_model(saved.config)


_OTHERS = ("name", "tp_plan")
