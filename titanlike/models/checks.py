"""Checks of a model that could be built: its sizes against the data's, and tensors that stages
would lose."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from titanlike.config.errors import Problem
from titanlike.config.schema import Config
from titanlike.data.registry import vocab_size
from titanlike.models.registry import LENGTHS


def model_problems(model: nn.Module, config: Config) -> list[Problem]:
    """Return the problems of a model on meta with this config."""
    problems: list[Problem] = []

    def wrong(key: str, value: Any, reason: str, fix: str) -> None:
        problems.append(Problem(key, value, reason, fix))

    if hasattr(model, "initial"):
        problems += _initial_problems(config, model)
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars and (config.dp * config.cp > 1 or config.fsdp.cpu_offload):
        reason = f"its parameter {scalars[0]} has no dimension, so FSDP cannot shard it"
        wrong("model.name", config.model.name, reason, "a parameter of shape [1]")
    unregistered = _unregistered_tensor(model)
    if unregistered is not None:
        reason = f"its attribute {unregistered} is a tensor and not a buffer: it would stay on meta"
        fix = f"self.register_buffer('{unregistered.rpartition('.')[2]}', ..., persistent=False)"
        wrong("model.name", config.model.name, reason, fix)
    longest = getattr(model, "max_seq_len", None)
    if longest is not None and longest < config.seq_len:
        key = next((key for key in LENGTHS if key in config.model.args), LENGTHS[0])
        fix = f"seq_len={longest} or model.{key}={config.seq_len}"
        reason = f"is longer than the model's {key}={longest}"
        wrong("seq_len", config.seq_len, reason, fix)
    more, weight = len(getattr(model, "mtp", ())), getattr(config.loss, "mtp_weight", None)
    if more and not weight:
        reason = "the tokens that model.num_nextn_predict_layers predicts have no loss"
        fix = "loss.mtp_weight=0.3" if weight is not None else "loss=cross_entropy"
        wrong("loss.mtp_weight", weight, reason, fix)
    if weight and not more:
        reason = "the model predicts the next token alone"
        wrong("loss.mtp_weight", weight, reason, "model.num_nextn_predict_layers=1")
    if config.model.args.get("vocab_size") is not None:
        needed, size = vocab_size(config), config.model.args["vocab_size"]
        if needed is not None and size < needed:
            reason = f"is smaller than the {needed} token ids of data={config.data.name}"
            wrong("model.vocab_size", size, reason, "model.vocab_size=null (taken from the data)")
    return problems


def _unregistered_tensor(model: nn.Module) -> str | None:
    """Return the name of a tensor attribute that is neither parameter nor buffer, or None."""
    registered = {id(t) for t in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value) not in registered:
                return f"{name}.{attribute}".lstrip(".")
    return None


def _initial_problems(config: Config, model: nn.Module) -> list[Problem]:
    """Yield the first problem with what `model.initial(name)` returns."""
    initial: Any = model.initial
    for name, _ in model.named_parameters():
        answer = initial(name)
        pair = isinstance(answer, tuple) and len(answer) == 2
        if not pair or not all(isinstance(number, (int, float)) for number in answer):
            reason = f"its initial({name!r}) returned {answer!r}"
            fix = "return (mean, standard deviation) of a normal distribution"
            return [Problem("model.name", config.model.name, reason, fix)]
    return []
