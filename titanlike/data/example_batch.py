"""The fields, shapes and dtypes of a batch, known before any is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from titanlike.config.errors import Problem
from titanlike.config.schema import Config, Custom
from titanlike.data.checked_source import stack, with_checked_samples
from titanlike.data.checks import call_custom
from titanlike.data.sources import Data


def example_batch(config: Config, data: Data | None = None) -> dict[str, torch.Tensor]:
    """A batch of one sequence on the meta device, in the dtypes that the model receives.

    Where lengths vary, with the maximal length. data: if already open; otherwise a user's own data
    is opened. Raises DataError for an invalid sample of the user's.
    """
    if isinstance(config.data, Custom):
        opened = data or call_custom(config.data, config.seq_len)
        batch = with_checked_samples(opened, config.data.name, config.seq_len).train.example()
    else:
        ids = torch.empty(config.seq_len, dtype=torch.int64, device="meta")
        sample = {"inputs": ids, "targets": ids}
        if getattr(config.data, "documents", False):
            sample["document_ids"] = ids
        batch = stack([sample])
    dtype = torch.bfloat16 if config.precision.name == "bf16" else torch.float32
    return {
        name: torch.empty(
            tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta"
        )
        for name, tensor in batch.items()
    }


def field_problems(config: Config, model: nn.Module, fields: Iterable[str]) -> list[Problem]:
    """A problem for each field of the batch that the model's forward has no argument for."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return []
    by_name = [
        p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    takes = (
        f"beside its inputs it takes {', '.join(by_name)}" if by_name else "it takes inputs only"
    )
    problems = []
    for name in fields:
        if name == "inputs" or name in by_name:
            continue
        key, value, fix = _source_of(config, name)
        reason = (
            f"gives the batch a field {name}, which the forward of model.name={config.model.name} "
            f"does not take ({takes})"
        )
        problems.append(Problem(key, value, reason, fix))
    return problems


def _source_of(config: Config, name: str) -> tuple[str, Any, str]:
    """(config key of a field of the batch, its value, what to write to remove the field)."""
    if isinstance(config.data, Custom):
        fix = f"samples without it, or a forward with an argument {name}"
        return "data.name", config.data.name, fix
    return "data.documents", True, "data.documents=false"
