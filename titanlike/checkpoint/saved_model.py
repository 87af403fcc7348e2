"""The model in a checkpoint, and the config that trained it, from its state.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlike.checkpoint.integrity import read_state
from titanlike.checkpoint.storage import Storage
from titanlike.config.errors import ConfigError
from titanlike.config.parse import parse
from titanlike.config.schema import Config, Custom
from titanlike.models.registry import resolve_model


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model with all arguments of its constructor."""

    model: Custom
    config: Config
    step: int


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
    try:  # of an earlier version
        return SavedModel(resolve_model(config), config, state["step"])
    except ConfigError as error:
        raise ValueError(f"{folder}: its model is not known: {error}") from None


_OTHERS = ("name", "tp_plan")
