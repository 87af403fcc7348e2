"""What another framework has written of its training: a folder, `verify.against`, of

    weights.safetensors    parameters before the first step; without it, as the config initializes
    gradients.safetensors  of the first step, before they are clipped
    batch1.safetensors     inputs [B, T], targets [B, T] of the first step; batch2.safetensors, ...;
                           without these, the config's data
    steps.json             {"losses": [mean over the tokens of the first step, ...]}

Names are the model's own, those that `titanlike export` writes, or others that `verify.names` maps.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.files import read_object
from titanlike.config.schema import Config, Custom
from titanlike.data.order import shuffled_index
from titanlike.data.registry import vocab_size
from titanlike.data.sources import Data
from titanlike.models.hf_names import FAMILIES, counterpart
from titanlike.models.hf_weights import Source, source_of
from titanlike.models.registry import build_model, complete_arguments, resolve_model
from titanlike.proof.comparison import compare
from titanlike.proof.recorder import described
from titanlike.proof.reference import Reference, loss_name
from titanlike.proof.verification import Found

_WRAPPERS = re.compile(r"^module\.|\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")


def with_batches(config: Config) -> Config:
    """The config with the dump's batches for data, and no more steps than it has. Raises
    ConfigError where it is no dump, or of other sizes."""
    folder = Path(config.verify.against or "").expanduser().absolute()
    try:
        losses = read_object(folder / "steps.json")["losses"]
        load_file(folder / "gradients.safetensors")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = f"is no dump of a training: {type(error).__name__}: {error}"
        fix = "a folder with gradients.safetensors and steps.json, see docs/against.md"
        raise ConfigError([Problem("verify.against", folder, reason, fix)]) from None
    steps = min(config.verify.steps, len(losses))
    config = replace(config, verify=replace(config.verify, against=str(folder), steps=steps))
    if not (folder / "batch1.safetensors").exists():
        return config
    size, length = load_file(folder / "batch1.safetensors")["inputs"].shape[:2]
    if (size, length) != (config.batch_size, config.seq_len):
        reason = f"{folder} has batches of {size} samples of {length} tokens"
        fix = f"batch_size={size} seq_len={length}"
        raise ConfigError([Problem("batch_size", config.batch_size, reason, fix)])
    args = {"folder": str(folder), "vocab": vocab_size(config), "seed": config.seed, "steps": steps}
    return replace(config, data=Custom(f"{__name__}.dumped_batches", args))


def dumped_batches(folder: str, vocab: int | None, seed: int, steps: int) -> Data:
    """The samples of these steps, placed so that the run's order gives them as they were."""
    files = [load_file(f"{folder}/batch{step}.safetensors") for step in range(1, steps + 1)]
    fields = {name: torch.cat([file[name] for file in files]) for name in files[0]}
    count = len(fields["inputs"])
    places = np.argsort(shuffled_index(np.arange(count), count, seed)).tolist()
    samples = [{name: value[at] for name, value in fields.items()} for at in places]
    return Data(samples, samples, vocab, f"the batches of {folder}")


def compare_with_dump(config: Config, exact: Reference, rounded: Reference | None) -> Found:
    """Losses, and gradients in the order of the backward, of the dump against one process."""
    rows, whats = [], {}
    losses = read_object(Path(config.verify.against or "") / "steps.json")["losses"]
    for step, loss in enumerate(losses[: config.verify.steps], 1):
        values = [loss, *(of.losses[loss_name(step)] for of in (exact, rounded) if of)]
        rows.append(
            compare("loss", loss_name(step), *torch.tensor(values, dtype=torch.float64)[:, None])
        )
    model = build_model(resolve_model(config))
    gradients, more = dumped(config, model, "gradients")
    for name, right in reversed(exact.gradients.items()):
        if name in gradients:
            in_bf16 = rounded.gradients[name] if rounded else None
            rows.append(compare("gradient", name, gradients[name], right, in_bf16))
            if not rows[-1].agrees:
                whats[name] = described(gradients[name], right, config)
    frozen = {f"{name}: missing" for name, right in exact.gradients.items() if not right.any()}
    wrong = [f"weights: {text}" for text in dumped(config, model, "weights")[1]]
    wrong += [f"gradients: {text}" for text in more if text not in frozen]
    return Found(rows, wrong, 1, gradients=whats)


def dumped(config: Config, model: nn.Module, kind: str) -> tuple[dict[str, Tensor], list[str]]:
    """(tensors of a file by the model's names; a line for what is missing, extra, or of another
    shape)."""
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
    # whether matrices are as transformers' Conv1D has them: those that are no squares tell
    turned = any(
        source.form == "transposed" and files[source.name].shape == shapes[name][::-1]
        for name, source in sources.items()
        if source.rows[0][0] in files and len({*shapes[name]}) == 2
    )
    found, wrong, used = {}, [], set[str]()
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
        value = value.T if form == "transposed" and turned else value
        if value.shape == shape:
            found[name] = value.float()
        else:
            how = "transposed, " if value.shape == shape[::-1] else ""
            wrong.append(f"{name}: {how}{[*value.shape]} in the dump, {[*shape]} in the model")
    return found, wrong + [f"{name}: extra" for name in files if name not in used]


def _renamed(
    given: dict[str, Tensor], path: str | None, shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Without the names of wrappers, and as the map in a file has it: name -> name, or several
    names, of which a tensor has the rows."""
    files = {_WRAPPERS.sub("", name): tensor for name, tensor in given.items()}
    names = yaml.safe_load(Path(path).expanduser().read_text()) if path else {}
    for theirs, ours in names.items():
        pattern = re.escape(theirs).replace(re.escape("#"), r"(\d+)")
        for found in [match for name in files if (match := re.fullmatch(pattern, name))]:
            targets = [ours] if isinstance(ours, str) else ours
            for number in found.groups():
                targets = [target.replace("#", number, 1) for target in targets]
            tensor = files.pop(found.string)
            rows = [shapes[target][0] for target in targets if target in shapes]
            whole = len(targets) > 1 and len(rows) == len(targets) and sum(rows) == len(tensor)
            parts = tensor.split(rows) if whole else [tensor]
            files |= zip(targets, parts, strict=False)
    return files
