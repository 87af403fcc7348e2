"""Expert parallelism: each rank has a shard of every layer's experts, and their load is balanced.

The ranks are those of data and context parallelism, which have different tokens (arXiv 2006.16668):
an all-to-all before a module of experts sends tokens, one after it results. Such modules follow the
contract in `techniques/mixture/experts.py`: experts are dimension 0 of all their parameters, and a rank holds
some of these rows. Gradients come back with the results: a rank has its experts' gradients for all
tokens of its group, and FSDP sums them over the ranks that hold the same experts.

An `ep` that does not divide these ranks also takes those of tensor parallelism. With a sharded
sequence these have different tokens, and send them as others do. Otherwise all of them send the
same tokens: the experts' gradients, sums over all sent tokens, are divided by their number.

For the balance, tokens are counted where a training forward calls experts, not in a recomputation;
padding (`REAL` of a batch) is computed and not counted. After the step the counts are summed over
all ranks with different tokens, so they are the global batch's in any layout: integers, equal on
every rank. The layer that holds the experts receives them (`balance(counts, skip)`), if it has that
method; a skipped step changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import REAL
from titanlike.core.distributed.collectives import GroupInfo
from titanlike.core.distributed.mesh import Mesh, one_process
from titanlike.core.distributed.placement import Part, Placement, When, experts_of
from titanlike.core.distributed.transform import Plan, Transform
from titanlike.core.torch_private.autograd import in_backward
from titanlike.core.torch_private.tensors import set_zero
from titanlike.techniques.activation_checkpoint import keeps
from titanlike.techniques.mixture.expert_exchange import (
    SEND_TOKENS,
    copies,
    elsewhere,
    rank_by_rank,
)

_WORTH = 0.95  # send one copy per rank if that is less than this share of one per expert


class ExpertParallel(Transform):
    ranks: GroupInfo

    def __init__(self, config: Config, model: nn.Module, tensor: Transform | None) -> None:
        """Shard the experts of a model on meta in place, as on the first rank; tensor: the
        tensor-parallel transform, if any. Raises ConfigError if there are no experts, or they
        cannot be sharded."""
        _check_experts(config, model)
        self._config = config
        self._eager: set[str] = set()
        self.first = self.ranks = GroupInfo(config.ep, 0)
        # tp's ranks, if they have different experts
        self._tensor = tensor if config.ep > config.ep_shards else None
        before = {} if tensor is None else tensor.placements
        placements = {**before}
        self.on_model(model, placements)
        if self._tensor is not None:
            self.placements = {n: p for n, p in placements.items() if p is not before.get(n)}

    def describe(self, plan: Plan) -> Iterator[tuple[str, str]]:
        modules: list[Any] = [*experts_of(plan.model_graph.model).values()]
        counts = {experts.num_experts for experts in modules}
        shown = " or ".join(f"{count // self._config.ep} of {count}" for count in sorted(counts))
        text = f"each rank has {shown} experts of a layer"
        yield "expert parallel", text if self._tensor is None else f"{text}, those of tp other ones"

    def open(self, mesh: Mesh, plan: Plan) -> None:
        group = mesh.expert_group
        rank = 0 if group is None else dist.get_rank(group)
        self.ranks = GroupInfo(self._config.ep, rank, group)
        if plan.variable and not keeps(SEND_TOKENS, self._config.activation_checkpoint.saved):
            recomputed = plan.recomputed.names
            model = plan.model_graph.model
            self._eager = {name for name in recomputed if experts_of(model.get_submodule(name))}

    def why_not_compiled(self, block: str) -> str:
        # repeated all-to-alls and the gradients' are independent: a compiler orders them by size
        differ = "it repeats the exchanges of experts, and lengths differ between ranks"
        return differ if block in self._eager else ""

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        ranks = self.ranks
        for name, experts in experts_of(model).items():
            for last, full in list(experts.named_parameters(recurse=False)):
                rows = len(full) // ranks.size
                part = Part(full.shape, 0, ((ranks.rank * rows, (ranks.rank + 1) * rows),))
                local = nn.Parameter(full.new_empty(part.local_shape), full.requires_grad)
                experts._parameters[last] = local
                among_tp = placements.get(f"{name}.{last}", Placement())
                base = among_tp if self._tensor is None else Placement()
                placements[f"{name}.{last}"] = replace(base, part=part)
            exact = partial(rank_by_rank, experts) if self._config.exact else None
            experts.forward = partial(elsewhere, experts.forward, ranks, exact)
            vars(experts)["computes_beside"] = True
            top_k: Any = experts.top_k
            if exact is None and copies(ranks.size, top_k) < _WORTH * top_k:
                vars(experts)["takes_unsorted"] = True
            if self._tensor is not None:
                peers = self._tensor.first if ranks is self.first else self._tensor.ranks
                experts.forward = partial(_from_all, experts.forward, peers, among_tp.partial)


def _check_experts(config: Config, model: nn.Module) -> None:
    modules: dict[str, Any] = {**experts_of(model)}
    if not modules:
        reason = "the model has no experts (in modules that take them sorted, see docs/models.md)"
        raise ConfigError([Problem("ep", config.ep, reason, "ep=1")])
    for name, experts in modules.items():
        shapes = [tuple(parameter.shape) for parameter in experts.parameters()]
        direct = [*experts.parameters(recurse=False)]
        inside = len(direct) < len(shapes) or next(experts.buffers(), None) is not None
        if inside or any(shape[:1] != (experts.num_experts,) for shape in shapes):
            reason = f"the parameters of {name} are not all its own, with its experts first"
            fix = "ep=1, or experts as titanlike/techniques/mixture/experts.py says"
            raise ConfigError([Problem("ep", config.ep, reason, fix)])
    counts = {experts.num_experts for experts in modules.values()}
    if any(count % config.ep for count in counts):
        shown = ", ".join(map(str, sorted(counts)))
        sizes = range(1, config.ep + 1)
        fitting = {replace(config, ep=size).fitting_ep for size in sizes}
        fits = max(n for n in fitting if not any(count % n for count in counts))
        reason = f"does not divide the {shown} experts of a layer"
        raise ConfigError([Problem("ep", config.ep, reason, f"ep={fits}")])


def _from_all(
    forward: Callable[..., Any],
    tensor: Any,
    different: When,
    tokens: Tensor,
    *others: Tensor,
    beside: Callable[[], Tensor] | None = None,
) -> Any:
    """Run experts on tokens from all tensor-parallel ranks `tensor`; different: in which batches
    their tokens differ, see `Placement.partial`."""
    if different == "always" or (different == "sequence" and tensor.sequence):
        return forward(tokens, *others, beside=beside)
    given = (tokens, *others)
    scaled = [_TimesGradient.apply(x, tensor.size) if x.is_floating_point() else x for x in given]
    results = forward(*scaled, beside=beside)
    results, *added = results if beside else (results,)
    results = _TimesGradient.apply(results, 1 / tensor.size)
    return (results, *added) if beside else results


class _TimesGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


# --- load balance of experts -------------------------------------------------------------------


@torch.library.custom_op("titanlike::tokens_of_experts", mutates_args=())
def _counted(counts: Tensor, added: Tensor, total: Tensor) -> Tensor:
    """Return a copy of `counts`, and add `added` to `total`: an operator, since a compiled block
    runs nothing else. Its schema hides that it changes `total`; torch would drop it from a
    recomputed forward, or refuse it."""
    if not in_backward():
        # without a version bump: a recomputing compiled block saves it, and would refuse it in
        # the backward
        total.data.add_(added)
    return counts.clone()


@_counted.register_fake
def _(counts: Tensor, added: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(counts)


@dataclass(frozen=True)
class _Layer:
    stage: int
    holder: Any  # the module whose child the experts are
    experts: Any
    total: Tensor  # tokens of each expert in this step, on this rank: int64


class _Tokens(NamedTuple):
    """The tokens of a microbatch, [N] each."""

    share: Tensor  # 1 / tokens of the global batch; 0 for padding
    padding: Tensor  # int64: -1 for padding, else 0

    @staticmethod
    def of(real: Tensor, tokens: Tensor) -> _Tokens:
        """real: bool [B, T]; tokens: of the global batch, a scalar."""
        real = real.flatten()
        return _Tokens(real / tokens, real.long() - 1)

    def give(self, holder: Any, experts: Any) -> None:
        """New tensors for each microbatch: what a backward has saved must not change."""
        if hasattr(holder, "token_share"):
            holder.token_share = self.share
        vars(experts)[_PADDING] = self.padding
        experts.without_padding = MethodType(_without_padding, experts)


class ExpertBalance(Transform):
    """Counts tokens per expert, in the experts of this rank's stages of any model."""

    reads = frozenset({REAL})

    def __init__(
        self,
        mesh: Mesh,
        tensor_parts: Callable[[], bool],
        microbatches_of: Callable[[int], int],
        take: Callable[[Tensor, int], Tensor] | None,
    ) -> None:
        """tensor_parts: whether tensor-parallel ranks have different tokens in the current step;
        microbatches_of: see `Plan`; take: selects a context-parallel rank's tokens."""
        self._mesh, self._tensor_parts = mesh, tensor_parts
        self._microbatches_of, self._take = microbatches_of, take
        self._share = torch.zeros((), device=mesh.device)
        self._stages: dict[nn.Module, int] = {}
        # layers with equal counts of experts and choices, whose holders are of one class
        self._layers: dict[Any, list[_Layer]] = {}
        self._real: Tensor | None = None  # of the current batch [B, T]
        self._parts: list[_Tokens] | None = []  # of its microbatches; None = not divided yet
        # load of the busiest and idlest expert, relative to the mean, in the last step; the share
        # of choices that no expert computed. -inf on ranks without experts
        self.loads = torch.full((3,), -torch.inf, device=mesh.device)
        self._tokens: Tensor | None = None

    def in_one_process(self, model: nn.Module) -> Transform:
        return _BalanceInOneProcess(model)

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        self._stages[stage] = index

    def on_weights(self, stage: nn.Module) -> None:
        """Count in the modules' forwards from now on: after all else that replaces these, before
        one is compiled."""
        for name, experts in experts_of(stage).items():
            holder = stage.get_submodule(name.rpartition(".")[0])
            count: Any = experts.num_experts
            total = torch.zeros(count, dtype=torch.int64, device=self._mesh.device)
            vars(experts)[_BEFORE] = vars(experts).get("forward")
            vars(experts)[_TOTAL] = total
            # not a closure: each block with different functions would be compiled separately
            experts.forward = MethodType(_forward, experts)
            if hasattr(holder, "token_share"):
                holder.token_share = self._share
            alike = self._layers.setdefault((type(holder), count, experts.top_k), [])
            alike.append(_Layer(self._stages[stage], holder, experts, total))

    @property
    def _all(self) -> Iterator[_Layer]:
        return chain.from_iterable(self._layers.values())

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self._real, self._parts = batch.get(REAL), None
        return batch

    @contextmanager
    def training(self, tokens: Tensor) -> Iterator[None]:
        """A context whose forwards count in the next update; earlier ones are dropped."""
        self._tokens = tokens
        self._share.copy_(1 / tokens)
        if self._layers:
            set_zero([layer.total for layer in self._all])
        self._parts = self._divided(tokens)
        yield

    def _divided(self, tokens: Tensor) -> list[_Tokens]:
        """This rank's real tokens of each microbatch; tokens: see `training`."""
        if (real := self._real) is None or real.is_meta:
            return []
        real = real if self._take is None else self._take(real, 1)
        if self._mesh.layer_ranks > 1 and self._tensor_parts():
            real = real.chunk(self._mesh.layer_ranks, 1)[self._mesh.layer_part]
        rows = real.tensor_split(self._microbatches_of(len(real)))
        return [_Tokens.of(part, tokens) for part in rows]

    def begin_microbatch(self, stage: int, microbatch: int) -> None:
        if self._parts is None:  # in evaluation, or before a compiled block's first step
            self._parts = self._divided(torch.ones((), device=self._mesh.device))
        if self._parts:
            part = self._parts[microbatch % len(self._parts)]
            for layer in self._all:
                if layer.stage == stage:
                    part.give(layer.holder, layer.experts)

    @torch.no_grad()
    def after_update(self, skip: Tensor | None) -> None:
        """Pass the counts to the layers. Collective over the ranks that have the same stages."""
        if not self._layers or self._tokens is None:
            return
        flat = self._mesh.sum_copies(torch.cat([layer.total for layer in self._all]))
        if self._mesh.layer_ranks > 1 and self._tensor_parts():
            self._mesh.sum(flat, "tp")
        loads = []
        sums = flat.split([len(alike) * number for (_, number, _), alike in self._layers.items()])
        for ((_, _, top_k), layers), flat in zip(self._layers.items(), sums, strict=True):
            counts = flat.view(len(layers), -1)  # [L, E]
            _balance([layer.holder for layer in layers], counts, skip)
            relative = counts / counts.double().mean(1, keepdim=True).clamp(min=1)
            dropped = 1 - counts.sum(1).min() / (self._tokens.double() * top_k)
            if self._parts:  # padding, which a user's own mixture may count
                dropped = dropped.clamp(min=0)
            loads.append(torch.stack([relative.max(), -relative.min(), dropped]))
        self.loads = torch.stack(loads).amax(0).float()

    def measured(self) -> dict[str, Tensor]:
        return dict(zip(("busiest_expert", "-idlest_expert", "dropped"), self.loads, strict=True))

    def record(self, numbers: Mapping[str, float]) -> dict[str, float]:
        return {
            "busiest_expert": numbers["busiest_expert"],
            "idlest_expert": -numbers["-idlest_expert"],
            "dropped": numbers["dropped"],
        }


