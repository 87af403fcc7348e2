"""The all-to-alls of expert parallelism: tokens to the ranks that have their experts, results back.

Sending operators only launch the all-to-all: until the tokens arrive (`titanlike::arrived`) a rank
computes what does not need them, such as a shared expert. In the backward their gradients'
all-to-all overlaps with that expert's backward.

Shapes: S rows sent by this rank (tokens times experts per token), R rows received, N tokens of this
rank, P copies of tokens sent, Q received, D dim, K experts per token, E experts, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.distributed.collectives import GroupInfo, autograd_collective
from titanlike.core.distributed.placement import APART
from titanlike.core.torch_private.process_groups import fill_later, filled, group_named

SEND_TOKENS = "titanlike.send_tokens"  # the name of an operator
Forward = Callable[[Tensor, Tensor], Tensor]  # of experts: (tokens, counts) -> results


def elsewhere(
    forward: Forward,
    ranks: GroupInfo,
    exact: Callable[[Forward, Tensor, Tensor], Tensor] | None,
    tokens: Tensor,
    counts: Tensor,
    unsorted: Tensor | None = None,
    weights: Tensor | None = None,
    beside: Callable[[], Tensor] | None = None,
) -> Any:
    """Compute experts on the ranks that have them: tokens [S, D] sorted by expert, counts [E] ->
    results [S, D]; forward: this rank's experts; exact: with numerics=exact, see `rank_by_rank`.

    unsorted [S]: position in expert order -> in [N * K]. Then tokens are [N, D], with the weights
    [N, K] of their experts; a token is sent once to each rank that has experts of it, and results
    are weighted and summed there: [N, D]. beside: called while tokens travel; its result is
    returned, too.
    """
    operators = torch.ops.titanlike
    rank_counts = counts.unflatten(0, (ranks.size, -1))  # [n, E / n]
    length, top_k = len(tokens), 1 if unsorted is None else len(unsorted) // len(tokens)
    group, home, away = "", [unsorted] * 5, [unsorted] * 3
    if ranks.group is not None and not tokens.is_meta:
        group = ranks.group.group_name
        if unsorted is None:
            coming, moves, *home = operators.route_tokens(rank_counts, group)
        else:
            coming, told, *home = operators.unique_route_tokens(
                rank_counts, unsorted, length, group
            )
    else:  # without other ranks: as many tokens arrive as leave
        coming = rank_counts
        if unsorted is None:
            *home, order, place = operators.alone_route_tokens(rank_counts, length)
            away = [order, place]
    # weights travel by themselves: rows of both would be copied apart, and their gradients together
    sent = [tokens] if weights is None else [tokens, weights]
    if not group:
        leaving = round(length * copies(ranks.size, top_k))
        goes = sent if weights is None else [x[:1].expand(leaving, -1) for x in sent]
        sent = [autograd_collective(x, ranks, "all_to_all", "all_to_all") for x in goes]
    raw = [operators.send_tokens(x, home, group) for x in sent]
    if group and unsorted is None:
        away = [*operators.away_route_tokens(coming, moves, home[-1], exact is None)]
    elif group:
        coming, slot, *away = operators.unique_away_route_tokens(coming, told, home[-1], top_k)
    added = beside() if beside else None
    there, *weighted = (
        operators.arrived(*of_x, x.detach(), home, away, group)
        for of_x, x in zip(raw, sent, strict=True)
    )
    by_rank = exact if group else None
    results = by_rank(forward, there, coming) if by_rank else forward(there, coming.sum(0))
    if unsorted is not None:
        slot = slot if group else unsorted % top_k
        results = weighted[0].gather(1, slot.unsqueeze(1)) * results
    results = operators.return_tokens(results, home, away, group, len(sent[0]))
    if not group:
        results = autograd_collective(results, ranks, "all_to_all", "all_to_all", 0)
        if unsorted is not None:
            results = results[:1].expand(length, -1).clone()
    return (results, added) if beside else results


def copies(ranks: int, top_k: int) -> float:
    """The expected number of ranks with experts of a token, if these are chosen at random."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def rank_by_rank(experts: nn.Module, forward: Forward, tokens: Tensor, counts: Tensor) -> Tensor:
    """Compute each rank's tokens separately, as without expert parallelism: equal shapes, one
    weight gradient each. tokens [R, D] by rank, then by expert; counts [n, E / n] -> [R, D]."""
    apart = vars(experts).get(APART, nullcontext)  # frozen weights have none
    results = []
    parts = zip(tokens.split(counts.sum(1).tolist()), counts, strict=True)
    for rank, (part, rank_counts) in enumerate(parts):
        with apart(rank):
            results.append(forward(part, rank_counts))
    return torch.cat(results)


