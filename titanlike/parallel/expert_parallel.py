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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.distributed.collectives import Peers, exchange
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.placement import Part, Placement, experts_of
from titanlike.distributed.transform import Transform
from titanlike.parallel.activation_checkpoint import keeps, saved_operators
from titanlike.torch_private.process_groups import group_named

SEND_TOKENS = "titanlike.send_tokens"  # the name of an operator


@dataclass(eq=False)
class ExpertRanks(Peers):
    """The expert-parallel ranks that this one exchanges tokens with."""


class ExpertParallel(Transform):
    def __init__(self, config: Config, model: nn.Module) -> None:
        """Divide the experts of a model on meta in place, as the first rank has them. Raises ConfigError
        where there are none, or where they cannot be divided."""
        _check_experts(config, model)
        self._config = config
        self._eager: set[str] = set()
        self.first = self.ranks = ExpertRanks(config.ep, 0)
        divide_experts(model, self.first, {})

    def describe(self, plan: Any) -> Iterator[tuple[str, str]]:
        counts = {experts.num_experts for experts in _experts(plan.model_graph.model).values()}
        shown = " or ".join(f"{count // self._config.ep} of {count}" for count in sorted(counts))
        yield "expert parallel", f"each rank has {shown} experts of a layer"

    def open(self, mesh: Mesh, plan: Any) -> None:
        group = mesh.expert_group
        rank = 0 if group is None else dist.get_rank(group)
        self.ranks = ExpertRanks(self._config.ep, rank, group)
        if plan.variable and not keeps(SEND_TOKENS, saved_operators(self._config)):
            recomputed = (name for blocks in plan.recomputed.blocks for name in blocks)
            model = plan.model_graph.model
            self._eager = {name for name in recomputed if experts_of(model.get_submodule(name))}

    def why_not_compiled(self, block: str) -> str:
        # the repeated ones and those of gradients do not depend on each other: a compiler orders them
        # by sizes
        differ = "it repeats the exchanges of experts, and lengths differ between ranks"
        return differ if block in self._eager else ""

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        assert isinstance(self.ranks, ExpertRanks)
        placements.update(divide_experts(model, self.ranks, placements))


def _experts(model: nn.Module) -> dict[str, Any]:
    return {**experts_of(model)}


def _check_experts(config: Config, model: nn.Module) -> None:
    modules = _experts(model)
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
        fits = max(
            n
            for n in range(1, config.ep + 1)
            if config.shards % n == 0 and not any(c % n for c in counts)
        )
        reason = f"does not divide the {shown} experts of a layer"
        raise ConfigError([Problem("ep", config.ep, reason, f"ep={fits}")])


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
    operators = torch.ops.titanlike
    if ranks.group is None or tokens.is_meta:  # alone: as many tokens come as go
        route = *operators.alone_route_tokens(of_rank, len(tokens)), ""
        there = exchange(tokens, ranks, "all_to_all", "all_to_all", 0)
        results = forward(operators.send_tokens(there, *route), of_rank.sum(0))
        back = exchange(results, ranks, "all_to_all", "all_to_all", 0)
        return operators.return_tokens(back, *route, len(tokens))
    group = ranks.group.group_name
    mine, *places = operators.route_tokens(of_rank, group)
    results = forward(operators.send_tokens(tokens, *places, group), mine)  # [R, D]
    return operators.return_tokens(results, *places, group, len(tokens))


# --- what is exchanged, as operators of our own -------------------------------------------------
#
# So a compiled block need not know how many tokens come, and a recomputation may keep the results
# (conf/activation_checkpoint/selective.yaml).


@torch.library.custom_op("titanlike::route_tokens", mutates_args=())
def _route(counts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts [n, E / n]: tokens that go to each rank's experts.

    Returns the tokens that come for each of this rank's experts [E / n]; how many go to each rank and
    come from it, on the host [2, n]; of what comes, which is by rank, the place of each row when it
    is sorted by expert [R]; and the reverse.
    """
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts.contiguous(), group=group_named(group))
    # the one wait for a device: sizes of messages are known on the host
    sizes = torch.stack([counts.sum(1), coming.sum(1)]).cpu()
    numbers = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    expert = numbers.repeat_interleave(coming.flatten(), output_size=int(sizes[1].sum()))
    order = expert.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return coming.sum(0), sizes, order, place


@_route.register_fake
def _(counts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = counts.new_empty(torch.library.get_ctx().new_dynamic_size())
    sizes = counts.new_empty(2, counts.shape[0], device="cpu")
    return counts.new_empty(counts.shape[1]), sizes, order, torch.empty_like(order)


def _route_alone(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last three of `_route` where there are no others: sizes alone, for estimates."""
    order = counts.new_empty(rows)
    return counts.new_empty(2, counts.shape[0]), order, torch.empty_like(order)


_alone = torch.library.custom_op("titanlike::alone_route_tokens", _route_alone, mutates_args=())
_alone.register_fake(_route_alone)


@torch.library.custom_op("titanlike::send_tokens", mutates_args=())
def _send(x: Tensor, sizes: Tensor, order: Tensor, place: Tensor, group: str) -> Tensor:
    """Tokens go to their experts, sorted by them: [S, D] -> [R, D]. group: "" = there are no others."""
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
    places = *ctx.saved_tensors, ctx.group
    returned = torch.ops.titanlike.return_tokens(gradient, *places, ctx.rows)
    return returned, None, None, None, None


def _return_backward(ctx: Any, gradient: Tensor) -> Any:
    places = *ctx.saved_tensors, ctx.group
    return torch.ops.titanlike.send_tokens(gradient, *places), None, None, None, None, None


_send.register_autograd(_send_backward, setup_context=_keep_route)
_return.register_autograd(_return_backward, setup_context=_keep_route)