def _balance(holders: Sequence[Any], counts: Tensor, skip: Tensor | None) -> None:
    """Pass counts [L, E] to layers of one class: together, if that is how it implements it."""
    classes = type(holders[0]).__mro__
    implements = next((kind for kind in classes if "balance" in vars(kind)), object)
    if "balance_layers" in vars(implements):
        holders[0].balance_layers(holders, counts, skip)
        return
    for holder, of_layer in zip(holders, counts, strict=True):
        if hasattr(holder, "balance"):
            holder.balance(of_layer, skip)


class _BalanceInOneProcess(ExpertBalance):
    """Counts tokens per expert of a full model, whose batches are its microbatches."""

    def __init__(self, model: nn.Module) -> None:
        self._device = next(model.parameters()).device
        super().__init__(one_process(self._device), lambda: False, lambda _: 1, None)
        self.on_stage(0, model, ())
        self.on_weights(model)

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self._real = batch[REAL].to(self._device) if REAL in batch else None
        if self._tokens is not None:
            self._parts = self._divided(self._tokens)
            self.begin_microbatch(0, 0)
        return batch


# attributes of a module of experts: its previous forward, None = its class's; the counts; which
# tokens are padding
_BEFORE, _TOTAL, _PADDING = "uncounted_forward", "tokens_of_step", "padding_of_microbatch"


def _without_padding(experts: nn.Module, counts: Tensor, chosen: Tensor) -> Tensor:
    """Count padding as negative, which experts count with the other tokens: counts [E], chosen
    [N, K]."""
    padding = getattr(experts, _PADDING)
    if not (experts.training and torch.is_grad_enabled()) or len(padding) != len(chosen):
        return counts
    padding = padding.unsqueeze(1).expand_as(chosen).flatten()
    removed = torch.zeros_like(counts).scatter_add_(0, chosen.flatten(), padding)
    return torch.ops.titanlike.tokens_of_experts(counts, removed, getattr(experts, _TOTAL))


def _forward(
    experts: nn.Module, tokens: Tensor, counts: Tensor, *others: Tensor, **more: Any
) -> Any:
    if experts.training and torch.is_grad_enabled():
        counts = torch.ops.titanlike.tokens_of_experts(counts, counts, getattr(experts, _TOTAL))
    before = getattr(experts, _BEFORE)
    if before is None:
        return type(experts).forward(experts, tokens, counts)
    return before(tokens, counts, *others, **more)
