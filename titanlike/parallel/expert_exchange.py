"""The exchange of expert parallelism: tokens travel to the ranks that have their experts, and results
back.

Tokens are sent by operators that only begin it: until they are there (`titanlike::arrived`) a rank
computes what needs none of them, as an expert that is shared by all tokens. In the backward their
gradients come back beside that expert's.

Shapes: S tokens of this rank times the experts that each goes to, R of those that it gets, N tokens
of this rank, P copies of these that it sends, Q that it gets, D dim, K experts that a token goes to,
E experts, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.distributed.collectives import GroupInfo, autograd_collective
from titanlike.distributed.placement import APART
from titanlike.torch_private.process_groups import fill_later, filled, group_named

SEND_TOKENS = "titanlike.send_tokens"  # the name of an operator
Forward = Callable[[Tensor, Tensor], Tensor]  # of experts: (tokens, counts) -> results


def elsewhere(
    forward: Forward,
    ranks: GroupInfo,
    exact: Callable[[Forward, Tensor, Tensor], Tensor] | None,
    tokens: Tensor,
    counts: Tensor,
    unsorted: Tensor | None = None,
    beside: Callable[[], Tensor] | None = None,
) -> Any:
    """tokens [S, D] sorted by expert, counts [E] -> results [S, D]; forward: of this rank's
    experts; exact: with numerics=exact, see `rank_by_rank`.

    unsorted [S]: place in the order of experts -> in [N * K]. Then tokens are [N, D + K], with the
    weights of their experts, a token is sent once to each rank that has experts of it, and results
    are weighted and added up there: [N, D]. beside: is called while tokens travel; then what it
    returns is returned, too.
    """
    operators, of_rank = torch.ops.titanlike, counts.unflatten(0, (ranks.size, -1))  # [n, E / n]
    group, length = "", len(tokens)
    if ranks.group is not None and not tokens.is_meta:
        group = ranks.group.group_name
    if group and unsorted is None:
        coming, *route = operators.route_tokens(of_rank, group, exact is None)
    elif group:
        coming, slot, *route = operators.unique_route_tokens(of_rank, unsorted, length, group)
    elif unsorted is None:  # alone: as many tokens come as go
        coming, route = of_rank, [*operators.alone_route_tokens(of_rank, length)]
        tokens = autograd_collective(tokens, ranks, "all_to_all", "all_to_all", 0)
    else:
        top_k = len(unsorted) // length
        coming, slot, route = of_rank, unsorted % top_k, [unsorted] * _UNIQUE
        tokens = tokens[:1].expand(round(length * copies(ranks.size, top_k)), -1)
        tokens = autograd_collective(tokens, ranks, "all_to_all", "all_to_all", 0)
    raw, link = operators.send_tokens(tokens, route, group)
    added = beside() if beside else None
    there = operators.arrived(raw, link, tokens.detach(), route, group)
    if unsorted is None:
        results = (
            exact(forward, there, coming) if exact and group else forward(there, coming.sum(0))
        )
    else:
        top_k = len(unsorted) // length
        weights = there[:, -top_k:].gather(1, slot.unsqueeze(1))
        results = weights * forward(there[:, :-top_k].contiguous(), coming.sum(0))
    results = operators.return_tokens(results, route, group, len(tokens))
    if not group:
        results = autograd_collective(results, ranks, "all_to_all", "all_to_all", 0)
        if unsorted is not None:
            results = results[:1].expand(length, -1).clone()
    return (results, added) if beside else results


def copies(ranks: int, top_k: int) -> float:
    """Ranks on which the experts of a token are, if they are chosen at random."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def rank_by_rank(experts: nn.Module, forward: Forward, tokens: Tensor, counts: Tensor) -> Tensor:
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
#
# A route is one of
# - tokens sorted by expert: how many go to each rank and come from it, on the host [2, n]; of what
#   comes, which is by rank, the place of each row when it is sorted by expert [R], or as it is; and
#   the reverse.
# - one copy of a token for each rank: rows to and from each rank, by expert and by copy, on the host
#   [4, n]; the token of each copy that is sent [P]; these places sorted by token and where each token
#   begins in them [N]; of each row for an expert, the copy that came [R]; the places of these sorted
#   by copy, and where each copy begins [Q].

_UNIQUE = 7  # tensors of a route of the second kind


