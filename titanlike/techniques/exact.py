"""Bitwise equal gradients, losses and norms in every layout (`numerics=exact`).

The unit of computation is a grain: `numerics.grain` sequences, one microbatch, so that kernels see
the same shapes in every layout. A grain's gradient is computed separately and rounded to the
weight's dtype. Grains are summed in fp32, in one binary tree over their position in the global
batch (`techniques/exact_sums.py`): on a rank as they are computed, over ranks by an all-to-all
that replaces FSDP's reduce-scatter, and its all-reduce over replicas. Losses are summed in the same
tree, squares of gradients as integers.

Sharded experts (`ep`) compute the tokens of each rank of their group separately: one grain per
rank, each a leaf of the tree.

A tied weight that two modules of a stage use has two trees, as on two stages; their sums are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.core.config.errors import Problem
from titanlike.core.config.schema import Config
from titanlike.core.distributed.async_reads import on_device
from titanlike.core.distributed.initialize import piece_seed
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.placement import APART, experts_of, has_statistics
from titanlike.core.distributed.sharding import compute_dtype
from titanlike.core.distributed.transform import Transform
from titanlike.core.graph.model_graph import ModelGraph
from titanlike.core.graph.recording import tree_map
from titanlike.core.torch_private.dtensor import local
from titanlike.core.torch_private.fsdp_sums import ShardedGradients, sharded_gradients
from titanlike.core.torch_private.tensors import add_values
from titanlike.techniques.exact_sums import (
    Key,
    SumTree,
    bins_of,
    keys_of,
    leaves_of,
    root_of_bins,
    row_squares,
    start_sum,
    tree_sum,
)

Gradients = list[Tensor | None]
Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]  # modules that have it, its names
# bytes; matmuls of unaligned fp32 vectors differed on a CPU (MKL, one to three rows)
_ALIGNED = 16


def model_problems(config: Config, model_graph: ModelGraph) -> list[Problem]:
    """What other layouts would sum in a different order, or draw on a different rank."""
    model, reasons = model_graph.model, []
    nodes = model_graph.recording(model_graph.fields, True).nodes
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    uses: dict[str, Counter[str]] = {}  # parameter -> uses by place
    used_by = Counter(id(node) for other in nodes for node in set(other.input_nodes))
    weights = dict(model.named_parameters(remove_duplicate=False))
    for node in nodes:
        if node.kind == "unit":
            module = model.get_submodule(node.target)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                uses.setdefault(first[id(parameter)], Counter())[f"{node.target}.{name}"] += 1
        elif node.kind == "weight" and node.target in weights:
            name = first[id(weights[node.target])]
            uses.setdefault(name, Counter())[f"{node.target} "] += used_by[id(node)]
        elif node.random and node.kind == "function":
            reasons.append(f"its forward draws random numbers outside of modules ({node.name})")
    for name, places in uses.items():
        outside = any(place.endswith(" ") for place in places)
        if places.total() > 1 and (outside or places.total() > 2 or len(places) == 1):
            reasons.append(
                f"its {name} is used {places.total()} times, not by two modules once each"
            )
    if any(map(has_statistics, model.modules())):
        reasons.append("its batch norms keep statistics of a whole batch")
    fix = "numerics=fast, or a model without that"
    problems = [
        Problem("model.name", config.model.name, f"not with numerics=exact: {reason}", fix)
        for reason in reasons[:3]
    ]
    if config.ep > 1:
        drawing = {node.target for node in nodes if node.kind == "unit" and node.random}
        reasons = _expert_problems(model, drawing, compute_dtype(config.precision).itemsize)
        problems += [
            Problem("ep", config.ep, f"not with numerics=exact: {reason}", "ep=1")
            for reason in reasons[:1]
        ]
    return problems


def _expert_problems(model: nn.Module, drawing: Collection[str], itemsize: int) -> list[str]:
    """Why sharded experts might compute other bits."""
    reasons = []
    for name, experts in experts_of(model).items():
        if any(f"{name}.".startswith(f"{unit}.") for unit in drawing):
            reasons.append(f"what {name} is in draws random numbers, which differ between ranks")
        if not hasattr(experts, "independent_rows"):
            reasons.append(
                f"{name} does not say that a row's bits do not depend on others "
                "(independent_rows, see titanlike/techniques/mixture/experts.py)"
            )
        sizes = {size for weight in experts.parameters() for size in weight.shape[1:]}
        if odd := sorted(size for size in sizes if size * itemsize % _ALIGNED):
            reasons.append(
                f"{name} has rows of {odd[0]} elements: with rows that are no multiple of {_ALIGNED} "
                "bytes a product may depend on where its factors begin"
            )
    return reasons


class ExactSums(Transform):
    """The exact sums of a step, for this rank's stages."""

    def __init__(
        self, seed: int, mesh: Mesh, microbatches: int, zero: int, drawing: set[str]
    ) -> None:
        """drawing: blocks whose forwards draw random numbers."""
        self._mesh, self._zero, self._drawing = mesh, zero, drawing
        self._seed, self._step, self._grain = seed, 0, 0
        self._grains = Grains(mesh, microbatches)
        ep = 1 if mesh.expert_group is None else mesh.expert_group.size()
        self._expert_grains = Grains(mesh, microbatches, peers=ep)
        self._stages: dict[int, GrainSums] = {}
        self._index: dict[nn.Module, tuple[int, Sequence[str]]] = {}  # stage -> index, blocks
        self.sums = self

    def on_stage(self, index: int, stage: Any, units: Sequence[str]) -> None:
        self._index[stage] = index, units
        # as in one process, where gradients of later uses come first, one by one
        stage.relays = False
        for unit in self._drawing.intersection(units):
            module = stage.get_submodule(unit)
            module.register_forward_pre_hook(partial(self._seed_random, unit))

    def _seed_random(self, unit: str, module: nn.Module, *_: Any) -> None:
        """Seed a block's random numbers by the seed, the step, the grain and the block only."""
        if module.training:
            torch.manual_seed(piece_seed(self._seed, f"{unit} in step {self._step}", self._grain))

    def begin_microbatch(self, stage: int, microbatch: int) -> None:
        self._grain = microbatch

    def on_weights(self, stage: nn.Module) -> None:
        for experts in experts_of(stage).values():
            vars(experts)["independent_rows"] = True
        sums = GrainSums(stage, self._grains, self._expert_grains, self._zero)
        index, units = self._index.pop(stage)
        self._stages[index] = sums
        for unit in units:  # before FSDP's hooks
            add_hook: Any = stage.get_submodule(unit).register_forward_pre_hook
            add_hook(_inside_first, prepend=True, with_kwargs=True)

    def begin_step(self, step: int) -> None:
        self._step = step

    def of_stage(self, stage: int) -> GrainSums | None:
        return self._stages.get(stage)

    def losses(self, losses: list[Tensor]) -> Tensor:
        placed = torch.full((self._grains.all,), -0.0, device=self._mesh.device)
        if losses:
            leaves = [leaf for each in range(len(losses)) for leaf in self._grains.mine(each)]
            indices = on_device(torch.tensor(leaves), placed.device)
            placed.index_copy_(0, indices, torch.stack(losses).detach())
        return placed

    def total(self, losses: Tensor) -> Tensor:
        return tree_sum(losses)

    @torch.no_grad()
    def norms(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """(norm of all gradients of the model, norm of this rank's part of each). Collective.

        parameters: this rank's; each of the model's is on one pipeline rank.
        """
        device = self._mesh.device
        rows = [
            row_squares(local(p.grad)).to(device) if p.grad is not None else torch.zeros(1)
            for p in parameters
        ]
        bins = bins_of(torch.cat(rows) if rows else torch.zeros(0, device=device))
        if self._grains.replica > 0:
            bins.zero_()  # counted by replica 0
        self._mesh.sum(bins)
        each = torch.stack([row.sum() for row in rows]).sqrt() if rows else torch.zeros(0)
        return root_of_bins(bins), each


class Grains:
    """The grains of a step, each a leaf of the tree, and the ranks that compute them."""

    def __init__(self, mesh: Mesh, microbatches: int, peers: int = 1) -> None:
        """peers: adjacent ranks that each compute the grains of all of them, with their experts."""
        self._count, self.peers = microbatches, peers
        self.all = mesh.dp * microbatches
        self.replicate_group = mesh.axes.get_group("replicate")
        self.replicas = self.replicate_group.size()
        self.shards = mesh.dp // self.replicas // peers
        self.replica, self._rank = divmod(mesh.dp_rank // peers, self.shards)
        experts = mesh.expert_axes if peers > 1 else None
        shard = mesh.axes["shard"] if experts is None else experts["expert_shard"]
        self.shard_group = shard.get_group()

    def mine(self, microbatch: int) -> list[int]:
        """This rank's leaves of a microbatch."""
        return self._leaves(self.replica * self.shards + self._rank, microbatch)

    # the same in every step, and for all parameter groups

    @cached_property
    def microbatch_keys(self) -> list[list[list[Key]]]:
        """By microbatch: tree nodes of each rank of this replica after it has added its leaves."""
        ranks = range(self.replica * self.shards, (self.replica + 1) * self.shards)
        return [
            [keys_of(self.all, self._leaves(rank, microbatch)) for rank in ranks]
            for microbatch in range(self._count)
        ]

    @cached_property
    def rank_keys(self) -> list[list[Key]]:
        """Tree nodes of each rank of this replica after all of its leaves."""
        begin = self.replica * self.shards
        return [self._keys([begin + rank]) for rank in range(self.shards)]

    @cached_property
    def replica_keys(self) -> list[list[Key]]:
        """Tree nodes of each replica."""
        begins = range(0, self.replicas * self.shards, self.shards)
        return [self._keys(range(begin, begin + self.shards)) for begin in begins]

    def _leaves(self, rank: int, microbatch: int) -> list[int]:
        """rank: among all replicas'."""
        return leaves_of(rank, microbatch, microbatches=self._count, peers=self.peers)

    def _keys(self, ranks: Iterable[int]) -> list[Key]:
        each = product(ranks, range(self._count))
        return keys_of(self.all, [leaf for place in each for leaf in self._leaves(*place)])


class GrainSums:
    """Sums a stage's gradients; implements `GradientSums`."""

    def __init__(self, stage: nn.Module, grains: Grains, expert_grains: Grains, zero: int) -> None:
        self.arrive: Callable[[], object] = lambda: None  # waits for the pending all-to-all
        self.reached: set[nn.Parameter] = set()  # by a backward of this step
        places: Places = {}
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    places.setdefault(parameter, []).append((module, name))
        routed = {p for module in experts_of(stage).values() for p in module.parameters()}
        self._sharded = [
            _ShardedSum(
                group,
                places,
                grains if routed.isdisjoint(group.parameters) else expert_grains,
                zero,
                self,
            )
            for group in sharded_gradients(stage)
        ]
        self._sums: list[_Sum] = [*self._sharded]
        if not self._sharded:
            self._sums = [_UnshardedSum(places, grains)]

    def backward(self, microbatch: int) -> None:
        for sharded in self._sharded:
            sharded.microbatch = microbatch

    @torch.no_grad()  # deferred weight gradients are computed outside of a backward
    def end(self, microbatch: int, complete: bool) -> None:
        """complete: False = some weight gradients come later."""
        for each in self._sums:
            each.add(microbatch, complete)
        for sharded in reversed(self._sharded):
            sharded.end()

    @torch.no_grad()
    def finish(self) -> None:
        """Set the parameters' gradients. Collective over the ranks that share them."""
        self.arrive()
        self.arrive = lambda: None
        for each in reversed(self._sums):
            each.finish()


class _Sum:
    """Gradients that are summed together."""

    def __init__(self, places: Places, grains: Grains) -> None:
        self._places, self._grains = places, grains
        self._tree: SumTree[Gradients] = SumTree(grains.all, _add_each)
        self._pending: dict[int, Gradients] = {}  # by leaf: deferred weight gradients are missing
        # index of each gradient's parameter: first of all parameters, then of second places
        self._at = [*range(len(places))]
        # redirected gradients of a backward, by (leaf of a microbatch, place in `_at`)
        self._apart: dict[tuple[int, int], Tensor] = {}
        for index, each in enumerate(places.values()):
            for module, name in each[1:]:
                redirect_gradient(module, name, partial(self._keep, 0, len(self._at)))
                self._at.append(index)

    def _keep(self, leaf: int, index: int, gradient: Tensor) -> None:
        before = self._apart.get((leaf, index))
        self._apart[leaf, index] = gradient if before is None else before + gradient

    def _take(self, microbatch: int) -> list[tuple[int, Gradients]]:
        """(leaf, its gradients) of a microbatch."""
        gradients, self._apart = dict[tuple[int, int], Tensor | None](self._apart), {}
        gradients = {(0, i): gradient for i, gradient in enumerate(self._taken())} | gradients
        in_fp32 = {
            at: gradient.float() for at, gradient in gradients.items() if gradient is not None
        }
        return [
            (leaf, [in_fp32.get((number, i)) for i in range(len(self._at))])
            for number, leaf in enumerate(self._grains.mine(microbatch))
        ]

    def _taken(self) -> Gradients:
        """Take the gradient of each parameter, and clear it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Set the parameters' gradients to the sums."""
        raise NotImplementedError

    def add(self, microbatch: int, complete: bool) -> None:
        for leaf, gradients in self._take(microbatch):
            if before := self._pending.pop(leaf, None):
                gradients = _add_each(before, gradients)
            if complete:
                self._tree.put((0, leaf), gradients)
            else:
                self._pending[leaf] = gradients


class _UnshardedSum(_Sum):
    """The sum of an unsharded stage."""

    def _taken(self) -> Gradients:
        taken: Gradients = []
        for (module, name), *_ in self._places.values():
            weight: Any = module._parameters[name]  # may be a bf16 copy
            gradient, weight.grad = weight.grad, None
            taken.append(None if gradient is None else gradient.to(weight.dtype))
        return taken

    def finish(self) -> None:
        sums: dict[int, Tensor] = {}
        for index, gradient in zip(self._at, self._tree.root(), strict=True):
            if gradient is not None:
                sums[index] = sums[index] + gradient if index in sums else gradient
        for index, parameter in enumerate(self._places):
            parameter.grad = sums.get(index)


class _ShardedSum(_Sum):
    """The sum of one FSDP parameter group."""

    microbatch: int | None = None  # of the running backward

    def __init__(
        self,
        group: ShardedGradients,
        places: Places,
        grains: Grains,
        zero: int,
        stage: GrainSums,
    ) -> None:
        self._group, self._zero, self._stage = group, zero, stage
        super().__init__({parameter: places[parameter] for parameter in group.parameters}, grains)
        # this rank's part, in this replica
        self._part: SumTree[Tensor] = SumTree(grains.all, Tensor.add_)
        if zero > 1:
            group.after_backward = self._reduce_now
        if grains.peers > 1:  # the group has the weights of one module of experts
            names = [places[parameter][0][1] for parameter in group.parameters]
            experts, _ = places[group.parameters[0]][0]
            vars(experts)[APART] = lambda rank: redirected(
                experts,
                {name: partial(self._keep, rank, i) for i, name in enumerate(names)},
            )

    def _taken(self) -> Gradients:
        return self._group.take()

    def add(self, microbatch: int, complete: bool) -> None:
        if self._zero == 1:
            super().add(microbatch, complete)

    def end(self) -> None:
        """End a backward. torch 2.15 defers the hook of a group whose inputs have no gradient to
        the end of a step."""
        if self._zero > 1:
            self._reduce_now()
        self.microbatch = None

    def _reduce_now(self) -> None:
        """ZeRO 2 and 3: reduce the gradient of each grain at once."""
        # already reduced, or the step is done, or all parameters are frozen
        if self.microbatch is None or not self._at:
            return
        microbatch, self.microbatch = self.microbatch, None
        for leaf, taken in self._take(microbatch):
            self._tree.put((0, leaf), taken)
        # overlaps with the next group's backward
        arrive = self._exchange(self._tree.take(), self._grains.microbatch_keys[microbatch])
        self._stage.arrive()
        self._stage.arrive = arrive

    def _exchange(self, nodes: dict[Key, Gradients], keys: list[list[Key]]) -> Callable[[], None]:
        """nodes: emptied."""
        flat = {key: self._flat(nodes.pop(key)) for key in [*nodes]}
        return start_sum(flat, self._part, keys, self._grains.shard_group)

    def _flat(self, gradients: Gradients) -> Tensor:
        self._stage.reached.update(
            self._group.parameters[index]
            for index, gradient in zip(self._at, gradients, strict=True)
            if gradient is not None
        )
        return self._group.flat(gradients, self._grains.shards, self._at)

    def finish(self) -> None:
        if not self._at:
            return
        grains = self._grains
        if self._zero == 1:
            self._exchange(self._tree.take(), grains.rank_keys)()
        nodes = self._part.take()
        (some, *_) = nodes.values()
        size = some.numel()
        if grains.replicas > 1:
            padding = -size % grains.replicas
            padded = {k: torch.nn.functional.pad(node, (0, padding)) for k, node in nodes.items()}
            over_replicas: SumTree[Tensor] = SumTree(grains.all, Tensor.add_)
            start_sum(padded, over_replicas, grains.replica_keys, grains.replicate_group)()
            piece = over_replicas.root()
            total = piece.new_empty(size + padding)
            dist.all_gather_into_tensor(total, piece, group=grains.replicate_group)
        else:
            (total,) = nodes.values()
        self._group.give(total[:size], grains.shards, self._at)


def _add_each(left: Gradients, right: Gradients) -> Gradients:
    """Add gradients into `left`; a missing one adds nothing."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        add_values([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def _inside_first(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Sum an input's gradients from inside a block first, before those of its other uses; for an
    input passed as several arguments, in their order. FSDP and stage cuts do so where they happen
    to be."""
    places: dict[int, list[Tensor]] = {}

    def one_view(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.requires_grad):
            return x
        views = places.setdefault(id(x), [])
        views.append(views[0] if views else x.view_as(x))
        return views[0]

    viewed = tree_map((args, kwargs), one_view)
    split = {id(views[0]): [*_BackTogether.apply(*views)] for views in places.values() if views[1:]}
    return tree_map(viewed, lambda x: split[id(x)].pop(0) if id(x) in split else x)


class _BackTogether(torch.autograd.Function):
    """Identity whose gradients come back together."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


# --- a weight that two modules use ----------------------------------------------------------------


class _Redirect(torch.autograd.Function):
    """A weight whose gradient goes to a function instead."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.keep(gradient)
        return None, None


@contextmanager
def redirected(module: nn.Module, keep: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """A context in which the gradients of a module's weights go to the functions `keep` (by name),
    and are not added to `.grad`."""
    parameters: dict[str, Any] = module._parameters
    before = {name: parameters[name] for name in keep}
    if torch.is_grad_enabled():
        parameters |= {
            name: _Redirect.apply(parameters[name], function) for name, function in keep.items()
        }
    try:
        yield
    finally:
        parameters |= before


def redirect_gradient(module: nn.Module, name: str, keep: Callable[[Tensor], None]) -> None:
    """Call `keep` with the gradient of a module's weight instead of adding it to `.grad`."""
    entered: list[AbstractContextManager[None]] = []

    def replace(*_: Any) -> None:
        entered.append(redirected(module, {name: keep}))
        entered[-1].__enter__()

    def restore(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    # inside FSDP's hooks, which swap the gathered weight in and out
    module.register_forward_pre_hook(replace)
    module.register_forward_hook(restore, prepend=True, always_call=True)
