"""The fields, shapes and dtypes of a batch, known before any is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn

from titanlike.config.errors import Problem
from titanlike.config.schema import Config, Custom
from titanlike.data.checked_source import CheckedSource, stack, with_checked_samples
from titanlike.data.checks import call_custom
from titanlike.data.sources import Data


def example_batch(config: Config, data: Data | None = None) -> dict[str, torch.Tensor]:
    """A batch of one sequence on the meta device, in the dtypes that the model receives.

    Where lengths vary, with the maximal length. data: if already open; otherwise a user's own data
    is opened. Raises DataError for an invalid sample of the user's.
    """
    if isinstance(config.data, Custom):
        opened = data or call_custom(config.data, config.seq_len)
        train = with_checked_samples(opened, config.data.name, config.seq_len).train
        assert isinstance(train, CheckedSource)
        batch = train.example()
    else:
        ids = torch.empty(config.seq_len, dtype=torch.int64, device="meta")
        sample = {"inputs": ids, "targets": ids}
        if getattr(config.data, "documents", False):
            sample["document_ids"] = ids
        batch = stack([sample])
    dtype = torch.bfloat16 if config.precision.low else torch.float32
    dtypes = {name: dtype if t.is_floating_point() else t.dtype for name, t in batch.items()}
    return {n: torch.empty(t.shape, dtype=dtypes[n], device="meta") for n, t in batch.items()}


def field_problems(config: Config, model: nn.Module, fields: Iterable[str]) -> list[Problem]:
    """A problem for each field of the batch that the model's forward has no argument for."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # a cache is for generation, and no field
    by_name = [p.name for p in parameters[1:] if p.kind in kinds and p.name != "cache"]
    takes = f"beside its inputs it takes {', '.join(by_name)}"
    takes = takes if by_name else "it takes inputs only"
    problems = []
    for name in (name for name in fields if name not in ("inputs", *by_name)):
        reason = (
            f"gives the batch a field {name}, which the forward of model.name={config.model.name} "
            f"does not take ({takes})"
        )
        if isinstance(config.data, Custom):
            fix = f"samples without it, or a forward with an argument {name}"
            problems.append(Problem("data.name", config.data.name, reason, fix))
        else:
            problems.append(Problem("data.documents", True, reason, "data.documents=false"))
    return problems
