"""Where the shipped files are: inside the package when installed, else in the checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def conf_dir() -> Path:
    """The config files."""
    return _first_folder(_PACKAGE / "conf", _PACKAGE.parent / "conf")


def scripts_dir() -> Path:
    """The job scripts, a folder for each scheduler."""
    return _first_folder(_PACKAGE / "scripts", _PACKAGE.parent / "tools")


def _first_folder(*folders: Path) -> Path:
    for folder in folders:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"none of these folders exists: {', '.join(map(str, folders))}")