@torch.library.custom_op("titanlike::route_tokens", mutates_args=())
def _route(counts: Tensor, group: str, by_expert: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts [n, E / n]: tokens that go to each rank's experts.

    Returns the tokens that come from each rank for each of this rank's experts [n, E / n], and the
    route.
    """
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts.contiguous(), group=group_named(group))
    on_host = _to_host(torch.stack([counts.sum(1), coming.sum(1)]))
    # blocks of rows, one for each rank and expert, move as a whole: `away` rows to their expert's
    away = _begins(coming.T).T - _begins(coming)
    sizes = on_host()
    rows = int(sizes[1].sum())
    order = torch.arange(rows, device=coming.device)
    place = order.clone()
    if by_expert:
        place += away.flatten().repeat_interleave(coming.flatten(), output_size=rows)
        order -= away.T.flatten().repeat_interleave(coming.T.flatten(), output_size=rows)
    return coming, sizes, order, place


@_route.register_fake
def _(counts: Tensor, group: str, by_expert: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = counts.new_empty(torch.library.get_ctx().new_dynamic_size())
    sizes = counts.new_empty(2, counts.shape[0], device="cpu")
    return torch.empty_like(counts), sizes, order, torch.empty_like(order)


def _to_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host, where sizes of messages are known; what waits for it, but
    not for what is queued in between: that the device has to do while the host goes on."""
    copied = x.to("cpu", non_blocking=True)  # pinned
    if x.is_cpu:
        return lambda: copied
    event = torch.accelerator.current_stream(x.device).record_event()

    def wait() -> Tensor:
        event.synchronize()
        return copied

    return wait


def _begins(blocks: Tensor) -> Tensor:
    """The first row of each block of so many rows, one after the other."""
    flat = blocks.flatten()
    return (flat.cumsum(0) - flat).view(blocks.shape)


def _route_alone(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The route where there are no others: sizes alone, for estimates."""
    order = counts.new_empty(rows)
    return counts.new_empty(2, counts.shape[0]), order, torch.empty_like(order)


_alone = torch.library.custom_op("titanlike::alone_route_tokens", _route_alone, mutates_args=())
_alone.register_fake(_route_alone)


@torch.library.custom_op("titanlike::unique_route_tokens", mutates_args=())
def _route_unique(
    counts: Tensor, order: Tensor, tokens: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """counts as above, order: `unsorted`. Returns counts of what comes, which of a token's weights
    is that of each row [R], and the route."""
    to = counts.sum(1)
    rank = torch.arange(len(counts), device=order.device)
    token, top_k = order // (len(order) // tokens), len(order) // tokens
    cell = rank.repeat_interleave(to, output_size=len(order)) * tokens + token
    used = torch.zeros(len(counts), tokens, dtype=torch.int64, device=order.device)
    used.view(-1).scatter_(0, cell, torch.ones_like(cell))
    of_rank = used.sum(1)  # copies
    sent = torch.cat([counts, of_rank.unsqueeze(1)], 1)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group_named(group))
    coming, copies_coming = got[:, :-1].contiguous(), got[:, -1]
    on_host = _to_host(torch.stack([to, coming.sum(1), of_rank, copies_coming]))
    # of each row's copy, among all that are sent, by rank; the same by token
    place, by_token = ((x.flatten().cumsum(0) - 1) for x in (used, used.T))
    place, by_token = place[cell], by_token.view(tokens, -1).T.flatten()[cell]
    inside = place - _begins(of_rank).repeat_interleave(to, output_size=len(order))
    mine = inside * top_k + order % top_k
    begins, away = _begins(used.sum(0)), _begins(coming.T).T - _begins(coming)
    sizes = on_host()
    go, come, *numbers = sizes.tolist()
    rows, p, q = sum(come), *map(sum, numbers)
    told = place.new_empty(rows)
    dist.all_to_all_single(told, mine, come, go, group=group_named(group))
    pick, sorted_by_token = (place.new_empty(p) for _ in range(2))
    pick.scatter_(0, place, token)
    sorted_by_token.scatter_(0, by_token, place)
    by_expert = torch.arange(rows, device=order.device)
    by_expert -= away.T.flatten().repeat_interleave(coming.T.flatten(), output_size=rows)
    first = _begins(copies_coming).repeat_interleave(coming.sum(1), output_size=rows)
    spread = (told // top_k + first)[by_expert]
    slot = (told % top_k)[by_expert]
    ones = spread.new_zeros(q).scatter_add_(0, spread, torch.ones_like(spread))
    by_copy = spread.argsort(stable=True)
    return coming, slot, sizes, pick, sorted_by_token, begins, spread, by_copy, _begins(ones)


@_route_unique.register_fake
def _(counts: Tensor, order: Tensor, tokens: int, group: str) -> Any:
    p, q, rows = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
    sizes = counts.new_empty(4, counts.shape[0], device="cpu")
    shapes = rows, p, p, tokens, rows, rows, q
    slot, *route = (order.new_empty(shape) for shape in shapes)
    return torch.empty_like(counts), slot, sizes, *route


def _begin(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """What is filled later, see `filled`."""
    result = x.new_empty(sum(received), *x.shape[1:])
    x, there = x.contiguous(), group_named(group)
    fill_later(result, dist.all_to_all_single(result, x, received, sent, there, async_op=True))
    return result


@torch.library.custom_op("titanlike::send_tokens", mutates_args=())
def _send(x: Tensor, route: list[Tensor], group: str) -> tuple[Tensor, Tensor]:
    """Begin to send tokens: [S or N, ...] -> rows that will come, for `arrived`, and a tensor without
    elements of its own, by which their gradients come back: its gradient will come, too.

    group: "" = there are no others.
    """
    if not group:
        return x.clone(), _link(x, len(x))
    unique = len(route) == _UNIQUE
    *_, sent, received = route[0].tolist()
    x = x.index_select(0, route[1]) if unique else x
    return _begin(x, sent, received, group), _link(x, len(x))


def _link(x: Tensor, rows: Any) -> Tensor:
    return x.new_empty([1] * x.dim()).expand(rows, *x.shape[1:])


@_send.register_fake
def _(x: Tensor, route: list[Tensor], group: str) -> tuple[Tensor, Tensor]:
    if not group:
        return torch.empty_like(x), _link(x, len(x))
    unique = len(route) == _UNIQUE
    rows = len(route[1]) if unique else len(x)
    return x.new_empty(len(route[-1]), *x.shape[1:]), _link(x, rows)


@torch.library.custom_op("titanlike::arrived", mutates_args=())
def _arrived(raw: Tensor, link: Tensor, sent: Tensor, route: list[Tensor], group: str) -> Tensor:
    """Wait for tokens: [R, ...], sorted by expert.

    sent: nobody writes into these before they have gone; else a compiled block would give their
    memory to others.
    """
    order = route[-3] if len(route) == _UNIQUE else route[1]
    if not group:
        return raw[:1].repeat(len(order), *[1] * (raw.dim() - 1))
    return filled(raw).index_select(0, order)


@_arrived.register_fake
def _(raw: Tensor, link: Tensor, sent: Tensor, route: list[Tensor], group: str) -> Tensor:
    order = route[-3] if len(route) == _UNIQUE else route[1]
    return raw.new_empty(len(order), *raw.shape[1:])


@torch.library.custom_op("titanlike::begin_return", mutates_args=())
def _begin_return(x: Tensor, route: list[Tensor], group: str, rows: int) -> Tensor:
    """Begin to send back [R, ...]: rows as they were sent (so many), for `_returned`."""
    if not group:
        return x[:1].repeat(rows, *[1] * (x.dim() - 1))
    *_, sent, received = route[0].tolist()
    if len(route) == _UNIQUE:  # sums of a fixed order, which index_add has not on a GPU
        x = F.embedding_bag(route[-2], x, route[-1], mode="sum")
    else:
        x = x.index_select(0, route[2])
    return _begin(x, received, sent, group)


@_begin_return.register_fake
def _(x: Tensor, route: list[Tensor], group: str, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


@torch.library.custom_op("titanlike::sum_copies", mutates_args=())
def _sum_copies(raw: Tensor, route: list[Tensor]) -> Tensor:
    """Wait for what comes back for each copy: sums of a token's, [N, ...]."""
    return F.embedding_bag(route[2], filled(raw), route[3], mode="sum")


@_sum_copies.register_fake
def _(raw: Tensor, route: list[Tensor]) -> Tensor:
    return raw.new_empty(len(route[3]), *raw.shape[1:])


def _returned(raw: Tensor, route: list[Tensor], group: str) -> Tensor:
    if not group:
        return raw
    return torch.ops.titanlike.sum_copies(raw, route) if len(route) == _UNIQUE else filled(raw)


@torch.library.custom_op("titanlike::return_tokens", mutates_args=())
def _return(x: Tensor, route: list[Tensor], group: str, rows: int) -> Tensor:
    """The transpose of sending, which is also its gradient: [R, ...] -> [S, ...] or, sums over the
    copies, [N, ...]; rows: S or N."""
    sent = len(route[1]) if group and len(route) == _UNIQUE else rows
    return _returned(_begin_return(x, route, group, sent), route, group)


@_return.register_fake
def _(x: Tensor, route: list[Tensor], group: str, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


def _keep_route(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    *_, route, ctx.group = inputs[: [*map(type, inputs)].index(str) + 1]
    ctx.save_for_backward(*route)


def _send_backward(ctx: Any, _: Any, coming: Tensor) -> Any:
    route = [*ctx.saved_tensors]
    return _returned(coming, route, ctx.group), [None] * len(route), None


def _keep_arrived(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep_route(ctx, inputs, output)
    ctx.rows = len(inputs[1])


def _arrived_backward(ctx: Any, gradient: Tensor) -> Any:
    route = [*ctx.saved_tensors]
    coming = torch.ops.titanlike.begin_return(gradient, route, ctx.group, ctx.rows)
    return None, coming, None, [None] * len(route), None


def _return_backward(ctx: Any, gradient: Tensor) -> Any:
    route, operators = [*ctx.saved_tensors], torch.ops.titanlike
    raw, link = operators.send_tokens(gradient, route, ctx.group)
    there = operators.arrived(raw, link, gradient, route, ctx.group)
    return there, [None] * len(route), None, None


_send.register_autograd(_send_backward, setup_context=_keep_route)
_arrived.register_autograd(_arrived_backward, setup_context=_keep_arrived)
_return.register_autograd(_return_backward, setup_context=_keep_route)
