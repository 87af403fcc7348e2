"""Routed experts: each rank has a part of every layer's (expert parallelism), and they are
balanced.

The ranks are those of data and context parallelism, which see other tokens (arXiv 2006.16668): they
exchange tokens before a module of experts and results behind it. What such a module is, is said in
`models/experts.py`: all of its parameters have the experts first, and a rank holds some of these
rows. Gradients come back with the results: of its experts, a rank has those of all tokens of its
group, and FSDP sums them over the ranks that hold the same experts.

An `ep` that does not divide these ranks takes those of tensor parallelism, too. They see other
tokens where the sequence is divided, and send these as they are. Where it is not, all of them send
the same: the experts' gradients, which are sums over all that is sent, are divided by their number.

For the balance, tokens are counted where a training forward calls experts, not where activation
checkpointing runs it again; all of them, padding included, since all are computed. After the step
the counts are summed over all ranks that saw other tokens, so that they are those of the undivided
batch in any layout: integers, the same on every rank. The layer that holds the experts is told
(`balance(counts, skip)`), if it wants to know; a skipped step changes nothing.

Shapes: S tokens of this rank times the experts that each goes to, R of those that it gets, D dim, E
experts, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.distributed.collectives import GroupInfo, autograd_collective
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.placement import APART, Part, Placement, When, experts_of
from titanlike.distributed.transform import Plan, Transform
from titanlike.parallel.activation_checkpoint import keeps
from titanlike.torch_private.autograd import in_backward
from titanlike.torch_private.process_groups import group_named

_WORTH = 0.95  # of a copy for each expert: with fewer, a token has one copy for each rank
SEND_TOKENS = "titanlike.send_tokens"  # the name of an operator
Forward = Callable[[Tensor, Tensor], Tensor]  # of experts: (tokens, counts) -> results


class ExpertParallel(Transform):
    ranks: GroupInfo

    def __init__(self, config: Config, model: nn.Module, tensor: Transform | None) -> None:
        """Divide the experts of a model on meta in place, as the first rank has them; tensor:
        tensor parallelism, if there is some. Raises ConfigError where there are none, or where they
        cannot be divided."""
        _check_experts(config, model)
        self._config = config
        self._eager: set[str] = set()
        self.first = self.ranks = GroupInfo(config.ep, 0)
        # those of tp, where each has other experts
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
        # the repeated ones and those of gradients do not depend on each other: a compiler orders
        # them by sizes
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
                among_others = among_tp if self._tensor is None else Placement()
                placements[f"{name}.{last}"] = replace(among_others, part=part)
            exact = partial(_rank_by_rank, experts) if self._config.exact else None
            experts.forward = partial(_elsewhere, experts.forward, ranks, exact)
            top_k: Any = experts.top_k
            if exact is None and _copies(ranks.size, top_k) < _WORTH * top_k:
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
            fix = "ep=1, or experts as titanlike/models/experts.py says"
            raise ConfigError([Problem("ep", config.ep, reason, fix)])
    counts = {experts.num_experts for experts in modules.values()}
    if any(count % config.ep for count in counts):
        shown = ", ".join(map(str, sorted(counts)))
        sizes = range(1, config.ep + 1)
        fitting = {replace(config, ep=size).fitting_ep for size in sizes}
        fits = max(n for n in fitting if not any(count % n for count in counts))
        reason = f"does not divide the {shown} experts of a layer"
        raise ConfigError([Problem("ep", config.ep, reason, f"ep={fits}")])


def _elsewhere(
    forward: Forward,
    ranks: GroupInfo,
    exact: Callable[[Forward, Tensor, Tensor], Tensor] | None,
    tokens: Tensor,
    counts: Tensor,
    unsorted: Tensor | None = None,
) -> Tensor:
    """tokens [S, D] sorted by expert, counts [E] -> results [S, D]; forward: of this rank's
    experts; exact: with numerics=exact, see `_rank_by_rank`; unsorted: see `_one_copy_each`."""
    of_rank = counts.unflatten(0, (ranks.size, -1))  # [n, E / n]
    operators = torch.ops.titanlike
    if unsorted is not None:
        return _one_copy_each(forward, ranks, tokens, of_rank, unsorted)
    if ranks.group is None or tokens.is_meta:  # alone: as many tokens come as go
        sizes, order, place = operators.alone_route_tokens(of_rank, len(tokens))
        there = autograd_collective(tokens, ranks, "all_to_all", "all_to_all", 0)
        results = forward(operators.send_tokens(there, sizes, order, place, ""), of_rank.sum(0))
        back = autograd_collective(results, ranks, "all_to_all", "all_to_all", 0)
        return operators.return_tokens(back, sizes, order, place, "", len(tokens))
    group = ranks.group.group_name
    coming, sizes, order, place = operators.route_tokens(of_rank, group, exact is None)
    there = operators.send_tokens(tokens, sizes, order, place, group)  # [R, D]
    results = exact(forward, there, coming) if exact else forward(there, coming.sum(0))
    return operators.return_tokens(results, sizes, order, place, group, len(tokens))


def _copies(ranks: int, top_k: int) -> float:
    """Ranks on which the experts of a token are, if they are chosen at random."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def _one_copy_each(
    forward: Forward, ranks: GroupInfo, rows: Tensor, of_rank: Tensor, order: Tensor
) -> Tensor:
    """Send a token once to each rank that has experts of it, where its results are weighted and
    added up: rows [N, D + K], tokens and the weights of their experts; order [S]: place in the
    order of experts -> in [N * K] -> [N, D]."""
    length, top_k = len(rows), len(order) // len(rows)
    operators, group = torch.ops.titanlike, ""
    if ranks.group is None or rows.is_meta:  # alone: as many tokens come as go
        coming, slot, route = of_rank, order % top_k, [order] * 6
        length = round(length * _copies(ranks.size, top_k))
        rows = rows[:1].expand(length, -1)
        rows = autograd_collective(rows, ranks, "all_to_all", "all_to_all", 0)
    else:
        group = ranks.group.group_name
        coming, slot, *route = operators.unique_route_tokens(of_rank, order, length, group)
    there = operators.unique_send_tokens(rows, route, group)  # [R, D + K]
    weights = there[:, -top_k:].gather(1, slot.unsqueeze(1))
    results = weights * forward(there[:, :-top_k].contiguous(), coming.sum(0))
    sums = operators.unique_return_tokens(results, route, group, length)
    if group:
        return sums
    sums = autograd_collective(sums, ranks, "all_to_all", "all_to_all", 0)
    return sums[:1].expand(len(order) // top_k, -1).clone()


def _from_all(
    forward: Callable[..., Tensor], tensor: Any, different: When, tokens: Tensor, *others: Tensor
) -> Tensor:
    """With tokens from all of the tensor-parallel ranks `tensor`; different: in which batches theirs
    are, see `Placement.partial`."""
    if different == "always" or (different == "sequence" and tensor.sequence):
        return forward(tokens, *others)
    results = forward(_TimesGradient.apply(tokens, tensor.size), *others)
    return _TimesGradient.apply(results, 1 / tensor.size)


class _TimesGradient(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def _rank_by_rank(experts: nn.Module, forward: Forward, tokens: Tensor, counts: Tensor) -> Tensor:
    """Those of each rank by themselves, as without expert parallelism: in the same shapes, and with
    a weight gradient each. tokens [R, D] by rank, then by expert; counts [n, E / n] -> [R, D]."""
    apart = vars(experts).get(APART, nullcontext)  # weights that are not trained have none
    results = []
    parts = zip(tokens.split(counts.sum(1).tolist()), counts, strict=True)
    for rank, (part, mine) in enumerate(parts):
        with apart(rank):
            results.append(forward(part, mine))
    return torch.cat(results)


# --- what is exchanged, as operators of our own -------------------------------------------------
#
# So a compiled block need not know how many tokens come, and a recomputation may keep the results
# (`SelectiveActivationCheckpoint.save`).


@torch.library.custom_op("titanlike::route_tokens", mutates_args=())
def _route(counts: Tensor, group: str, by_expert: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts [n, E / n]: tokens that go to each rank's experts.

    Returns the tokens that come from each rank for each of this rank's experts [n, E / n]; how many
    go to each rank and come from it, on the host [2, n]; of what comes, which is by rank, the place
    of each row when it is sorted by expert [R], or as it is; and the reverse.
    """
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts.contiguous(), group=group_named(group))
    # the one wait for a device: sizes of messages are known on the host
    sizes = torch.stack([counts.sum(1), coming.sum(1)]).to("cpu", non_blocking=True)
    arrived = None
    if not coming.is_cpu:
        arrived = torch.accelerator.current_stream(coming.device).record_event()
    # blocks of rows, one for each rank and expert, move as a whole: `away` rows to their expert's
    away = _begins(coming.T).T - _begins(coming)
    if arrived is not None:
        arrived.synchronize()
    rows = int(sizes[1].sum())
    order = torch.arange(rows, device=coming.device)
    place = order.clone()
    if by_expert:
        place += away.flatten().repeat_interleave(coming.flatten(), output_size=rows)
        order -= away.T.flatten().repeat_interleave(coming.T.flatten(), output_size=rows)
    return coming, sizes, order, place


def _begins(blocks: Tensor) -> Tensor:
    """The first row of each block of so many rows, one after the other."""
    flat = blocks.flatten()
    return (flat.cumsum(0) - flat).view(blocks.shape)


@_route.register_fake
def _(counts: Tensor, group: str, by_expert: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = counts.new_empty(torch.library.get_ctx().new_dynamic_size())
    sizes = counts.new_empty(2, counts.shape[0], device="cpu")
    return torch.empty_like(counts), sizes, order, torch.empty_like(order)


def _route_alone(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last three of `_route` where there are no others: sizes alone, for estimates."""
    order = counts.new_empty(rows)
    return counts.new_empty(2, counts.shape[0]), order, torch.empty_like(order)


_alone = torch.library.custom_op("titanlike::alone_route_tokens", _route_alone, mutates_args=())
_alone.register_fake(_route_alone)


@torch.library.custom_op("titanlike::send_tokens", mutates_args=())
def _send(x: Tensor, sizes: Tensor, order: Tensor, place: Tensor, group: str) -> Tensor:
    """Tokens go to their experts, sorted by them: [S, D] -> [R, D]. group: "" = there are no
    others."""
    if not group:
        return x.clone()
    sent, received = sizes.tolist()
    result = x.new_empty(len(order), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group_named(group))
    return result.index_select(0, order)


@_send.register_fake
def _(x: Tensor, sizes: Tensor, order: Tensor, place: Tensor, group: str) -> Tensor:
    return x.new_empty(order.shape[0], *x.shape[1:])


@torch.library.custom_op("titanlike::return_tokens", mutates_args=())
def _return(
    x: Tensor, sizes: Tensor, order: Tensor, place: Tensor, group: str, rows: int
) -> Tensor:
    """The reverse, which is also its gradient: [R, D] -> [S, D]; rows: S."""
    if not group:
        return x.clone()
    sent, received = sizes.tolist()
    x = x.index_select(0, place)
    result = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(result, x, sent, received, group=group_named(group))
    return result


@_return.register_fake
def _(x: Tensor, sizes: Tensor, order: Tensor, place: Tensor, group: str, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


def _keep_route(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *places, ctx.group = inputs[:5]
    ctx.save_for_backward(*places)
    ctx.rows = x.shape[0]


def _send_backward(ctx: Any, gradient: Tensor) -> Any:
    sizes, order, place = ctx.saved_tensors
    back = torch.ops.titanlike.return_tokens(gradient, sizes, order, place, ctx.group, ctx.rows)
    return back, None, None, None, None


def _return_backward(ctx: Any, gradient: Tensor) -> Any:
    sizes, order, place = ctx.saved_tensors
    sent = torch.ops.titanlike.send_tokens(gradient, sizes, order, place, ctx.group)
    return sent, None, None, None, None, None


_send.register_autograd(_send_backward, setup_context=_keep_route)
_return.register_autograd(_return_backward, setup_context=_keep_route)


# The same with one copy of a token for each rank. A route: rows to and from each rank, by expert and
# by copy, on the host [4, n]; the token of each copy that is sent [P]; these places sorted by token
# and where each token begins in them; of each row for an expert, the copy that came [R]; the places
# of these sorted by copy, and where each copy begins.


@torch.library.custom_op("titanlike::unique_route_tokens", mutates_args=())
def _route_unique(
    counts: Tensor, order: Tensor, tokens: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """counts [n, E / n] and order [S] as above. Returns counts of what comes, which of a token's
    weights is that of each row [R], and the route."""
    to = counts.sum(1)
    rank = torch.arange(len(counts), device=order.device)
    token, top_k = order // (len(order) // tokens), len(order) // tokens
    cell = rank.repeat_interleave(to, output_size=len(order)) * tokens + token
    used = torch.zeros(len(counts), tokens, dtype=torch.int64, device=order.device)
    used.view(-1).scatter_(0, cell, torch.ones_like(cell))
    copies = used.sum(1)
    sent = torch.cat([counts, copies.unsqueeze(1)], 1)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group_named(group))
    coming, copies_coming = got[:, :-1].contiguous(), got[:, -1]
    sizes = torch.stack([to, coming.sum(1), copies, copies_coming]).to("cpu", non_blocking=True)
    if not coming.is_cpu:
        torch.accelerator.current_stream(coming.device).record_event().synchronize()
    go, come, *numbers = sizes.tolist()
    rows, p, q = sum(come), *map(sum, numbers)
    place = (used.flatten().cumsum(0) - 1)[cell]  # of each row's copy, among all that are sent
    pick = place.new_empty(p).scatter_(0, place, token)
    inside = place - _begins(copies).repeat_interleave(to, output_size=len(order))
    told = place.new_empty(rows)
    mine = inside * top_k + order % top_k
    dist.all_to_all_single(told, mine, come, go, group=group_named(group))
    away = _begins(coming.T).T - _begins(coming)
    by_expert = torch.arange(rows, device=order.device)
    by_expert -= away.T.flatten().repeat_interleave(coming.T.flatten(), output_size=rows)
    begins = _begins(copies_coming).repeat_interleave(coming.sum(1), output_size=rows)
    spread = (told // top_k + begins)[by_expert]
    slot = (told % top_k)[by_expert]
    return coming, slot, sizes, pick, *_sorted(pick, tokens), spread, *_sorted(spread, q)


def _sorted(index: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The places in an index sorted by their values, and where each of `length` values begins."""
    ones = index.new_zeros(length).scatter_add_(0, index, torch.ones_like(index))
    return index.argsort(stable=True), _begins(ones)


@_route_unique.register_fake
def _(counts: Tensor, order: Tensor, tokens: int, group: str) -> Any:
    p, q, rows = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
    sizes = counts.new_empty(4, counts.shape[0], device="cpu")
    shapes = rows, p, p, tokens, rows, rows, q
    slot, *route = (order.new_empty(shape) for shape in shapes)
    return torch.empty_like(counts), slot, sizes, *route


@torch.library.custom_op("titanlike::unique_send_tokens", mutates_args=())
def _send_unique(x: Tensor, route: list[Tensor], group: str) -> Tensor:
    """[N, ...] -> [R, ...]"""
    if not group:
        return x[:1].repeat(len(route[4]), 1)
    *_, sent, received = route[0].tolist()
    result = x.new_empty(sum(received), *x.shape[1:])
    copies = x.index_select(0, route[1])
    dist.all_to_all_single(result, copies, received, sent, group=group_named(group))
    return result.index_select(0, route[4])


@_send_unique.register_fake
def _(x: Tensor, route: list[Tensor], group: str) -> Tensor:
    return x.new_empty(route[4].shape[0], *x.shape[1:])


@torch.library.custom_op("titanlike::unique_return_tokens", mutates_args=())
def _return_unique(x: Tensor, route: list[Tensor], group: str, rows: int) -> Tensor:
    """The transpose, which is also its gradient: sums over the copies, [R, D] -> [N, D]."""
    if not group:
        return x[:1].repeat(rows, 1)
    *_, sent, received = route[0].tolist()
    # of a fixed order, which index_add has not on a GPU
    x = F.embedding_bag(route[5], x, route[6], mode="sum")
    result = x.new_empty(sum(sent), *x.shape[1:])
    dist.all_to_all_single(result, x, sent, received, group=group_named(group))
    return F.embedding_bag(route[2], result, route[3], mode="sum")


@_return_unique.register_fake
def _(x: Tensor, route: list[Tensor], group: str, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


def _keep_unique_route(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, route, ctx.group = inputs[:3]
    ctx.save_for_backward(*route)
    ctx.rows = x.shape[0]


def _send_unique_backward(ctx: Any, gradient: Tensor) -> Any:
    route = [*ctx.saved_tensors]
    back = torch.ops.titanlike.unique_return_tokens(gradient, route, ctx.group, ctx.rows)
    return back, [None] * len(route), None


def _return_unique_backward(ctx: Any, gradient: Tensor) -> Any:
    route = [*ctx.saved_tensors]
    sent = torch.ops.titanlike.unique_send_tokens(gradient, route, ctx.group)
    return sent, [None] * len(route), None, None


_send_unique.register_autograd(_send_unique_backward, setup_context=_keep_unique_route)
_return_unique.register_autograd(_return_unique_backward, setup_context=_keep_unique_route)


# --- the balance of experts --------------------------------------------------------------------


@torch.library.custom_op("titanlike::tokens_of_experts", mutates_args=())
def _counted(counts: Tensor, total: Tensor) -> Tensor:
    """A copy of `counts`, which are added to `total`: an operator, since a compiled block runs
    nothing else. It does not say that it changes `total`; torch would take it out of a forward that
    is recomputed, or refuse."""
    if not in_backward():
        # without a new version of it: a compiled block that recomputes keeps it for the backward,
        # and would refuse it there
        total.data.add_(counts)
    return counts.clone()


@_counted.register_fake
def _(counts: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(counts)


@dataclass(frozen=True)
class _Layer:
    holder: Any  # the module whose child the experts are
    experts: Any
    total: Tensor  # tokens of each expert in this step, on this rank: int64


class ExpertBalance(Transform):
    """The modules of experts of this rank's stages; of any model that has some."""

    def __init__(self, mesh: Mesh, tensor_parts: Callable[[], bool]) -> None:
        """tensor_parts: whether the tensor-parallel ranks see different tokens in the current
        step."""
        self._mesh, self._tensor_parts = mesh, tensor_parts
        self._share = torch.zeros((), device=mesh.device)
        self._layers: list[_Layer] = []
        # of the busiest and the idlest expert, relative to the mean, in the step that was updated
        # last; the share of choices that no expert computed. -inf where this rank has no experts
        self.loads = torch.full((3,), -torch.inf, device=mesh.device)
        self._tokens: Tensor | None = None

    def in_one_process(self, model: nn.Module) -> Transform:
        return _BalanceInOneProcess(model)

    def on_weights(self, stage: nn.Module) -> None:
        """Count in the modules' forwards from now on: behind all else that replaces them, and
        before one is compiled."""
        for name, experts in experts_of(stage).items():
            holder = stage.get_submodule(name.rpartition(".")[0])
            count: Any = experts.num_experts
            total = torch.zeros(count, dtype=torch.int64, device=self._mesh.device)
            vars(experts)[_BEFORE] = vars(experts).get("forward")
            vars(experts)[_TOTAL] = total
            # not a closure: of blocks whose experts have other functions each is compiled
            experts.forward = MethodType(_forward, experts)
            if hasattr(holder, "token_share"):
                holder.token_share = self._share
            self._layers.append(_Layer(holder, experts, total))

    @contextmanager
    def training(self, tokens: Tensor) -> Iterator[None]:
        """Forwards within count in the next update; earlier ones are dropped."""
        self._tokens = tokens
        self._share.copy_(1 / tokens)
        for layer in self._layers:
            layer.total.zero_()
        yield

    @torch.no_grad()
    def after_update(self, skip: Tensor | None) -> None:
        """Tell the layers what was counted. Collective over the ranks that have the same stages."""
        if not self._layers or self._tokens is None:
            return
        flat = self._mesh.sum_copies(torch.cat([layer.total for layer in self._layers]))
        if self._mesh.layer_ranks > 1 and self._tensor_parts():
            self._mesh.sum(flat, "tp")
        loads = []
        sums = flat.split([len(layer.total) for layer in self._layers])
        for layer, counts in zip(self._layers, sums, strict=True):
            if hasattr(layer.holder, "balance"):
                layer.holder.balance(counts, skip)
            relative = counts / counts.double().mean().clamp(min=1)
            wanted = self._tokens.double() * layer.experts.top_k
            dropped = 1 - counts.sum() / wanted
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


class _BalanceInOneProcess(Transform):
    """The modules of experts of a whole model, with the counts of a forward hook."""

    def __init__(self, model: nn.Module) -> None:
        # by their modules of experts: the modules that hold them
        self._holders: dict[nn.Module, Any] = {}
        self._counts: dict[nn.Module, Tensor] = {}  # in this step
        for name, experts in experts_of(model).items():
            self._holders[experts] = model.get_submodule(name.rpartition(".")[0])
            experts.register_forward_pre_hook(self._count)

    @contextmanager
    def training(self, tokens: Tensor) -> Iterator[None]:
        self._counts = {}
        for holder in self._holders.values():
            if hasattr(holder, "token_share"):
                holder.token_share = torch.tensor(1 / tokens.item())
        yield

    @torch.no_grad()
    def after_update(self, skip: Tensor | None) -> None:
        for experts, counts in self._counts.items():
            if hasattr(self._holders[experts], "balance"):
                self._holders[experts].balance(counts)

    def _count(self, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
        if experts.training and not in_backward():
            self._counts[experts] = self._counts.get(experts, 0) + args[1]


# attributes of a module of experts: the forward that it had, None = that of its class; the count
_BEFORE, _TOTAL = "uncounted_forward", "tokens_of_step"


def _forward(experts: nn.Module, tokens: Tensor, counts: Tensor, *others: Tensor) -> Any:
    if experts.training and torch.is_grad_enabled():
        counts = torch.ops.titanlike.tokens_of_experts(counts, getattr(experts, _TOTAL))
    before = getattr(experts, _BEFORE)
    if before is None:
        return type(experts).forward(experts, tokens, counts)
    return before(tokens, counts, *others)
