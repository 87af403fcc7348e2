"""Another framework's training, read from a folder (`verify.against`) of

    weights.safetensors    parameters before the first step; without it, as the config initializes
    gradients.safetensors  of the first step, before they are clipped
    batch1.safetensors     inputs [B, T], targets [B, T] of the first step; batch2.safetensors, ...;
                           without these, the config's data
    steps.json             {"losses": [mean over the tokens of the first step, ...]}

dump.py maps the names of its tensors.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.files import read_object
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.order import shuffled_index
from titanlike.core.data.registry import vocab_size
from titanlike.core.data.sources import Data
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.proof.comparison import compare
from titanlike.proof.dump import dumped
from titanlike.proof.recorder import described
from titanlike.proof.reference import Reference, loss_name
from titanlike.proof.verification import Verdict


def with_batches(config: Config) -> Config:
    """The config with the dump's batches as data, and at most its steps. Raises ConfigError if the
    folder is no dump, or has other sizes."""
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
    """The samples of these steps, placed so that the run's data order reproduces them."""
    files = [load_file(f"{folder}/batch{step}.safetensors") for step in range(1, steps + 1)]
    fields = {name: torch.cat([file[name] for file in files]) for name in files[0]}
    count = len(fields["inputs"])
    places = np.argsort(shuffled_index(np.arange(count), count, seed)).tolist()
    samples = [{name: value[position] for name, value in fields.items()} for position in places]
    return Data(samples, samples, vocab, f"the batches of {folder}")


def compare_with_dump(config: Config, exact: Reference, rounded: Reference | None) -> Verdict:
    """Compare the dump's losses and gradients (in backward order) with one process."""
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
            row = compare("gradient", name, gradients[name], right, in_bf16)
            rows.append(replace(row, cut=0.0))  # a dump may have been written in bf16
            if not rows[-1].agrees:
                whats[name] = described(gradients[name], right, config)
    frozen = {f"{name}: missing" for name, right in exact.gradients.items() if not right.any()}
    wrong = [f"weights: {text}" for text in dumped(config, model, "weights")[1]]
    wrong += [f"gradients: {text}" for text in more if text not in frozen]
    return Verdict(rows, wrong, 1, gradients=whats)
