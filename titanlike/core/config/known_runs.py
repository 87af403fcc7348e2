"""Runs that this user has launched.

As direnv keeps what it is allowed to run: a launch leaves an empty file in the user's state folder,
whose name is a hash of the run's folder, its config.yaml, and the places of all code and files that
this names. A run that was copied or changed, or whose code would come from elsewhere, has another
hash.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlike.core.config.files import atomic_write_text
from titanlike.core.config.imports import imports_line


def note(run: Path, named: Mapping[str, Any]) -> None:
    """Note a launch. named: what the run's config names outside of it. Raises OSError or
    RuntimeError where there is no state folder that can be written."""
    atomic_write_text(_file(run, named), "", sync=False)


def is_noted(run: Path, named: Mapping[str, Any], place: Path) -> bool:
    """Return whether this user has launched a run as it is, and nobody else can write to a place in
    it. Raises as `note`."""
    file = _file(run, named)
    return file.is_file() and all(map(_is_private, (run / "config.yaml", place, file)))


def _file(run: Path, named: Mapping[str, Any]) -> Path:
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
