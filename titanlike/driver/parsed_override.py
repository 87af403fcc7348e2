"""One override, as Hydra parses it, and what a composed config says about it."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlike.config.overrides import ADDED
from titanlike.config.schema import OPEN_GROUPS
from titanlike.driver.override_errors import flat_keys


def parse_override(text: str, loader: ConfigLoaderImpl | None = None) -> Override | None:
    """The override, or None for a syntax error."""
    try:  # parse_override() does not pass the loader on, which glob() needs
        return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except HydraException:
        return None


def environment(text: str) -> dict[str, str]:
    """The values of the environment variables that a text interpolates -> their names."""
    names = re.findall(r"oc\.env:[\s'\"\\]*(\w+)", text)
    return {os.environ[name]: f"${{oc.env:{name}}}" for name in names if os.environ.get(name)}


def may_set(override: Override, composed: DictConfig) -> bool:
    """Whether the key can be given: what no file names is an argument of the user's own, or Hydra's."""
    key = override.key_or_group
    group, _, rest = key.partition(".")
    if group == "hydra":  # this program and Hydra rely on what is below its keys
        node = OmegaConf.select(composed, key)
        return not isinstance(node, DictConfig) or isinstance(override.value(), dict)
    holder = _node(composed, key.rpartition(".")[0])
    if holder is not None and not OmegaConf.is_config(holder):
        return False  # Hydra would put a mapping in the place of a value
    if not override.is_add() and override.type is not OverrideType.FORCE_ADD:
        return True
    name = str(OmegaConf.select(composed, f"{group}.name", throw_on_missing=False))
    own = "." in name or name == "None"  # ??? is None: its problem is found when it is parsed
    named = key in flat_keys(composed) and not override.is_add()
    return named or f"{key}=".startswith(ADDED) or (group in OPEN_GROUPS and bool(rest) and own)


def mapping_kept(override: Override, composed: DictConfig) -> Iterator[str]:
    """A line where the override gives a mapping, and entries that it does not name stay."""
    key, value = override.key_or_group, override.value()
    node = _node(composed, key)
    if not isinstance(value, dict) or not isinstance(node, DictConfig) or key.startswith("hydra"):
        return
    if kept := [str(name) for name in node if name not in value]:
        shown = ", ".join([*kept[:4], *(["..."] if len(kept) > 4 else [])])
        yield f"{key}: what is given is merged into the file's {len(node)}; of these stay: {shown}"


def _node(composed: DictConfig, key: str) -> Any:
    """What a key holds; None where there is no such key, or its value is not known yet."""
    try:
        return OmegaConf.select(composed, key, throw_on_missing=False) if key else None
    except OmegaConfBaseException:
        return None


def plain_config(composed: DictConfig) -> dict[str, Any]:
    """The config, without Hydra's part. Raises what OmegaConf's resolvers raise."""
    task = copy.copy(composed)
    OmegaConf.set_struct(task, False)
    task.pop("hydra")
    plain: Any = OmegaConf.to_container(task, resolve=True)
    assert isinstance(plain, dict)
    return plain


def values_of(override: Override) -> list[Any]:
    value = list(override.sweep_iterator()) if override.is_sweep_override() else override.value()
    if not isinstance(value, list):
        return [value]
    return [part for item in value for part in (item if isinstance(item, list) else [item])]


def single_overrides(override: Override) -> Iterator[str]:
    """The override once for each value of its sweep."""
    if not override.is_sweep_override():
        yield str(override.input_line)
    elif override.is_interval_sweep():
        interval: Any = override.value()
        yield f"{override.get_key_element()}={interval.start}"
    else:
        for value in override.sweep_string_iterator():
            yield f"{override.get_key_element()}={value}"
