"""Initial weights from the safetensors of a transformers folder, slice by slice.

A rank reads only the rows of its shards. Names in the files are those of the transformers version
that wrote them: for transformers models they are mapped by transformers' conversion rules, and
experts stored one by one are merged; for built-in models see `hf_names.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from titanlike.core.config.errors import some_names
from titanlike.core.distributed.placement import Slices
from titanlike.hf.hf_names import Counterpart
from titanlike.hf.safetensors_folder import SafetensorsFolder


class Source(NamedTuple):
    """Where a parameter is stored.

    form: same; transposed; or stacked: for a parameter [N, out, in], the names of the tensors that
    form each of its N matrices.
    """

    rows: list[list[str]]
    form: Literal["same", "transposed", "stacked"] = "same"

    @property
    def name(self) -> str:
        """The tensor's name, if there is only one."""
        ((name,),) = self.rows
        return name


def source_of(theirs: Counterpart, name: str, shape: Sequence[int]) -> Source:
    """Return where a built-in model's parameter is stored."""
    stored = theirs.stored_name(name)
    if "#" in stored:
        return Source([[stored.replace("#", str(row))] for row in range(shape[0])], "stacked")
    turned = theirs.transposed is not None and re.search(theirs.transposed, name)
    return Source([[stored]], "transposed" if turned else "same")


class StoredWeights:
    """Parameter values from a folder's files."""

    def __init__(self, files: SafetensorsFolder, sources: Mapping[str, Source]) -> None:
        """sources: by the names of parameters and buffers, including all names of tied ones."""
        self.files, self.sources = files, sources

    def block(self, name: str, shape: torch.Size, place: Slices) -> Tensor:
        """Return a block of a parameter with this shape, fp32 on the CPU; `place` has a slice per
        dimension."""
        source = self.sources[name]
        if source.form == "stacked":
            rows, *inside = place
            parts = []
            for keys in source.rows[rows]:
                stored = [self.files.slice(key) for key in keys]
                whole = stored[0] if len(keys) == 1 else torch.cat([part[:] for part in stored])
                parts.append(whole[tuple(inside)])
            return torch.stack(parts).float() if parts else torch.empty(0, *shape[1:])[:, *inside]
        stored = self.files.slice(source.name)
        if source.form == "transposed":
            *first, rows, columns = place
            return stored[(*first, columns, rows)].mT.float()
        return (stored[place] if shape else self.files.tensor(source.name)).float()

    def mismatches(self, shapes: Mapping[str, torch.Size]) -> Iterator[str]:
        """Yield what is missing or has another shape; reads only headers."""
        for name, shape in shapes.items():
            rows, form = self.sources[name]
            if missing := [key for keys in rows for key in keys if key not in self.files.files]:
                yield f"{missing[0]} is missing"
                continue
            stored = [[self.files.slice(key).get_shape() for key in keys] for keys in rows]
            if form == "stacked":
                matrices = {(sum(part[0] for part in row), *row[0][1:]) for row in stored}
                in_files = [len(rows), *matrices.pop()] if len(matrices) == 1 else []
            else:
                in_files = [*stored[0][0]]
                if form == "transposed":
                    in_files[-2:] = in_files[:-3:-1]
            if in_files != [*shape]:
                yield f"{name} is {in_files} in the files and {[*shape]} in the model"


def own_weights(
    theirs: Counterpart, folder: Path, shapes: Mapping[str, torch.Size]
) -> StoredWeights:
    """Return a built-in model's weights. Raises ValueError for unreadable files."""
    files = SafetensorsFolder(folder)

    def here(key: str) -> str:
        """A tensor's name in these files, some of which omit the prefix."""
        short = key.removeprefix(theirs.prefix)
        return short if key not in files.files and short in files.files else key

    sources = {}
    for name, shape in shapes.items():
        rows, form = source_of(theirs, name, shape)
        sources[name] = Source([[here(key) for key in row] for row in rows], form)
    return StoredWeights(files, sources)


class FolderWeights(StoredWeights):
    """`InitialWeights` of a transformers model."""

    def __init__(
        self, model: Any, folder: Path, buffer: Callable[[str], Tensor] | None = None
    ) -> None:
        """model: on any device; buffer: returns buffers that the files lack.

        Raises ValueError.
        """
        self._folder, self._model, self._buffer = folder, model, buffer
        self.origin = f"from {folder}"
        files = SafetensorsFolder(folder)
        super().__init__(files, self._find_sources(files))

    def buffer(self, name: str) -> Tensor:
        """A buffer from the files, else from `buffer`."""
        if name in self.sources:
            return self.files.tensor(self.sources[name].name)
        assert self._buffer is not None
        return self._buffer(name)

    def check(self) -> None:
        """Raise ValueError for parameters of another shape; reads only headers."""
        shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        if wrong := list(self.mismatches(shapes)):
            remedy = "use the sizes of its config.json, or model.weights=scratch"
            raise ValueError(f"path={self._folder}: {some_names(wrong)}; {remedy}")

    def _find_sources(self, files: SafetensorsFolder) -> dict[str, Source]:
        """Map parameters and buffers to names in the files, or experts to merge. Raises ValueError."""
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        model, folder = self._model, self._folder
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        state = dict.fromkeys(model.state_dict(keep_vars=True), True)
        sources: dict[str, Source] = {}
        merged: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for key in sorted(files.files, key=_natural):
            prefix = model.base_model_prefix
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
            if pattern is None or key in state:
                sources[key if key in state else name] = Source([[key]])
            else:
                merged[name][pattern].append(key)
        for name, patterns in merged.items():
            sources[name] = Source(self._experts(name, patterns, converters), "stacked")
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in sources:  # a tied parameter is stored under any of its names
                sources.setdefault(first[id(parameter)], sources[name])
        if missing := [name for name in first.values() if name not in sources]:
            remedy = "write model.weights=scratch, or copy the files again"
            raise ValueError(f"path={folder}: its files lack {some_names(missing)}; {remedy}")
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        ignored += [r"\.attn\.(masked_)?bias$", r"^lm_head\.weight$"]
        unknown = (name for name in sources if name not in state)  # such as more layers
        if left := [n for n in unknown if not any(re.search(part, n) for part in ignored)]:
            raise ValueError(
                f"path={folder}: the model has no {some_names(left)}, which its files have; use "
                "its own config.json, or model.weights=scratch"
            )
        return sources

    def _experts(
        self, name: str, patterns: dict[str, list[str]], converters: list[Any]
    ) -> list[list[str]]:
        """The tensors of an expert merge. Raises ValueError for any other conversion."""
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


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """A sort key: experts.10 after experts.9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in key.split(".")]
