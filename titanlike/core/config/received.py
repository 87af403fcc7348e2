"""Reads the config of a run directory or checkpoint that may come from a stranger.

`read_run` parses config.yaml as YAML, without Hydra and interpolations: the keys of its model, data
and layout. `named_outside` finds code, and files outside of the run, that these name. Nothing of it
is imported or opened unless the user names it, too, has launched the run (`note_launch`), or passes
--trust-code (`Consent`).
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from titanlike.core.config.errors import as_override
from titanlike.core.config.files import atomic_write_text, leaves
from titanlike.core.config.groups.data import ChatData, HFData, StreamData, TextData
from titanlike.core.config.imports import imports_line, named_code
from titanlike.core.config.overrides import key_of, with_choices
from titanlike.core.config.parse import in_folder, parse, to_plain
from titanlike.core.config.program import program
from titanlike.core.config.schema import OPEN_GROUPS, Config
from titanlike.core.config.yaml_files import read_yaml

# keys whose texts are opened as files; a test finds every other text that is read
PLACES = {
    "model": ("path",),  # of model=hf
    "schedule": ("path",),
    "data": ("path", "tokenizer", "template", "cache", "sources"),
    "validation": ("data",),
    "checkpoint": ("folder",),
}
# not needed for an evaluation, or up to its user: where it runs, writes and logs
NOT_READ = (
    *("run_dir", "compile", "launch", "logger", "metrics", "profile", "timeline", "hardware"),
    *("sample", "verify", "bench", "sweep", "max_time", "value"),
)
PARTS_READ = {
    "checkpoint": ("folder",),
    "evaluate": ("part", "batches"),
    "validation": ("data", "every", "batches"),  # of a stream, so many samples were not trained on
}


def read_run(run: Path) -> Config:
    """Read the model, data and layout of the run in a directory; other keys have defaults.

    Raises ValueError for a file that no run has written, OSError.
    """
    path = run / "config.yaml"
    refuse_links(run, [path])
    try:
        plain = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{path}: is damaged: {error}") from None
    if not isinstance(plain, dict):
        raise ValueError(f"{path}: is no config of a run")
    keys = {key: plain[key] for key in to_plain(Config()) if key in plain and key not in NOT_READ}
    for group, some in PARTS_READ.items():
        section = keys.pop(group, None)
        if isinstance(section, dict):
            keys[group] = {key: section[key] for key in some if key in section}
    if "${" in str(keys):
        raise ValueError(f"{path}: has an interpolation, ${{...}}, and no run writes any")
    keys, _ = in_folder(keys | {"run_dir": plain.get("run_dir")}, run.absolute())
    config, problems = parse(keys | {"run_dir": str(run.absolute())})
    unknown = [p.key for p in problems if p.reason.startswith("unknown key")]
    if unknown:  # keys of a different version
        print(f"{path}: not read, as there is no such key: {', '.join(unknown)}", file=sys.stderr)
    if wrong := [str(problem) for problem in problems if problem.key not in unknown]:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    return config


def named_outside(
    config: Config, root: str | Path, groups: Collection[str] = (*PLACES, *OPEN_GROUPS)
) -> dict[str, Any]:
    """Map keys to values that name code by an import path, or a file outside of `root`.

    groups: those that are used; "tokenizer" = only the data's keys that locate the tokenizer.
    """
    plain = to_plain(config)
    code = dict(named_code(plain, {}))
    outside: dict[str, Any] = {k: v for k, v in code.items() if k.partition(".")[0] in groups}
    unread = set[str]()
    if "tokenizer" in groups:
        reads_text = isinstance(config.data, TextData | HFData | ChatData | StreamData)
        unread = {"data.cache", "data.path" if reads_text else ""}
    for group, keys in PLACES.items():
        used = group in groups or (group == "data" and "tokenizer" in groups)
        used = used and f"{group}.name" not in code  # of user code it is an argument
        for key in keys if used else ():
            value, name = plain[group].get(key), f"{group}.{key}"
            known = name in unread or (name, value) == ("data.tokenizer", "bytes")
            texts = [text for _, text in leaves(value) if isinstance(text, str)]
            if not known and not is_inside(texts, root):
                outside[name] = value
    return outside


def with_kept_tokenizer(config: Config, run: str) -> Config:
    """Return the config with the tokenizer and template that a run's first launch has kept in it."""
    kept, data = Path(run).expanduser() / "tokenizer", config.data
    if getattr(data, "tokenizer", "bytes") == "bytes" or not is_inside([str(kept)], run):
        return config
    changes: dict[str, Any] = {"tokenizer": str(kept)}
    if isinstance(data, ChatData):
        changes["template"] = None  # that of the tokenizer
    return replace(config, data=replace(data, **changes))


def is_place(word: str) -> bool:
    """Return whether a word of a command line is KEY=VALUE for a key of `PLACES`."""
    group, _, key = word.partition("=")[0].partition(".")
    return "=" in word and key in PLACES.get(group, ())


def check_places(words: Iterable[str]) -> None:
    """Raise ValueError for a word for which `is_place` is false."""
    for word in words:
        if not is_place(word):
            raise ValueError(
                f"{word}: names no file of RUN; write data.tokenizer=PATH, or leave it out"
            )


