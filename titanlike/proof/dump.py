"""Tensors of another framework's dump (`verify.against`), renamed to the model's names: the file
may have the model's names, those of `titanlike export`, or others that `verify.names` maps."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from titanlike.core.config.schema import Config
from titanlike.core.config.yaml_files import read_yaml
from titanlike.core.models.registry import complete_arguments, resolve_model
from titanlike.hf.hf_names import FAMILIES, counterpart
from titanlike.hf.hf_weights import Source, source_of

_WRAPPERS = re.compile(r"^module\.|\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")


def dumped(config: Config, model: nn.Module, kind: str) -> tuple[dict[str, Tensor], list[str]]:
    """(tensors of a file by the model's names, a line for each missing, extra or misshapen one)."""
    path = Path(config.verify.against or "") / f"{kind}.safetensors"
    if not path.exists():
        return {}, []
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    files = _renamed(load_file(path), config.verify.names, shapes)
    sources = {name: Source([[name]]) for name in shapes}
    if config.model.name in FAMILIES:
        theirs = counterpart(config.model.name, complete_arguments(resolve_model(config)))
        sources = {name: source_of(theirs, name, shape) for name, shape in shapes.items()}
    # whether matrices are transposed, as in transformers' Conv1D: non-square ones tell
    transposed = any(
        source.form == "transposed" and files[source.name].shape == shapes[name][::-1]
        for name, source in sources.items()
        if source.rows[0][0] in files and len({*shapes[name]}) == 2
    )
    tensors, wrong, used = {}, [], set[str]()
    for name, *others in aliases.values():
        (rows, form), shape = sources[name], shapes[name]
        keys = [key for row in rows for key in row]
        if not all(key in files for key in keys):
            keys, form = [key for key in (name, *others) if key in files][:1], "same"
        used |= {*keys, *others}
        if not keys:
            wrong.append(f"{name}: missing")
            continue
        value = torch.stack([files[key] for key in keys]) if form == "stacked" else files[keys[0]]
        value = value.T if form == "transposed" and transposed else value
        if value.shape == shape:
            tensors[name] = value.float()
        else:
            how = "transposed, " if value.shape == shape[::-1] else ""
            wrong.append(f"{name}: {how}{[*value.shape]} in the dump, {[*shape]} in the model")
    return tensors, wrong + [f"{name}: extra" for name in files if name not in used]


def _renamed(
    given: dict[str, Tensor], path: str | None, shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Remove wrappers' prefixes, and apply the file's map: name -> name, or several names that each
    get rows of the tensor."""
    files = {_WRAPPERS.sub("", name): tensor for name, tensor in given.items()}
    names = read_yaml(Path(path).expanduser()) if path else {}
    for theirs, ours in names.items():
        pattern = re.escape(theirs).replace(re.escape("#"), r"(\d+)")
        for match_ in [match for name in files if (match := re.fullmatch(pattern, name))]:
            targets = [ours] if isinstance(ours, str) else ours
            for number in match_.groups():
                targets = [target.replace("#", number, 1) for target in targets]
            tensor = files.pop(match_.string)
            rows = [shapes[target][0] for target in targets if target in shapes]
            whole = len(targets) > 1 and len(rows) == len(targets) and sum(rows) == len(tensor)
            parts = tensor.split(rows) if whole else [tensor]
            files |= zip(targets, parts, strict=False)
    return files
