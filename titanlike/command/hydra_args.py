"""What the user need not type: search path, primary config, the `+` of some overrides."""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from titanlike.config.errors import quoted
from titanlike.config.folder import conf_dir
from titanlike.config.overrides import to_hydra

CONFIG_NAME = "config"


def complete_args(args: argparse.Namespace) -> None:
    """Fill in Hydra's arguments: --config-path, --config-name, and the overrides as Hydra reads them."""
    extra = _plugin_confs()
    if args.config_path is None:
        args.config_path = str(conf_dir())
    else:
        args.config_path = str(Path(args.config_path).absolute())
        extra.append(str(conf_dir()))
    args.config_name = args.config_name or CONFIG_NAME
    overrides = []
    for text in args.overrides:
        if text.startswith("hydra.searchpath=") and (override := parse_override(text)):
            value = override.value()
            extra = [*(value if isinstance(value, list) else [value]), *extra]
        elif text.startswith("+experiment="):
            overrides.append(text[1:])  # it is in the defaults list; both spellings are common
        else:
            overrides.append(to_hydra(text))
    if extra:
        overrides.append(f"hydra.searchpath=[{','.join(map(quoted, extra))}]")
    args.overrides = overrides


def parse_override(text: str, loader: ConfigLoaderImpl | None = None) -> Override | None:
    """The override, or None for a syntax error."""
    try:  # parse_override() does not pass the loader on, which glob() needs
        return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except HydraException:
        return None


def _plugin_confs() -> list[str]:
    """Config folders of installed packages with an entry point in the group titanlike.plugins."""
    modules = [entry.load() for entry in entry_points(group="titanlike.plugins")]
    return [str(module.CONF) for module in modules if hasattr(module, "CONF")]
