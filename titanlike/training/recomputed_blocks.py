"""Which blocks are computed again in the backward (`activation_checkpoint`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config, EveryActivationCheckpoint, TraceSplit
from titanlike.graph.cut import StageGraph
from titanlike.graph.model_graph import ModelGraph
from titanlike.graph.recording import Node

_FIX = "activation_checkpoint=none"


def recomputed_blocks(
    config: Config, model_graph: ModelGraph, graphs: Sequence[StageGraph]
) -> list[list[str]]:
    """Of each stage the blocks to recompute. Those that checkpoint themselves are left alone.

    graphs: of the stages, in training. Raises ConfigError for a block that gives other results when
    it is computed again, and where there are no blocks.
    """
    how = config.activation_checkpoint
    if how.name == "none":
        return [[] for _ in graphs]
    every = how.every if isinstance(how, EveryActivationCheckpoint) else 1
    calls = [node for graph in graphs for node in graph.nodes if node.kind == "unit"]
    own = {node.target for node in calls if node.checkpointed or node.checkpoints_inside}
    blocks = [unit.name for unit in model_graph.units if unit.block]
    chosen = {*blocks[::every]} - own
    problems = [*_problems(how.name, (node for node in calls if node.target in chosen))]
    if isinstance(config.split, TraceSplit):
        reason = "split=trace takes the blocks apart that would be recomputed"
        problems.append(Problem("activation_checkpoint", how.name, reason, "split=points"))
    elif not blocks:
        reason = "the model has no blocks, that is no list of layers"
        problems.append(Problem("activation_checkpoint", how.name, reason, _FIX))
    if problems:
        raise ConfigError(problems)
    return [[name for name in graph.units if name in chosen] for graph in graphs]


def _problems(choice: str, calls: Iterable[Node]) -> Iterator[Problem]:
    for name, once in dict.fromkeys((node.target, node.once) for node in calls if node.once):
        reason = f"its {name} {once}: the backward would compute it again with another result"
        yield Problem("activation_checkpoint", choice, reason, _FIX)
