"""Weights of our own families from a folder of transformers, slice by slice.

A rank reads only the rows of its shards, and of its tensor-parallel part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlike.config.errors import Problem, override_text
from titanlike.distributed.placement import Slices
from titanlike.models.hf_config import read_config
from titanlike.models.hf_names import (
    FAMILIES,
    Family,
    Name,
    our_sizes,
    their_name,
    unsupported,
    whole_sizes,
)
from titanlike.models.quiet_import import quiet_import
from titanlike.models.safetensors_folder import SafetensorsFolder, first_names, has_weights


class FamilyWeights:
    """The values of a family's parameters in a folder's safetensors."""

    def __init__(self, family: Family, folder: Path) -> None:
        """Raises ValueError where the files cannot be read."""
        self._family, self._files = family, SafetensorsFolder(folder)

    def block(self, name: str, place: Slices) -> Tensor:
        """A block of a parameter, fp32 on the CPU; `place` has a slice a dimension."""
        named = their_name(self._family, name)
        if named.form == "stacked":
            rows, *inside = place
            keys = [self._stored(named, row) for row in range(rows.start, rows.stop)]
            return torch.stack([self._files.slice(key)[tuple(inside)].float() for key in keys])
        stored = self._files.slice(self._stored(named))
        if named.form == "transposed":
            return stored[place[::-1]].T.float()
        return stored[place].float()

    def wrong(self, shapes: Mapping[str, torch.Size]) -> list[str]:
        """What is missing, or has another shape than the model's parameters; reads headers only."""
        found = []
        for name, shape in shapes.items():
            named, needed = their_name(self._family, name), list(shape)
            rows = range(needed.pop(0)) if named.form == "stacked" else [None]
            needed = needed[::-1] if named.form == "transposed" else needed
            for row in rows:
                key = self._stored(named, row)
                if key not in self._files.files:
                    found.append(f"{key} is missing")
                elif self._files.slice(key).get_shape() != needed:
                    has = self._files.slice(key).get_shape()
                    found.append(f"{key} is {has} there and {needed} here")
        return found

    def _stored(self, named: Name, row: int | None = None) -> str:
        """The key in the files; some are written without the prefix."""
        key = named.theirs if row is None else named.theirs.replace("#", str(row))
        short = key.removeprefix(self._family.prefix)
        return short if key not in self._files.files and short in self._files.files else key


def start_problems(
    location: str, name: str, sizes: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> Iterable[Problem]:
    """Why a model of our own does not start from a folder; reads no values.

    location: hf:/path; name, sizes: `model.name` and all of its arguments; shapes: of its parameters.
    """
    key, folder = "checkpoint.start_from", folder_of(location)
    if name not in FAMILIES:
        reason = f"is for {' and '.join(FAMILIES)}, whose names in transformers are known"
        fix = f"model=hf model.path={folder} checkpoint.start_from=null"
        yield Problem(key, location, reason, fix)
        return
    if not (folder / "config.json").is_file() or not has_weights(folder):
        fix = f"{key}=hf:/a/folder that has config.json and safetensors"
        yield Problem(key, location, "there is no model of transformers in safetensors", fix)
        return
    try:
        with quiet_import():
            import transformers
    except ImportError:
        reason = "transformers, which reads its config, is not installed"
        yield Problem(key, location, reason, "pip install 'titanlike[hf]'")
        return
    settings = read_config(transformers, str(folder))
    kinds = {one.model_type: (ours, one) for ours, many in FAMILIES.items() for one in many}
    ours, family = kinds.get(settings.model_type, ("", None))
    if family is None or ours != name:
        fix = f"model.name={ours}" if ours else f"model=hf model.path={folder}"
        yield Problem(key, location, f"is a {settings.model_type}, and the model a {name}", fix)
        return
    config = settings.to_dict()
    if other := list(unsupported(family, config)):
        reason = f"has {', '.join(other)}, which model.name={name} does not compute"
        yield Problem(
            key, location, reason, f"model=hf model.path={folder} checkpoint.start_from=null"
        )
        return
    wanted, sizes = our_sizes(family, config), whole_sizes(sizes)
    different = {size: value for size, value in wanted.items() if sizes.get(size) != value}
    for size, value in different.items():
        reason = f"{folder} has {size}={override_text(value)}"
        yield Problem(
            f"model.{size}", sizes.get(size), reason, f"model.{size}={override_text(value)}"
        )
    if not different and (wrong := FamilyWeights(family, folder).wrong(shapes)):
        yield Problem(key, location, first_names(wrong), "copy the folder's files again")


def folder_of(location: str) -> Path:
    """/path of hf:/path."""
    return Path(location.removeprefix("hf:")).expanduser()
