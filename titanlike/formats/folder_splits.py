"""The files of a folder as Hugging Face's `datasets` lays it out, by split: what `save_to_disk`
wrote, and a repository of the hub, whose README.md (the card) and names of files say what is of
which.

The library itself would open whatever a card or a state.json names, files and servers anywhere;
here they only choose among the files that were found in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from titanlike.core.config.files import read_object, read_text
from titanlike.core.config.yaml_files import parse_yaml
from titanlike.core.data.kinds import DataError

_SPLITS = "dataset_dict.json"  # written by save_to_disk for several splits
_EDGE = "[-._ 0-9]"  # before and after a split's name within a name
_KEYWORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
# where split names are searched, as `datasets` does, the first form that matches any file counts
_FORMS = (
    rf"(?:^|/)(?:[^/]*{_EDGE})?(?:%s)(?:{_EDGE}[^/]*)?/",
    rf"(?:^|/)(?:[^/]*{_EDGE})?(?:%s){_EDGE}[^/]*$",
)
_SHARDED = r"data/([\w.]+)-\d{5}-of-\d{5}[^/]*\.[^/]*"
_MOST_STARS = 3  # of ** in a pattern of a card


def split_names(folder: Path) -> list[str] | None:
    """Return the splits that save_to_disk wrote; None = it has none. Raises DataError."""
    if not (folder / _SPLITS).exists():
        return None
    try:
        names = read_object(folder / _SPLITS).get("splits")
        if isinstance(names, list) and all(re.fullmatch(r"\w[\w.]*", str(n)) for n in names):
            return [*map(str, names)]
        reason = f"{_SPLITS} has no list of splits"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise DataError("data.path", folder, reason, "save it again, or give the folder of one split")


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a split that save_to_disk wrote, in their order; what `map` has
    cached may lie beside them. Raises DataError."""
    try:
        listed: Any = read_object(folder / "state.json").get("_data_files")
        files = [folder / Path(str(one["filename"])).name for one in listed]
    except (OSError, ValueError, TypeError, KeyError):
        files = []
    missing = next((file.name for file in files if not file.is_file()), None)
    if files and missing is None:
        return files
    reason = f"{missing}, in its state.json, is no regular file"
    reason = reason if files else "its state.json has no files"
    raise DataError("data.path", folder, reason, "save it again, with save_to_disk")


def folder_splits(
    folder: Path, files: Sequence[Path], subset: str | None
) -> Mapping[str, list[Path]]:
    """Divide files by split; subset: a config of the card, or a folder. Raises DataError."""
    found = {file.relative_to(folder).as_posix(): file for file in files}
    configs = _configs(folder)
    alone = len(configs) == 1
    default = [n for n, c in configs.items() if alone or n == "default" or c.get("default")]
    if subset is None and configs and not default:
        fix = f"data.subset={next(iter(configs))} (there are {', '.join(configs)})"
        raise DataError("data.subset", "null", "README.md describes several configurations", fix)
    name = default[0] if subset is None and default else subset
    config = configs.get(name or "", {"data_dir": name})
    if isinstance(inner := config.get("data_dir"), str):
        prefix = inner.strip("/") + "/"
        found = {n.removeprefix(prefix): f for n, f in found.items() if n.startswith(prefix)}
    if (patterns := config.get("data_files")) is not None:
        return {name: _matching(folder, found, p) for name, p in _patterns(patterns).items()}
    if not found:
        reason = f"there is neither a configuration {subset} in README.md nor such a folder"
        raise DataError("data.subset", subset, reason, "data.subset=null, for all files")
    return _by_names(found)


def _configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configurations that a folder's card describes, by name. Raises DataError."""
    if not (card := folder / "README.md").exists():
        return {}
    try:
        head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", read_text(card), re.DOTALL)
        plain = parse_yaml(head[1]) if head else {}
    except (OSError, ValueError) as error:
        raise DataError("data.path", card, str(error), "correct it, or remove it") from None
    configs = plain.get("configs") if isinstance(plain, dict) else None
    named = [c for c in configs if isinstance(c, dict)] if isinstance(configs, list) else []
    return {str(config.get("config_name")): config for config in named}


def _patterns(patterns: Any) -> dict[str, list[str]]:
    """Return a card's patterns by split: of a text, a list of texts, or of {split, path}."""
    by_split: dict[str, list[str]] = {}
    for one in patterns if isinstance(patterns, list) else [patterns]:
        named = one if isinstance(one, dict) else {"split": "train", "path": one}
        paths = named.get("path")
        of_split = by_split.setdefault(str(named.get("split")), [])
        of_split += map(str, paths if isinstance(paths, list) else [paths])
    return by_split


def _matching(folder: Path, found: Mapping[str, Path], patterns: Sequence[str]) -> list[Path]:
    """Return the files that a card's patterns choose. Raises DataError if one chooses none."""
    chosen = dict[Path, None]()
    for pattern in patterns:
        parts = pattern.removeprefix("./").split("/")
        few = parts.count("**") <= _MOST_STARS
        names = [name for name in found if few and _matches(name.split("/"), parts)]
        if not names:
            reason = f"its README.md gives {pattern}, which is none of the data files in the folder"
            raise DataError("data.path", folder, reason, "add them, or correct README.md")
        chosen |= dict.fromkeys(found[name] for name in names)
    return [*chosen]


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not parts:
        return not parts and not {*pattern} - {"**"}
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _by_names(found: Mapping[str, Path]) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for name, file in found.items():
        if match := re.fullmatch(_SHARDED, name):
            splits.setdefault(match[1], []).append(file)
    for form in _FORMS if not splits else ():
        forms = {split: re.compile(form % f"(?:{words})") for split, words in _KEYWORDS.items()}
        named = {s: [f for n, f in found.items() if form.search(n)] for s, form in forms.items()}
        if any(named.values()):
            return named
    return splits or {"train": [*found.values()]}
