"""The memory that training takes on each pipeline rank, estimated: nothing is allocated.

Parameters, gradients and optimizer state as `fsdp.zero` shards them, what FSDP gathers of one block
at a time, the activations of all microbatches that are in flight at once, queued weight gradients,
the messages between stages, and the buffers of one backward, mainly the logits' gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from titanlike.config.schema import (
    ChunkedCrossEntropy,
    Config,
    SelectiveActivationCheckpoint,
    TraceSplit,
)
from titanlike.data.example_batch import example_batch
from titanlike.graph.cut import messages
from titanlike.graph.model_graph import ModelGraph
from titanlike.optim.loss import build_loss
from titanlike.optim.muon import hidden_matrices
from titanlike.parallel.sharding import compute_dtype
from titanlike.pipeline.from_config import defers_weight_gradients
from titanlike.pipeline.order import Order
from titanlike.split.unit_costs import CostError, UnitCosts, state_bytes

# FSDP's buffers for a block: gathered, copied, the next one's, and its gradients, per parameter
_GATHERED = {1: 10, 2: 10, 3: 20}

# Muon's copies of its matrices at an update: each is sent, received, and sent and received again
_UPDATE = 5

# Received activations are those that a stage saves; beside them messages under way and gradients
_MESSAGES = 2


class RankMemory:
    """Of stages that are known, for any choice of blocks that are recomputed."""

    def __init__(
        self,
        config: Config,
        model_graph: ModelGraph,
        order: Order,
        zero: int,
        parameters: Sequence[Mapping[str, int]],
    ) -> None:
        """parameters: of each stage, name -> elements. Units that cannot be run alone count only with
        their parameters."""
        rows = config.batch_size // config.dp // order.microbatches
        targets = example_batch(config)["targets"].repeat_interleave(rows, 0)
        self.tokens = targets.numel()  # of a microbatch
        unit_costs = None  # where units are not whole
        if not isinstance(config.split, TraceSplit):
            unit_costs = UnitCosts(model_graph, targets, build_loss(config.loss))
        self.unit_costs = unit_costs
        self.unknown = ""  # why activations are not counted
        self._order = order
        self._stages = model_graph.stages
        units = sum(map(len, self._stages))
        saved, kept, queued = [0] * units, [0] * units, [0] * units
        block = 0  # parameters of the largest unit
        if unit_costs is not None:
            numel = unit_costs.parameter_table(lambda parameter: parameter.numel())
            block = max(int(numel[at, at + 1]) for at in range(units))
            try:
                saved = unit_costs.saved_bytes()
                kept = unit_costs.recomputed_bytes(saved_operators(config))
                if order.splits_backward and defers_weight_gradients(config.schedule):
                    queued = unit_costs.queued_bytes()
            except CostError as error:
                self.unknown = str(error)
                saved, kept, queued = [0] * units, [0] * units, [0] * units
        names = [name for stage in self._stages for name in stage]
        self._saved = dict(zip(names, saved, strict=True))
        self._kept = dict(zip(names, kept, strict=True))
        self._queued = dict(zip(names, queued, strict=True))

        hidden = hidden_matrices(model_graph.model, config.optimizer)
        state = [
            sum(size * state_bytes(config, zero, name in hidden) for name, size in stage.items())
            for stage in parameters
        ]
        shards = config.dp // config.replicate
        item = compute_dtype(config).itemsize
        matrices = [sum(stage[name] for name in hidden & stage.keys()) for stage in parameters]
        self._update = _UPDATE * item * max(matrices) // shards if shards > 1 else 0
        sharing = config.dp > 1 or config.precision.low or config.fsdp.cpu_offload
        graphs = model_graph.graphs(model_graph.fields, True)
        flows = [[sum(t.nbytes for t in flow) for flow in messages(graph)] for graph in graphs]
        self._sent = [sent for _, sent in flows]
        last = order.stages - 1
        self._logits = max(2 * saved[-1], _chunk_bytes(config, model_graph, self.tokens))
        self._steady = []  # bytes on each rank that do not depend on what is in flight
        for rank in range(len(order.ranks)):
            local = order.local(rank)
            steady = sum(state[stage] for stage in local)
            received = sum(flows[stage][0] for stage in local if stage)
            answered = sum(flows[stage][1] for stage in local if stage < last)
            steady += (received + answered) * _MESSAGES
            steady += _GATHERED[zero] * block if sharing else 0
            self._steady.append(int(steady))

    def of_rank(self, rank: int, recomputed: Sequence[Collection[str]]) -> int:
        """Bytes on a pipeline rank; recomputed: blocks of each stage."""
        order, waiting, queued, working = self._order, {}, {}, 0
        for stage in order.local(rank):
            again = set(recomputed[stage])
            units = self._stages[stage]
            kept = sum(self._kept[n] if n in again else self._saved[n] for n in units)
            waiting[stage] = kept + self._sent[stage]
            queued[stage] = sum(self._queued[name] for name in units)
            # a backward's temporaries; a recomputed block's activations are in memory again
            parts = [self._saved[n] // 2 + (self._saved[n] if n in again else 0) for n in units]
            if stage == order.stages - 1:
                parts.append(self._logits)
            working = max(working, *parts, 0)
        now = most = 0
        for act in order.ranks[rank]:
            if act.kind == "F":
                now += waiting[act.stage]
            elif act.kind == "B":
                now -= waiting[act.stage]
            elif act.kind == "I":
                now += queued[act.stage] - waiting[act.stage]
            else:
                now -= queued[act.stage]
            most = max(most, now)
        return self._steady[rank] + max(working + most, self._update)

    def of_ranks(self, recomputed: Sequence[Collection[str]]) -> list[int]:
        """As `of_rank`, of each pipeline rank."""
        return [self.of_rank(rank, recomputed) for rank in range(len(self._order.ranks))]


def saved_operators(config: Config) -> list[str]:
    """Operators whose results a recomputed block keeps."""
    how = config.activation_checkpoint
    return how.save if isinstance(how, SelectiveActivationCheckpoint) else []


def _chunk_bytes(config: Config, model_graph: ModelGraph, tokens: int) -> int:
    """Bytes of a chunk of logits in its backward: logits, softmax, gradient."""
    logits = model_graph.meta_output(model_graph.fields, True)
    if not isinstance(config.loss, ChunkedCrossEntropy) or not isinstance(logits, Tensor):
        return 0
    return 3 * 4 * min(config.loss.chunk, tokens) * logits.shape[-1]
