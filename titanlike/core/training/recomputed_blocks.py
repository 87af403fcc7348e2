"""Choose the blocks to recompute in the backward (`activation_checkpoint`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from titanlike.core.config.errors import ConfigError, Problem, nearest
from titanlike.core.config.groups.computation import (
    EveryActivationCheckpoint,
    FitActivationCheckpoint,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.pipeline import TraceSplit
from titanlike.core.config.schema import Config
from titanlike.core.distributed.transform import Recomputed
from titanlike.core.graph.cut import StageGraph
from titanlike.core.graph.model_graph import ModelGraph
from titanlike.core.graph.recording import Node
from titanlike.core.torch_private.operators import operator_names

if TYPE_CHECKING:  # imported where memory is estimated
    from titanlike.planning.costs.rank_memory import RankMemory

_FIX = "activation_checkpoint=none"
_ALL = "activation_checkpoint=full"
_MEMORY = "activation_checkpoint.memory=80GiB"


def choose_recomputed(
    config: Config,
    model_graph: ModelGraph,
    graphs: Sequence[StageGraph],
    rank_memory: Callable[[], RankMemory],
    limit: Callable[[], int | None],
) -> Recomputed:
    """Choose the blocks to recompute, except those that checkpoint themselves or take gradients.

    graphs: each stage's in training; rank_memory, limit: for `fit`, the estimate and the bytes of a
    device. Raises ConfigError for blocks that would not repeat their results, a model without
    blocks, names in `save` that match no operator, and `fit` without a memory estimate.
    """
    how = config.activation_checkpoint
    every = how.every if isinstance(how, EveryActivationCheckpoint) else 1
    calls = [node for graph in graphs for node in graph.nodes if node.kind == "unit"]
    excluded = {node.target for node in calls if node.checkpointed or node.checkpoints_inside}
    excluded |= model_graph.taking_gradients
    blocks = [unit.name for unit in model_graph.units if unit.block]
    chosen = {*blocks[::every]} - excluded
    problems = [*_problems(how.name, (node for node in calls if node.target in chosen))]
    if isinstance(config.split, TraceSplit):
        reason = "split=trace takes the blocks apart that would be recomputed"
        problems.append(Problem("activation_checkpoint", how.name, reason, "split=points"))
    elif not blocks:
        reason = "the model has no blocks, that is no list of layers"
        problems.append(Problem("activation_checkpoint", how.name, reason, _FIX))
    if isinstance(how, SelectiveActivationCheckpoint):
        problems += _name_problems(how.save)
    if problems:
        raise ConfigError(problems)
    candidates = [[name for name in graph.units if name in chosen] for graph in graphs]
    if not isinstance(how, FitActivationCheckpoint):
        return Recomputed(candidates)
    budget = how.memory if how.memory is not None else limit()
    if budget is None:
        reason = "it is not known how much memory this machine has"
        raise ConfigError([Problem("activation_checkpoint.memory", None, reason, _MEMORY)])
    memory = rank_memory()
    if memory.unknown:
        reason = f"the memory of its activations cannot be estimated: {memory.unknown}"
        raise ConfigError([Problem("activation_checkpoint", "fit", reason, _ALL)])
    fewest, sizes = memory.fit(candidates, budget)
    return Recomputed(fewest, budget, sizes)


def _name_problems(save: Sequence[str]) -> Iterator[Problem]:
    known = operator_names()
    shipped = SelectiveActivationCheckpoint().save  # also of techniques that are not imported
    for pattern in save:
        if pattern not in shipped and not any(fnmatchcase(name, pattern) for name in known):
            base = pattern.rpartition(".")[0]  # "aten.mm.default" is an overload of "aten.mm"
            near = base if base in known else nearest(pattern, known)
            others = [name for name in save if name != pattern]
            fixed = ",".join([*others, *([near] if near and near not in others else [])])
            fix = f"activation_checkpoint.save=[{fixed}]"
            yield Problem("activation_checkpoint.save", pattern, "no operator has this name", fix)


def _problems(choice: str, calls: Iterable[Node]) -> Iterator[Problem]:
    for name, once in dict.fromkeys((node.target, node.once) for node in calls if node.once):
        reason = f"its {name} {once}: the backward would compute it again with another result"
        yield Problem("activation_checkpoint", choice, reason, _FIX)
