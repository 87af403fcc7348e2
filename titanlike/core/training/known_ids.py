"""The ids of a user's own samples, compared with the model's vocabulary on the CPU: of the first
samples before a launch, then of every batch."""

from __future__ import annotations

from typing import Any

from torch import nn

from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.checked import CheckedSource
from titanlike.core.data.kinds import DataError
from titanlike.core.data.sources import IGNORE, Batch, Data
from titanlike.core.models.registry import MODELS, complete_arguments


def vocabulary_of(model: nn.Module, section: Custom) -> int | None:
    """Return the model's vocabulary size; None if it does not declare one, or a user's own model has
    no embedding of this size."""
    known = complete_arguments(section).get("vocab_size")
    known = getattr(getattr(model, "config", None), "vocab_size", known)
    sizes = {
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return known if section.name in MODELS or known in sizes else None


def check_first_ids(data: Data, known: int | None, config: Config) -> None:
    """Raise DataError if a sample that was read as the data were opened has a token id that a model
    of `known` ids does not have."""
    train: Any = data.train
    train = getattr(getattr(train, "open_reader", None), "checks", train)  # a stream's
    sources = {"training": train, "validation": data.validation}
    for part, source in sources.items():
        for bad, name, i in source.first_ids if isinstance(source, CheckedSource) else ():
            _check_id(bad, name, f"{part} sample {i}", known, config)


def with_known_ids(batch: Batch, known: int | None, config: Config) -> Batch:
    """Return the batch. Raises DataError for a token id that a model of `known` ids does not have;
    torch would stop in a kernel."""
    for name in ("inputs", "targets"):
        ids = batch[name]
        if known is None or ids.is_floating_point() or not ids.is_cpu or ids.dim() != 2:
            continue
        learned = ids.masked_fill(ids == IGNORE, 0) if name == "targets" else ids
        for bad in (int(end) for end in learned.aminmax()):
            if not 0 <= bad < known:
                row = int((ids == bad).nonzero()[0, 0])
                _check_id(bad, name, f"sample {row} of a batch", known, config)
    return batch


def _check_id(bad: int, name: str, sample: str, known: int | None, config: Config) -> None:
    # the targets of a user's own model may be anything
    if known is None or 0 <= bad < known or (name != "inputs" and config.model.name not in MODELS):
        return
    reason = f"{sample} has the id {bad} in {name!r}, and the model has {known}"
    fix = f"return ids from 0 to {known - 1}"
    fix += f", or a Data with vocab_size={bad + 1} or more" if bad >= known else ""
    raise DataError("data.name", config.data.name, reason, fix)
