"""What an exported folder has of each tensor of a checkpoint: names, shapes, dtypes, in which form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from titanlike.checkpoint.metadata import SavedTensor
from titanlike.checkpoint.safetensors_stream import DTYPES, Planned
from titanlike.checkpoint.shard_reader import dtype_of
from titanlike.config.schema import Custom
from titanlike.models.hf_names import FAMILIES, family_of, their_config, their_name
from titanlike.models.registry import build_model, complete_arguments

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Exported:
    """A tensor of the checkpoint and what becomes of it.

    form: same; transposed; stacked: each of its rows becomes as many tensors as there are outputs a
    row, cut along its first dimension; converted: by `convert`, name -> tensor.
    """

    name: str
    outputs: list[Planned]
    form: Literal["same", "transposed", "stacked", "converted"] = "same"
    convert: Callable[[Tensor], dict[str, Tensor]] | None = None


@dataclass(frozen=True)
class ExportPlan:
    """A folder: config.json, tensors, and the folder from which the model was started, if any."""

    config: dict[str, Any]
    tensors: list[Exported]
    source: Path | None = None


def plan_export(
    model: Custom, entries: Mapping[str, SavedTensor], seq_len: int, dtype: torch.dtype | None
) -> ExportPlan:
    """entries: of the checkpoint's model, by name; dtype: None = as the folder from which it was started has them, else as the checkpoint.

    Raises ValueError for a model that transformers does not have.
    """
    dtypes = {name: dtype or dtype_of(tensor) for name, tensor in entries.items()}
    shapes = {name: tensor.shape for name, tensor in entries.items()}
    if model.name == "hf":
        found = _of_transformers(model, shapes, dtypes, dtype)
    elif model.name in FAMILIES:
        found = _of_family(model, shapes, dtypes, seq_len)
    else:
        raise ValueError(
            f"model.name={model.name}: transformers has no such model, and a folder for it can be "
            f"written of {', '.join([*FAMILIES, 'hf'])}; write titanlike checkpoint consolidate for "
            "the weights alone"
        )
    # of dtypes of different sizes the larger ones first: then each begins at a multiple of its own
    found.tensors.sort(key=lambda one: -one.outputs[0].dtype.itemsize)
    return found


def _of_family(
    model: Custom,
    shapes: Shapes,
    dtypes: Mapping[str, torch.dtype],
    seq_len: int,
) -> ExportPlan:
    sizes, tensors = complete_arguments(model), []
    family = family_of(model.name, sizes)
    for name, shape in shapes.items():
        named, dtype = their_name(family, name), dtypes[name]
        if named.form == "unused":
            continue
        if named.form == "stacked":
            names = [named.theirs.replace("#", str(row)) for row in range(shape[0])]
            outputs = [Planned(one, shape[1:], dtype) for one in names]
        else:
            turned = shape[::-1] if named.form == "transposed" else shape
            outputs = [Planned(named.theirs, turned, dtype)]
        tensors.append(Exported(name, outputs, named.form))
    config = their_config(family, sizes, seq_len)
    return ExportPlan(config | {"dtype": word_of(tensors), "use_cache": True}, tensors)


def _of_transformers(
    model: Custom, shapes: Shapes, dtypes: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> ExportPlan:
    built: Any = build_model(model)
    folder = model.args.get("path")
    weights = built.folder_weights()
    if weights is None:
        tensors = _reverted(built, shapes, dtypes)
    else:
        tensors = []
        for name in shapes:
            source = weights.sources[name]
            keys = source if isinstance(source, list) else [[source]]
            outputs = []
            for key in (key for row in keys for key in row):
                stored = weights.files.slice(key)
                as_there = DTYPES.get(stored.get_dtype(), dtypes[name])
                outputs.append(Planned(key, tuple(stored.get_shape()), dtype or as_there))
            tensors.append(
                Exported(name, outputs, "stacked" if isinstance(source, list) else "same")
            )
    settings = built.config
    settings.architectures = [type(built).__name__]
    settings.dtype = word_of(tensors)
    return ExportPlan(settings.to_dict(), tensors, Path(folder) if folder else None)


def _reverted(built: Any, shapes: Shapes, dtypes: Mapping[str, torch.dtype]) -> list[Exported]:
    """In the names and forms that transformers' save_pretrained writes, by its own conversion: of
    each tensor alone, where that gives what it does of all together; else as the model has them."""
    from transformers.core_model_loading import revert_weight_conversion

    def revert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return revert_weight_conversion(built, tensors)

    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        alone = {name: revert({name: tensor}) for name, tensor in meta.items()}
        union = {key: one.shape for found in alone.values() for key, one in found.items()}
        same = union == {key: one.shape for key, one in revert(meta).items()}
    except Exception:  # one that needs several tensors raises whatever it finds missing
        same = False
    if not same:
        alone = {name: {name: tensor} for name, tensor in meta.items()}
    tensors = []
    for name, found in alone.items():
        outputs = [Planned(key, tuple(one.shape), dtypes[name]) for key, one in found.items()]
        convert = (lambda tensor, name=name: revert({name: tensor})) if same else None
        plain = [*found] == [outputs[0].name] and outputs[0].shape == shapes[name]
        form: Any = "converted" if convert and not plain else "same"
        tensors.append(Exported(name, outputs, form, convert))
    return tensors


def word_of(tensors: list[Exported]) -> str:
    """The dtype that has most of the values, as config.json names it."""
    sizes: dict[torch.dtype, int] = {}
    for one in (output for tensor in tensors for output in tensor.outputs):
        sizes[one.dtype] = sizes.get(one.dtype, 0) + one.bytes // one.dtype.itemsize
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")