@dataclass(frozen=True)
class Consent:
    """What the user of a command allows it to open and import of what a run names."""

    words: Sequence[str] = ()  # the command's KEY=VALUE words
    line: Sequence[str] = ()  # all words of the command
    trusted: bool = False  # --trust-code
    files: bool = False  # any file may be opened: a program calls this one

    def with_places(self, config: Config) -> Config:
        """Return the config with the files that the user names."""
        pairs = (word.partition("=") for word in self.words if is_place(word))
        return with_choices(config, {key: yaml.safe_load(value) for key, _, value in pairs})

    def check(self, place: object, named: Mapping[str, Any]) -> None:
        """Print what is imported, if trusted. Raises ValueError, with the line to type, for what
        the user has neither named nor launched.

        named: from `named_outside`; place: the file that names it.
        """
        given = {key_of(word) for word in self.words}
        left = {k: v for k, v in named.items() if not given & {k, k.partition(".")[0]}}
        own = left if self.trusted or not left else _launched(Path(str(place)))
        allowed = {k: v for k, v in left.items() if own.get(k) == v}
        for line in (imports_line(str(v), k) for k, v in allowed.items() if k.endswith(".name")):
            print(line, file=sys.stderr)
        left = {k: v for k, v in left.items() if k not in allowed}
        imported = [imports_line(str(v), k) for k, v in left.items() if k.endswith(".name")]
        files = [as_override(k, v) for k, v in left.items() if not k.endswith(".name")]
        if imported or (files and not self.files):
            more = ["--trust-code"] if imported else files
            trust = "" if imported else ", or add --trust-code"
            raise ValueError(
                f"{place} names what is not its own, and nothing of that was used: "
                f"{'; '.join([*imported, *files])}. If you trust it, write "
                f"{' '.join([shlex.join([*program(), *self.line]), *more])}{trust}"
            )


# --- runs that this user has launched -------------------------------------------------------------
#
# As direnv keeps what it is allowed to run: a launch leaves an empty file in the user's state folder,
# whose name is a hash of the run's folder, its config.yaml, and the places of all code and files that
# this names. A run that was copied or changed, or whose code would come from elsewhere, has another
# hash.


def note_launch(run: Path) -> None:
    """Note that this user launches a run, if its config names something outside of it. Without
    effect where that cannot be written."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if named := named_outside(read_run(run), run):
            atomic_write_text(_note_of(run, named), "", sync=False)


def _launched(place: Path) -> dict[str, Any]:
    """Return what the config of the run of a file or checkpoint names outside of it, if this user
    has launched it so, and nobody else can write to the place in it; else {}."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        for run in place.absolute().parents[:2]:
            if (run / "config.yaml").is_file():
                named = named_outside(read_run(run), run)
                note = _note_of(run, named)
                private = map(_is_private, (run / "config.yaml", place, note))
                return named if note.is_file() and all(private) else {}
    return {}


def _note_of(run: Path, named: Mapping[str, Any]) -> Path:
    places = {
        key: imports_line(str(value), key) if key.endswith(".name") else os.path.abspath(str(value))
        for key, value in named.items()
    }
    config = hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()
    text = json.dumps([str(run.resolve()), config, places])
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state.absolute() / "titanlike" / "runs" / hashlib.sha256(text.encode()).hexdigest()


def _is_private(place: Path) -> bool:
    """Whether a file or folder is this user's, and only they and root may change or replace it."""
    path = place.resolve()
    for depth, each in enumerate((path, *path.parents)):
        status = each.stat()
        mode, theirs = status.st_mode, status.st_uid != os.getuid()
        others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
        replaceable = others and (depth < 2 or not mode & stat.S_ISVTX)  # sticky, as /tmp
        if replaceable or (theirs and (depth == 0 or status.st_uid != 0)):
            return False
    return True


def _is_own_group(gid: int) -> bool:
    """Whether a group is this user's alone, with which a umask of 002 is usual."""
    try:
        group = grp.getgrgid(gid)
        return group.gr_name == pwd.getpwuid(os.getuid()).pw_name and not group.gr_mem
    except KeyError:
        return False


# --- what leads out of a run ----------------------------------------------------------------------


def refuse_links(run: Path, files: Iterable[Path] = ()) -> None:
    """Raise ValueError for a file that is a link out of the run. files: default the records in it,
    whose content `report` and `timeline` show."""
    for path in files or (*run.glob("*.json*"), run / "wandb" / "run_url"):
        if path.is_symlink() and not is_inside([str(path)], run):
            raise ValueError(f"{path}: is a link out of the run; put the file in its place")


def is_inside(texts: Iterable[str], root: str | Path) -> bool:
    """Return whether paths exist and neither they nor anything in them leads out of a folder."""
    try:
        folder = Path(root).expanduser().resolve()
        paths = [Path(text).expanduser().resolve(strict=True) for text in texts]
        if not all(path.is_relative_to(folder) for path in paths):
            return False
        inner = (each for path in paths for each in path.rglob("*"))
        return all(each.resolve().is_relative_to(folder) for each in inner)
    except (OSError, ValueError, RuntimeError):  # missing, or not a path
        return False
