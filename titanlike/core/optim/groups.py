"""Check the patterns of `optimizer.groups`, and tabulate which parameters each matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from titanlike.core.config.errors import Problem, nearest, override_text
from titanlike.core.config.optimizer import Optimizer, optimizer_kinds
from titanlike.core.config.parse import to_plain
from titanlike.core.metrics import units
from titanlike.core.optim.optimizer import (
    hidden_matrices,
    matrices_of,
    parameter_update,
    patterns_of,
)


def group_problems(choice: Optimizer, model: nn.Module) -> list[Problem]:
    """Return patterns of `optimizer.groups` that match no parameter or overlap, and settings
    without effect on the parameters that their pattern matches."""
    groups = choice.groups or {}

    def problem(pattern: str, reason: str, fix: str) -> Problem:
        given = {k: v for k, v in to_plain(groups[pattern]).items() if v is not None}
        return Problem(f"optimizer.groups.{pattern}", given, reason, fix)

    problems, hidden = [], hidden_matrices(model, choice)
    matrices = matrices_of(model)
    no_muon: dict[str, str] = {}  # pattern -> a parameter that Muon cannot update
    kinds: dict[str, set[str]] = {pattern: set() for pattern in groups}
    overlaps: dict[str, tuple[str, str]] = {}  # pattern -> a parameter, other patterns matching it
    for name, _ in model.named_parameters():
        matching = patterns_of(name, choice)
        if len(matching) > 1:
            overlaps.setdefault(matching[0], (name, ", ".join(matching[1:])))
        for pattern in matching:
            update = parameter_update(name, name in matrices, choice, name in hidden)
            kinds[pattern].add(update.name)
            if update.whole_matrices and name not in hidden:
                no_muon.setdefault(pattern, name)
    for pattern, name in no_muon.items():
        reason = f"Muon does not update {name}, only 2-D parameters of blocks"
        fix = "a pattern that matches these alone"
        if not choice.whole_matrices:
            reason = f"with optimizer={choice.name} there is no Muon"
            fix = "optimizer=muon, and {optimizer:adamw} for what AdamW is to update"
        problems.append(problem(pattern, reason, fix))
    for pattern, (name, others) in overlaps.items():
        fix = "patterns of which one alone matches each parameter"
        problems.append(problem(pattern, f"{name} is matched by {others}, too", fix))
    for pattern, updated_by in kinds.items():
        group = groups[pattern]
        if not updated_by:
            first = {parameter: name for name, parameter in model.named_parameters()}
            all_names = model.named_parameters(remove_duplicate=False)
            tied = [(n, first[p]) for n, p in all_names if patterns_of(n, choice) == [pattern]]
            like = nearest(pattern, first.values()) or next(iter(first.values()))
            fix, reason = f"a pattern of names such as {like}", "no parameter has such a name"
            if tied:
                reason = f"{tied[0][0]} is tied to {tied[0][1]}, whose name is the one that counts"
                fix = f"a pattern that matches {tied[0][1]}"
            problems.append(problem(pattern, reason, fix))
        for key in ("betas", "momentum"):
            value = getattr(group, key)
            fits = {name for name, kind in optimizer_kinds().items() if key in kind.group_keys}
            if value is not None and updated_by and not updated_by & fits:
                reason = f"{key} has no effect: its parameters are updated by {updated_by.pop()}"
                problems.append(problem(pattern, reason, f"a group without {key}"))
    return problems


def group_rows(
    choice: Optimizer, model: nn.Module, stage_parameters: Sequence[Mapping[str, int]]
) -> list[list[Any]]:
    """Tabulate the model's parameters by pattern of `optimizer.groups` and update; row 0 is
    headings.

    stage_parameters: name -> elements on a rank, for each stage.
    """
    hidden, matrices = hidden_matrices(model, choice), matrices_of(model)
    sizes = {name: size for stage in stage_parameters for name, size in stage.items()}
    numels_by_row: dict[tuple[Any, ...], list[int]] = {}
    order = [*(choice.groups or {}), "all others"]
    for name, _ in model.named_parameters():
        pattern = next(iter(patterns_of(name, choice)), "all others")
        update = parameter_update(name, name in matrices, choice, name in hidden)
        extra = [getattr(update, key) for key in update.group_keys]
        row = update.lr, update.weight_decay, ", ".join(map(override_text, extra))
        numels_by_row.setdefault((pattern, update.name, *row), []).append(sizes.get(name, 0))
    headings = ["optimizer.groups", "optimizer", "tensors", "parameters", "lr", "weight decay"]
    rows = sorted(numels_by_row.items(), key=lambda item: order.index(item[0][0]))
    return [
        [*headings, "betas, momentum"],
        *([*key[:2], len(numels), units.count(sum(numels)), *key[2:]] for key, numels in rows),
    ]
