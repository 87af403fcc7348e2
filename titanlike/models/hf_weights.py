"""Initial weights of a transformers model from a folder's safetensors, slice by slice.

A rank reads only the rows of its shards, and of its tensor-parallel part of them. Names in the files
are those of the transformers version that wrote them, and are mapped by transformers' own conversion
rules; experts that are stored one by one are merged.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlike.distributed.placement import Slices
from titanlike.models.safetensors_folder import SafetensorsFolder, first_names

# Where a parameter is stored: its name in the files; or, of a parameter [experts, out, in] that is
# merged from matrices [part of out, in], the names of each expert's matrices, in order.
Sources = str | list[list[str]]


class FolderWeights:
    """`InitialWeights`: the values in a folder's safetensors."""

    def __init__(
        self, model: Any, folder: Path, buffer: Callable[[str], Tensor] | None = None
    ) -> None:
        """model: on any device; buffer: gives the buffers that are not in the files.

        Raises ValueError.
        """
        self._folder, self._model, self._buffer = folder, model, buffer
        self.origin = f"from {folder}"
        self.files = SafetensorsFolder(folder)
        self._sources = self._find_sources()

    @property
    def sources(self) -> Mapping[str, Sources]:
        """Parameter or buffer, every name of a tied one -> where it is stored."""
        return self._sources

    def block(self, name: str, shape: torch.Size, place: Slices) -> Tensor:
        source = self._sources[name]
        if isinstance(source, list):
            rows, *inside = place
            parts = [torch.cat([self.files.slice(key)[:] for key in keys]) for keys in source[rows]]
            whole = torch.stack(parts) if parts else torch.empty(0, *shape[1:])
            return whole[:, *inside].float()
        if not shape:
            return self.files.handle(source).get_tensor(source).float()
        return self.files.slice(source)[place].float()

    def buffer(self, name: str) -> Tensor:
        """From the files where they contain it."""
        if name in self._sources:
            source = self._sources[name]
            assert isinstance(source, str), "only parameters are stored in several tensors"
            return self.files.handle(source).get_tensor(source)
        assert self._buffer is not None
        return self._buffer(name)

    def check(self) -> None:
        """Raise ValueError for parameters of another shape; reads headers only."""
        wrong = []
        for name, parameter in self._model.named_parameters():
            found, needed = self._shape(name), list(parameter.shape)
            if found != needed:
                wrong.append(f"{name} is {found} in the files and {needed} in the model")
        if wrong:
            remedy = "use the sizes of its config.json, or model.weights=scratch"
            raise ValueError(f"path={self._folder}: {first_names(wrong)}; {remedy}")

    def _shape(self, name: str) -> list[int]:
        source = self._sources[name]
        if not isinstance(source, list):
            return self.files.slice(source).get_shape()
        shapes = set()
        for keys in source:
            parts = [self.files.slice(key).get_shape() for key in keys]
            shapes.add((sum(part[0] for part in parts), *parts[0][1:]))
        return [len(source), *shapes.pop()] if len(shapes) == 1 else []

    def _find_sources(self) -> dict[str, Sources]:
        """Parameter or buffer -> name in the files, or experts to merge. Raises ValueError."""
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        model, folder = self._model, self._folder
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        state = dict.fromkeys(model.state_dict(keep_vars=True), True)
        simple: dict[str, str] = {}
        merged: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for key in sorted(self.files.files, key=_natural):
            prefix = model.base_model_prefix
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
            if pattern is None or key in state:
                simple[key if key in state else name] = key
            else:
                merged[name][pattern].append(key)
        sources: dict[str, Sources] = dict(simple)
        for name, patterns in merged.items():
            sources[name] = self._experts(name, patterns, converters)
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in sources:  # a tied parameter is stored under any of its names
                sources.setdefault(first[id(parameter)], sources[name])
        if missing := [name for name in first.values() if name not in sources]:
            remedy = "write model.weights=scratch, or copy the files again"
            raise ValueError(f"path={folder}: its files lack {first_names(missing)}; {remedy}")
        self._check_unexpected([name for name in sources if name not in state])
        return sources

    def _experts(
        self, name: str, patterns: dict[str, list[str]], converters: list[Any]
    ) -> list[list[str]]:
        """Raises ValueError for any other conversion than merging experts."""
        converter = next(c for c in converters if set(patterns) <= set(c.source_patterns))
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
        if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            kinds = " and ".join(kind for kind, _ in steps)
            raise ValueError(
                f"path={self._folder}: {name} is stored in another form, which transformers "
                f"converts by {kinds}; write the folder again with transformers' save_pretrained"
                "(save_original_format=False)"
            )
        lists = [patterns.get(pattern, []) for pattern in converter.source_patterns]
        counts = {len(keys) for keys in lists}
        if len(counts) != 1:
            raise ValueError(f"path={self._folder}: experts of {name} are missing; copy it again")
        return [list(keys) for keys in zip(*lists, strict=True)]

    def _check_unexpected(self, names: list[str]) -> None:
        """Raise ValueError for tensors that the model lacks, such as more layers."""
        ignored = [*(self._model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        ignored += [r"\.attn\.(masked_)?bias$", r"^lm_head\.weight$"]
        left = [name for name in names if not any(re.search(part, name) for part in ignored)]
        if left:
            raise ValueError(
                f"path={self._folder}: the model has no {first_names(left)}, which its files "
                "have; use its own config.json, or model.weights=scratch"
            )


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """A sort key: experts.10 after experts.9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in key.split(".")]
