"""The ids of a user's own samples, compared with the model's vocabulary on the CPU."""

from __future__ import annotations

from typing import Any

from titanlike.config.schema import Config
from titanlike.data.kinds import DataError
from titanlike.data.sources import IGNORE, Batch
from titanlike.models.registry import complete_arguments
from titanlike.training.train_plan import TrainPlan


def vocabulary_of(plan: TrainPlan) -> int | None:
    """Return the model's vocabulary size; None if it does not declare one."""
    model: Any = plan.model_graph.model
    known = complete_arguments(plan.model).get("vocab_size")
    return getattr(getattr(model, "config", None), "vocab_size", known)


def with_known_ids(batch: Batch, known: int | None, config: Config) -> Batch:
    """Return the batch. Raises DataError for a token id that a model of `known` ids does not have;
    torch would stop in a kernel."""
    for name in ("inputs", "targets"):
        ids = batch[name]
        if known is None or ids.is_meta or ids.is_floating_point() or not ids.is_cpu:
            continue
        learned = ids.masked_fill(ids == IGNORE, 0) if name == "targets" else ids
        low, high = (int(end) for end in learned.aminmax())
        if low < 0 or high >= known:
            bad = low if low < 0 else high
            row = int((ids == bad).nonzero()[0, 0])
            reason = (
                f"sample {row} of a batch has the id {bad} in {name!r}, and the model has {known}"
            )
            fix = f"return ids from 0 to {known - 1}"
            fix += f", or a Data with vocab_size={high + 1} or more" if high >= known else ""
            raise DataError("data.name", config.data.name, reason, fix)
    return batch
