"""A layout's memory on its fullest rank, and its relative time of a step.

Estimated from a draft: nothing is allocated, no process is started. Memory is what training adds to
a process: parameters, gradients and optimizer state as `fsdp.zero` shards them, what FSDP gathers of
one block at a time, the activations of all microbatches that are in flight at once,
the messages between stages, and the buffers of one backward, mainly the logits' gradients.

Measured on 2 CPU cores, 15 layouts of models of 1M to 25M parameters, the fullest rank's growth was
0.98 to 1.57 times the estimate, and 0.94 to 1.25 times without the 45 MiB that libraries and gloo
take in each process. That is with freed blocks returned, as a GPU's allocator reuses them; where
glibc keeps them (no sharding, small microbatches) a CPU rank takes up to twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from titanlike.config.schema import ChunkedCrossEntropy, Config, TraceSplit
from titanlike.data.example_batch import example_batch
from titanlike.graph.cut import messages
from titanlike.optim.loss import build_loss
from titanlike.pipeline.order import Act, Order, awaited, needs, walk
from titanlike.split.unit_costs import CostError, UnitCosts, state_bytes
from titanlike.training.draft import Draft

# An action reads its weights, whatever its number of tokens: that takes as long as computing this
# many tokens (a GPU does 200 to 300 FLOPs per byte read). So small microbatches are slower.
_TOKENS_TO_READ_WEIGHTS = 256
# FSDP's buffers for a block: gathered, copied, the next one's, and its gradients, per parameter
_GATHERED = {1: 10, 2: 10, 3: 20}


@dataclass(frozen=True)
class Estimate:
    memory: int  # bytes that training takes on the fullest rank
    time: float  # of a step, in FLOPs of one rank: with the bubble, without traffic


def estimate(config: Config, draft: Draft) -> Estimate:
    """Estimate a layout, drafted from this config.

    A unit whose costs cannot be measured alone counts only with its parameters.
    """
    rows = config.batch_size // config.dp // draft.microbatches
    stages = [draft.stage_numel(stage) for stage in range(draft.order.stages)]
    edges = list(pairwise([0, *accumulate(map(len, draft.stages))]))
    units = sum(map(len, draft.stages))
    saved, flops = [0] * units, [0] * units
    sharing = config.dp > 1 or config.precision.name == "bf16" or config.fsdp.cpu_offload
    block = 0  # parameters of the largest unit
    if not isinstance(config.split, TraceSplit):
        targets = example_batch(config)["targets"].repeat_interleave(rows, 0)
        unit_costs = UnitCosts(draft.model_graph, targets, build_loss(config.loss))
        numel = unit_costs.parameter_table(lambda parameter: parameter.numel())
        block = max(int(numel[at, at + 1]) for at in range(units))
        try:
            saved, flops = unit_costs.saved_bytes(), unit_costs.flops()
        except CostError:
            flops = [int(numel[at, at + 1]) for at in range(units)]
    each = state_bytes(config, draft.zero)
    state = [parameters * each for parameters in stages]
    graphs = draft.model_graph.graphs(draft.fields, True)
    flows = [[sum(t.nbytes for t in flow) for flow in messages(graph)] for graph in graphs]
    waiting = [sum(saved[a:b]) + flows[s][1] for s, (a, b) in enumerate(edges)]
    working = [max(saved[a:b], default=0) // 2 for a, b in edges]
    # of logits: their gradient, and that of their softmax
    working[-1] = max(working[-1], 2 * saved[-1], _chunk_bytes(config, draft, rows))
    memory = []
    for rank in range(len(draft.order.ranks)):
        local = draft.order.local(rank)
        steady = sum(state[stage] for stage in local)
        received = sum(flows[stage][0] for stage in local if stage)
        answered = sum(flows[stage][1] for stage in local if stage < len(stages) - 1)
        steady += (received + answered) * draft.microbatches
        steady += _GATHERED[draft.zero] * block if sharing else 0
        steady += max(working[stage] for stage in local)
        memory.append(steady + _max_waiting(draft.order.ranks[rank], waiting))
    read = 1 + _TOKENS_TO_READ_WEIGHTS / (rows * config.seq_len)
    durations = [read * sum(flops[a:b]) for a, b in edges]
    return Estimate(int(max(memory)), step_time(draft.order, durations))


def _chunk_bytes(config: Config, draft: Draft, rows: int) -> int:
    """Bytes of a chunk of logits in its backward: logits, softmax, gradient."""
    logits = draft.model_graph.meta_output(draft.fields, True)
    if not isinstance(config.loss, ChunkedCrossEntropy) or not isinstance(logits, Tensor):
        return 0
    return 3 * 4 * min(config.loss.chunk, rows * config.seq_len) * logits.shape[-1]


def least_memory(config: Config, parameters: int) -> int:
    """Bytes that the ranks need on average, by the model's number of parameters alone."""
    zero = 3 if config.fsdp.zero == "auto" else config.fsdp.zero
    return int(parameters * state_bytes(config, zero) / config.pp)


def step_time(order: Order, durations: Sequence[float]) -> float:
    """When the last rank is done, if a stage's forward and backward take durations[stage].

    A forward is a third of it, as is either half of a split backward. Messages take no time.
    """
    clock = [0.0] * len(order.ranks)
    done: dict[Act, float] = {}
    for rank, act in walk(order):
        start = max([clock[rank], *(done[need] for need in needs(act, order.stages - 1))])
        clock[rank] = start + durations[act.stage] * (2 if act.kind == "B" else 1) / 3
        done[awaited(act)] = clock[rank]
    return max(clock)


def _max_waiting(acts: Sequence[Act], waiting: Sequence[int]) -> int:
    """The most bytes that wait for backwards at once; waiting: bytes of a microbatch by stage."""
    now = most = 0
    for act in acts:
        if act.kind == "F":
            now += waiting[act.stage]
            most = max(most, now)
        elif act.kind in "BW":
            now -= waiting[act.stage]
    return most
