"""How many tensor-parallel ranks a search tries: as many as the model's plan allows on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from titanlike.config.errors import ConfigError
from titanlike.config.schema import Config
from titanlike.config.validate import MAX_TENSOR_RANKS
from titanlike.models.registry import build_model, resolve_model
from titanlike.parallel.tp.collectives import TensorRanks
from titanlike.parallel.tp.plan import tensor_plan, written_plan
from titanlike.parallel.tp.styles import divide

TensorSizes = Callable[[Config], Mapping[int, str]]  # tp -> why it cannot be, or ""


def tensor_sizes(config: Config, ranks: int, machine: int) -> dict[int, str]:
    """Each tp that divides `ranks` -> why it cannot be, or ""; 1 alone for a model without a plan.

    machine: ranks of one. Raises ConfigError where the plan in the config is wrong.
    """
    found = {1: ""}
    resolved = resolve_model(config)
    for tp in range(2, min(ranks, MAX_TENSOR_RANKS) + 1):
        if ranks % tp:
            continue
        divided = replace(config, tp=tp)
        model = build_model(resolved)
        try:
            modules = tensor_plan(divided, model)
        except ConfigError:
            if written_plan(config) is not None:
                raise
            return {1: ""}
        if machine % tp:
            found[tp] = f"tp={tp}: activations of every layer would go over the network: a machine"
            found[tp] += f" has {machine} ranks"
            continue
        try:
            divide(model, modules, TensorRanks(tp, 0), whole_logits=False)
            found[tp] = ""
        except ConfigError as error:
            found[tp] = str(error.problems[0])
    return found