# --- custom operators ---------------------------------------------------------------------------
#
# So a compiled block need not know how many tokens arrive, and selective checkpointing can save
# the results (`SelectiveActivationCheckpoint.save`).
#
# The part of a route that an all-to-all needs is `home`; the rest, made while tokens travel, is
# `away`. For tokens sorted by expert:
# - home: rows to and from each rank, on the host [2, n]; a tensor with R elements
# - away: for each received row (sorted by rank) its position sorted by expert [R]; the inverse.
# With one copy of a token per rank:
# - home: rows to and from each rank, by expert and by copy, on the host [4, n]; the token of each
#   sent copy [P]; their positions sorted by token, and where each token begins there [N]; a tensor
#   with Q elements
# - away: for each row of an expert its received copy [R]; their positions sorted by copy, and
#   where each copy begins [Q].


@torch.library.custom_op("titanlike::route_tokens", mutates_args=())
def _route(counts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts [n, E / n]: tokens for each rank's experts.

    Returns the tokens from each rank for each of this rank's experts [n, E / n], by how many rows
    these blocks move to be sorted by expert, and home.
    """
    coming = torch.empty_like(counts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(coming, counts.contiguous(), group=group_named(group))
    on_host = to_host(torch.stack([counts.sum(1), coming.sum(1)]))
    moves = _moves(coming)
    sizes = on_host()
    return coming, moves, sizes, coming.new_empty(int(sizes[1].sum()))


@_route.register_fake
def _(counts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    sizes = counts.new_empty(2, counts.shape[0], device="cpu")
    moves = counts.new_empty(counts.shape)
    return counts.new_empty(counts.shape), moves, sizes, counts.new_empty(rows)


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host; the returned function waits for it, but not for kernels
    queued since, which keep the device busy."""
    copied = x.to("cpu", non_blocking=True)  # pinned
    if x.is_cpu:
        return lambda: copied
    event = torch.accelerator.current_stream(x.device).record_event()

    def wait() -> Tensor:
        event.synchronize()
        return copied

    return wait


def _begins(blocks: Tensor) -> Tensor:
    """The first row of each of consecutive blocks of these sizes."""
    flat = blocks.flatten()
    return (flat.cumsum(0) - flat).view(blocks.shape)


def _moves(coming: Tensor) -> Tensor:
    """By how many rows each block, sorted by rank [n, E / n], moves to be sorted by expert."""
    return (_begins(coming.T).T - _begins(coming)).contiguous()


@torch.library.custom_op("titanlike::away_route_tokens", mutates_args=())
def _away(coming: Tensor, moves: Tensor, came: Tensor, by_expert: bool) -> tuple[Tensor, Tensor]:
    order = torch.arange(len(came), device=coming.device)
    place = order.clone()
    if by_expert:
        place += moves.flatten().repeat_interleave(coming.flatten(), output_size=len(came))
        order -= moves.T.flatten().repeat_interleave(coming.T.flatten(), output_size=len(came))
    return order, place


@_away.register_fake
def _(coming: Tensor, moves: Tensor, came: Tensor, by_expert: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(came), torch.empty_like(came)


def _route_alone(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The route without other ranks: only sizes, for estimates."""
    came, order, place = (counts.new_empty(rows) for _ in range(3))
    return counts.new_empty(2, counts.shape[0]), came, order, place


_alone = torch.library.custom_op("titanlike::alone_route_tokens", _route_alone, mutates_args=())
_alone.register_fake(_route_alone)


@torch.library.custom_op("titanlike::unique_route_tokens", mutates_args=())
def _route_unique(
    counts: Tensor, order: Tensor, tokens: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """counts: as in `_route`; order: `unsorted`. Returns received counts, rows and copies [n, E / n
    + 1], information on each received row [R], and home."""
    to, top_k = counts.sum(1), len(order) // tokens
    rank = torch.arange(len(counts), device=order.device)
    token = order // top_k
    cell = rank.repeat_interleave(to, output_size=len(order)) * tokens + token
    used = torch.zeros(len(counts), tokens, dtype=torch.int64, device=order.device)
    used.view(-1).scatter_(0, cell, torch.ones_like(cell))
    sent = torch.cat([counts, used.sum(1, keepdim=True)], 1)
    coming = torch.empty_like(sent)
    dist.all_to_all_single(coming, sent, group=group_named(group))
    on_host = to_host(
        torch.stack([x for c in (sent, coming) for x in (c[:, :-1].sum(1), c[:, -1])])
    )
    # position of each row's copy among all sent ones, by rank; the same by token
    place, by_token = (x.flatten().cumsum(0) - 1 for x in (used, used.T))
    place, by_token = place[cell], by_token.view(tokens, -1).T.flatten()[cell]
    inside = place - _begins(sent[:, -1]).repeat_interleave(to, output_size=len(order))
    mine, begins = inside * top_k + order % top_k, _begins(used.sum(0))
    sizes = on_host()
    go, sent_copies, come, coming_copies = sizes.tolist()
    told = place.new_empty(sum(come))
    dist.all_to_all_single(told, mine, come, go, group=group_named(group))
    pick, sorted_by_token = (place.new_empty(sum(sent_copies)) for _ in range(2))
    pick.scatter_(0, place, token)
    sorted_by_token.scatter_(0, by_token, place)
    return coming, told, sizes, pick, sorted_by_token, begins, told.new_empty(sum(coming_copies))


@_route_unique.register_fake
def _(counts: Tensor, order: Tensor, tokens: int, group: str) -> Any:
    rows, p, q = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
    sizes = counts.new_empty(4, counts.shape[0], device="cpu")
    told, *home = (order.new_empty(shape) for shape in (rows, p, p, tokens, q))
    return counts.new_empty(counts.shape[0], counts.shape[1] + 1), told, sizes, *home


@torch.library.custom_op("titanlike::unique_away_route_tokens", mutates_args=())
def _away_unique(
    coming: Tensor, told: Tensor, came: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return received rows [n, E / n], each row's index in its token's weights [R], and away."""
    rows, device = len(told), told.device
    coming, first = coming[:, :-1].contiguous(), _begins(coming[:, -1])
    by_expert = torch.arange(rows, device=device)
    by_expert -= _moves(coming).T.flatten().repeat_interleave(coming.T.flatten(), output_size=rows)
    first = first.repeat_interleave(coming.sum(1), output_size=rows)
    spread = (told // top_k + first)[by_expert]
    slot = (told % top_k)[by_expert]
    ones = torch.zeros_like(came).scatter_add_(0, spread, torch.ones_like(spread))
    return coming, slot, spread, spread.argsort(stable=True), _begins(ones)


@_away_unique.register_fake
def _(coming: Tensor, told: Tensor, came: Tensor, top_k: int) -> Any:
    rows = [torch.empty_like(told) for _ in range(3)]
    return coming.new_empty(coming.shape[0], coming.shape[1] - 1), *rows, torch.empty_like(came)


def _begin(x: Tensor, numbers: list[list[int]], group: str) -> Tensor:
    """Launch an all-to-all; its result is `filled` later; numbers: rows to and from each rank."""
    sent, received = numbers
    result = x.new_empty(sum(received), *x.shape[1:])
    by: dict[str, Any] = {"group": group_named(group), "async_op": True}
    fill_later(result, dist.all_to_all_single(result, x.contiguous(), received, sent, **by))
    return result


def _numbers(home: list[Tensor]) -> list[list[int]]:
    sizes = home[0].tolist()
    return sizes[1::2] if len(home) > 2 else sizes


@torch.library.custom_op("titanlike::send_tokens", mutates_args=())
def _send(x: Tensor, home: list[Tensor], group: str) -> tuple[Tensor, Tensor]:
    """Launch the all-to-all of tokens: [S or N, ...] -> rows that will arrive, for `arrived`, and a
    link without elements, whose gradient carries the tokens' gradients back.

    group: "" = no other ranks.
    """
    if not group:
        return x.clone(), _link(x, len(x))
    x = x.index_select(0, home[1]) if len(home) > 2 else x
    return _begin(x, _numbers(home), group), _link(x, len(x))


def _link(x: Tensor, rows: Any) -> Tensor:
    return x.new_empty_strided((rows, *x.shape[1:]), [0] * x.dim())


@_send.register_fake
def _(x: Tensor, home: list[Tensor], group: str) -> tuple[Tensor, Tensor]:
    if not group:
        return torch.empty_like(x), _link(x, x.shape[0])
    rows = (home[1] if len(home) > 2 else x).shape[0]
    return x.new_empty(home[-1].shape[0], *x.shape[1:]), _link(x, rows)


@torch.library.custom_op("titanlike::arrived", mutates_args=())
def _arrived(
    raw: Tensor, link: Tensor, sent: Tensor, home: list[Tensor], away: list[Tensor], group: str
) -> Tensor:
    """Wait for tokens: [R, ...], sorted by expert.

    sent: kept alive until sent; else a compiled block would reuse its memory.
    """
    if not group:
        return raw[:1].repeat(len(away[0]), *[1] * (raw.dim() - 1))
    return filled(raw).index_select(0, away[0])


@_arrived.register_fake
def _(
    raw: Tensor, link: Tensor, sent: Tensor, home: list[Tensor], away: list[Tensor], group: str
) -> Tensor:
    return raw.new_empty(away[0].shape[0], *raw.shape[1:])


@torch.library.custom_op("titanlike::begin_return", mutates_args=())
def _begin_return(
    x: Tensor, home: list[Tensor], away: list[Tensor], group: str, rows: int
) -> Tensor:
    """Launch the all-to-all of results [R, ...] back to `rows` sent rows, for `_returned`."""
    if not group:
        return x[:1].repeat(rows, *[1] * (x.dim() - 1))
    if len(home) > 2:  # sums in a fixed order, unlike index_add on a GPU
        x = F.embedding_bag(away[1], x, away[2], mode="sum")
    else:
        x = x.index_select(0, away[1])
    return _begin(x, _numbers(home)[::-1], group)


@_begin_return.register_fake
def _(x: Tensor, home: list[Tensor], away: list[Tensor], group: str, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


@torch.library.custom_op("titanlike::sum_copies", mutates_args=())
def _sum_copies(raw: Tensor, home: list[Tensor]) -> Tensor:
    """Wait for each copy's results; sum them by token: [N, ...]."""
    return F.embedding_bag(home[2], filled(raw), home[3], mode="sum")


@_sum_copies.register_fake
def _(raw: Tensor, home: list[Tensor]) -> Tensor:
    return raw.new_empty(home[3].shape[0], *raw.shape[1:])


def _returned(raw: Tensor, home: list[Tensor], group: str) -> Tensor:
    if not group:
        return raw
    return torch.ops.titanlike.sum_copies(raw, home) if len(home) > 2 else filled(raw)


@torch.library.custom_op("titanlike::return_tokens", mutates_args=())
def _return(x: Tensor, home: list[Tensor], away: list[Tensor], group: str, rows: int) -> Tensor:
    """The transpose of sending, also its gradient: [R, ...] -> [S, ...] or, summed over copies, [N,
    ...]; rows: S or N."""
    sent = len(home[1]) if group and len(home) > 2 else rows
    return _returned(_begin_return(x, home, away, group, sent), home, group)


@_return.register_fake
def _(x: Tensor, home: list[Tensor], away: list[Tensor], group: str, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """setup_context of all these operators: saves the route and the group, and for `arrived` the
    number of sent rows, the size of `link`."""
    lists = [each for each in inputs if isinstance(each, list)]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(tensor for each in lists for tensor in each))
    ctx.lengths = [*map(len, lists)]
    ctx.rows = inputs[1].shape[0] if isinstance(inputs[1], Tensor) else None
    ctx.group = next(each for each in inputs if isinstance(each, str))


def _kept(ctx: Any) -> list[list[Tensor]]:
    saved = iter(ctx.saved_tensors)
    return [[next(saved) for _ in range(length)] for length in ctx.lengths]


def _send_backward(ctx: Any, _: Any, coming: Tensor) -> Any:
    [home] = _kept(ctx)
    return _returned(coming, home, ctx.group), [None] * len(home), None


def _arrived_backward(ctx: Any, gradient: Tensor) -> Any:
    home, away = _kept(ctx)
    coming = torch.ops.titanlike.begin_return(gradient, home, away, ctx.group, ctx.rows)
    return None, coming, None, [None] * len(home), [None] * len(away), None


def _return_backward(ctx: Any, gradient: Tensor) -> Any:
    (home, away), operators = _kept(ctx), torch.ops.titanlike
    raw, link = operators.send_tokens(gradient, home, ctx.group)
    there = operators.arrived(raw, link, gradient, home, away, ctx.group)
    return there, [None] * len(home), [None] * len(away), None, None


_send.register_autograd(_send_backward, setup_context=_keep)
_arrived.register_autograd(_arrived_backward, setup_context=_keep)
_return.register_autograd(_return_backward, setup_context=_keep)
