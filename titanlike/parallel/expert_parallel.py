"""Expert parallelism: of each layer's experts a rank has a part, and gets the tokens that go to them.

The ranks are those of data and context parallelism, which see other tokens (arXiv 2006.16668): they
exchange tokens before a module of experts and results behind it. What such a module is, is said in
`models/experts.py`: all of its parameters have the experts first, and a rank holds some of these
rows. Gradients come back with the results: of its experts, a rank has those of all tokens of its
group, and FSDP sums them over the ranks that hold the same experts.

Shapes: S tokens of this rank times the experts that each goes to, R of those that it gets, D dim, E
experts, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.parallel.exchanges import Peers, exchange
from titanlike.parallel.expert_balance import experts_of
from titanlike.parallel.tp.part import Part
from titanlike.parallel.tp.styles import Placement


@dataclass(eq=False)
class ExpertRanks(Peers):
    """The expert-parallel ranks that this one exchanges tokens with."""


def divide_experts(
    model: nn.Module, ranks: ExpertRanks, placements: Mapping[str, Placement]
) -> dict[str, Placement]:
    """Divide the experts of a model on meta in place; the placements of its parameters.

    placements: among tensor-parallel ranks; {} without any. The experts must divide.
    """
    found = dict(placements)
    for name, experts in experts_of(model).items():
        for last, whole in list(experts.named_parameters(recurse=False)):
            each = len(whole) // ranks.size
            start = ranks.rank * each
            part = Part(whole.shape, 0, ((start, start + each),))
            local = nn.Parameter(whole.new_empty(part.local_shape), whole.requires_grad)
            experts._parameters[last] = local
            before = placements.get(f"{name}.{last}", Placement(None, 1, "never"))
            found[f"{name}.{last}"] = replace(before, part=part)
        experts.forward = partial(_elsewhere, experts.forward, ranks)
    return found


def _elsewhere(
    forward: Callable[[Tensor, Tensor], Tensor], ranks: ExpertRanks, tokens: Tensor, counts: Tensor
) -> Tensor:
    """tokens [S, D] sorted by expert, counts [E] -> results [S, D]; forward: of this rank's experts."""
    of_rank = counts.unflatten(0, (ranks.size, -1))  # [n, E / n]
    if ranks.group is None or tokens.is_meta:  # alone: as many tokens come as go
        mine = exchange(tokens, ranks, "all_to_all", "all_to_all", 0)
        return exchange(forward(mine, of_rank.sum(0)), ranks, "all_to_all", "all_to_all", 0)
    route = _route(of_rank, ranks.group)
    mine = _Exchange.apply(tokens, route, True)  # [R, D]
    return _Exchange.apply(forward(mine, route.counts), route, False)


@dataclass(frozen=True)
class _Route:
    """Where tokens go, and what comes."""

    group: dist.ProcessGroup
    sent: list[int]  # to each rank
    received: list[int]
    counts: Tensor  # of what comes, for each of this rank's experts: [E / n]
    order: Tensor  # place among what is sorted by expert -> among what comes, which is by rank: [R]
    place: Tensor  # the reverse


def _route(counts: Tensor, group: dist.ProcessGroup) -> _Route:
    """counts [n, E / n]: tokens that go to each rank's experts."""
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts.contiguous(), group=group)
    # the one wait for a device: sizes of messages are known on the host
    sent, received = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
    numbers = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    expert = numbers.repeat_interleave(coming.flatten(), output_size=sum(received))
    order = expert.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return _Route(group, sent, received, coming.sum(0), order, place)


class _Exchange(torch.autograd.Function):
    """Tokens go to their experts, sorted by them; or results back. Each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: _Route, there: bool) -> Tensor:
        ctx.route, ctx.there = route, there
        return _exchanged(x, route, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _exchanged(gradient, ctx.route, not ctx.there), None, None


def _exchanged(x: Tensor, route: _Route, there: bool) -> Tensor:
    sent, received = route.sent, route.received
    if not there:
        sent, received = received, sent
        x = x.index_select(0, route.place)
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=route.group)
    return result.index_select(0, route.order) if there else result


def why_not_compiled(stage: nn.Module, block: str) -> str:
    """Of a block whose tokens are exchanged; "" for others."""
    inside = experts_of(stage.get_submodule(block))
    return "it sends tokens to experts of other ranks (ep)" if inside else ""
