"""Where the shipped config files are."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The shipped config folder: inside the package when installed, else at the repository's root."""
    package = Path(__file__).parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"neither {package}/conf nor {package.parent}/conf exists")
