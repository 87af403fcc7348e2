"""A mixture of experts: Llama's blocks, in which a router sends each token to a few of many networks.

With the right sizes it is Mixtral (arXiv 2401.04088), Qwen3-MoE (2505.09388) or, but for its attention,
DeepSeek-V3 (2412.19437). No expert has a capacity: no token is dropped.

Shapes: B batch, T tokens, D dim, N = B * T, E experts, K experts that a token goes to, V vocab_size.
The model contains no parallelism.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlike.models.experts import AddLoss, Experts, through_experts
from titanlike.models.llama import (
    Attention,
    Block,
    FeedForward,
    Llama,
    RMSNorm,
    attention_problems,
)
from titanlike.models.sizes import not_positive


class Routing(NamedTuple):
    """How a token's experts are found."""

    top_k: int  # experts that a token goes to
    scores: str  # softmax or sigmoid, of the router's logits
    renormalize: bool  # divide the weights of a token's experts by their sum
    scale: float  # by which these weights are multiplied
    groups: int  # equal groups of neighbouring experts
    groups_chosen: (
        int  # of which a token's experts come: those whose two best scores are the largest
    )
    bias_rate: float  # of balance without a loss; 0 = off
    balance_loss: float  # weight of the balance loss; 0 = off
    z_loss: float  # weight of the router's z-loss; 0 = off


class RoutedFeedForward(nn.Module):
    """K of E experts for each token, and perhaps a shared one for all: [..., D] -> [..., D].

    Balance is that of a whole step, over the global batch (`parallel/expert_balance.py` calls
    `balance` once a step with how many tokens each expert had):

    - without a loss (arXiv 2408.15664): `bias` is added to the scores for the choice alone. After a
      step it grows by `bias_rate` for experts below the mean, and falls for those above it.
    - with one (2101.03961, equation 4): weight * E * sum over experts of f * p, where p is an expert's
      mean share of the scores over the global batch and f (`load`) the share of tokens that it had in
      the last step that was applied. f of the step itself is not known before all microbatches went
      forward, when the first have gone backward. In the first step f is uniform: no gradient.
    - z-loss (2202.08906, equation 5): weight * mean of logsumexp(logits)^2 over the global batch.

    Both losses are added in the backward: the loss that is reported is that of the text alone.
    """

    token_wise = True  # computes each token by itself
    keeps_choice = True  # a recomputation may keep what topk has chosen
    bias: Tensor  # [E], with routing.bias_rate
    load: Tensor  # [E], with routing.balance_loss

    def __init__(self, dim: int, experts: int, expert_dim: int, shared_dim: int, routing: Routing):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(experts, routing.top_k, dim, expert_dim)
        self.shared = FeedForward(dim, shared_dim) if shared_dim else None
        self.routing = routing
        if routing.bias_rate:
            self.register_buffer("bias", torch.zeros(experts))
        if routing.balance_loss:
            self.register_buffer("load", torch.full((experts,), 1 / experts))
        # 1 / tokens of the global batch, a scalar on the device; None = those of each forward
        self.token_share: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [N, D]
        logits = self.router(tokens).float()  # [N, E]
        sigmoid = self.routing.scores == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        chosen = self._choose(scores.detach())  # [N, K]
        weights = scores.gather(1, chosen)
        if self.routing.renormalize:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        weights = weights * self.routing.scale
        if self.training and torch.is_grad_enabled():
            weights = self._with_losses(weights, logits, scores)
        y = through_experts(self.experts, tokens, weights, chosen).view(x.shape)
        return y if self.shared is None else y + self.shared(x)

    def _choose(self, scores: Tensor) -> Tensor:
        """The experts of each token: [N, E] -> [N, K]."""
        routing = self.routing
        if routing.bias_rate:
            scores = scores + self.bias
        if routing.groups > 1:
            groups = scores.unflatten(1, (routing.groups, -1))
            of_group = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2)  # [N, groups]
            best = of_group.topk(routing.groups_chosen, dim=1).indices
            out = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
            scores = groups.masked_fill(out.unsqueeze(2), float("-inf")).flatten(1)
        return scores.topk(routing.top_k, dim=1).indices

    def _with_losses(self, weights: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        routing = self.routing
        share = 1 / len(logits) if self.token_share is None else self.token_share
        if routing.balance_loss:
            of_token = scores / scores.sum(1, keepdim=True)
            balance = (of_token @ self.load).sum() * len(self.load)
            weights = AddLoss.apply(weights, routing.balance_loss * share * balance)
        if routing.z_loss:
            squares = logits.logsumexp(1).square().sum()
            weights = AddLoss.apply(weights, routing.z_loss * share * squares)
        return weights

    @torch.no_grad()
    def balance(self, counts: Tensor, skip: Tensor | None = None) -> None:
        """After a step: counts [E] int64 over the global batch.

        skip: a scalar on the device, 1 = the step was not applied; None = 0.
        """
        mean = counts.double().mean()
        if self.routing.bias_rate:
            change = torch.sign(mean - counts)
            # the choice depends on differences alone: their mean stays 0
            change = self.routing.bias_rate * (change - change.mean())
            self.bias.add_(change if skip is None else change * (skip == 0))
        if self.routing.balance_loss:
            load = (counts / counts.sum()).to(self.load)
            self.load.copy_(load if skip is None else torch.where(skip > 0, self.load, load))


class RoutedBlock(Block):
    """Llama's, with experts."""

    def __init__(self, dim: int, attention: Attention, moe: RoutedFeedForward, norm_eps: float):
        nn.Module.__init__(self)  # without the network of Llama's
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = attention
        self.moe_norm = RMSNorm(dim, norm_eps)
        self.moe = moe

    def network(self, x: Tensor) -> Tensor:
        return x + self.moe(self.moe_norm(x))


class Moe(Llama):
    """Token ids [B, T] -> logits [B, T, V].

    dense_layers: the first ones, with one network of ffn_dim. shared_experts: as many more expert_dim
    wide, for all tokens. tied: the head uses the embedding's weight. The others: see `Routing`.
    Raises ValueError with one argument per problem where sizes do not fit each other.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int = 128,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int | None = None,
        qk_norm: bool = False,
        experts: int = 8,
        top_k: int = 2,
        expert_dim: int = 176,
        shared_experts: int = 0,
        dense_layers: int = 0,
        ffn_dim: int = 352,
        scores: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        groups_chosen: int = 1,
        bias_rate: float = 0.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        tied: bool = False,
    ):
        problems = not_positive(
            vocab_size=vocab_size,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim or 1,
            experts=experts,
            top_k=top_k,
            expert_dim=expert_dim,
            ffn_dim=ffn_dim,
            scale=scale,
            groups=groups,
            groups_chosen=groups_chosen,
            rope_theta=rope_theta,
            norm_eps=norm_eps,
        )
        if problems:
            raise ValueError(*problems)
        routing = Routing(
            top_k,
            scores,
            renormalize,
            scale,
            groups,
            groups_chosen,
            bias_rate,
            balance_loss,
            z_loss,
        )
        problems = attention_problems(dim, heads, kv_heads, head_dim)
        problems += _routing_problems(routing, experts, dense_layers, layers, shared_experts)
        if problems:
            raise ValueError(*problems)
        nn.Module.__init__(self)  # of Llama's layers none is wanted
        self.head_dim, self.rope_theta = head_dim or dim // heads, rope_theta
        self.depth, self.heads, self.dense_layers = layers, heads, dense_layers
        self.qk_norm, self.routing = qk_norm, routing
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList()
        for layer in range(layers):
            eps = norm_eps if qk_norm else None
            attention = Attention(dim, heads, kv_heads, head_dim, eps)
            if layer < dense_layers:
                self.layers.append(Block(dim, attention, ffn_dim, norm_eps))
                continue
            moe = RoutedFeedForward(dim, experts, expert_dim, shared_experts * expert_dim, routing)
            self.layers.append(RoutedBlock(dim, attention, moe, norm_eps))
        self.norm = RMSNorm(dim, norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def tp_plan(self) -> dict[str, Any]:
        """How tensor parallelism divides it, see `parallel/tp/plan.py`: attention and dense layers by
        heads and features; experts are whole on each rank, which has its part of the sequence."""
        plan = super().tp_plan()
        ffn = [name for name in plan if name.startswith("layers.*.ffn")]
        dense = {name: plan.pop(name) for name in ffn}
        if self.dense_layers:
            plan |= dense
        if self.dense_layers < self.depth:
            plan |= {"layers.*.moe_norm": "sequence", "layers.*.moe": "sequence"}
        if self.qk_norm:
            plan["layers.*.attention.[qk]_norm"] = "replicate_sum"
        return plan

    def initial(self, name: str) -> tuple[float, float]:
        """As `Llama.initial`; an expert's projections are like those of one network."""
        matrix = name if name.endswith("weight") else f"{name}.weight"  # of the experts
        return super().initial(matrix)

    def flops_per_token(self, tokens: int) -> float:
        """As `Llama.flops_per_token`; of the experts those that a token goes to."""
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        routed = [p for m in self.modules() if isinstance(m, Experts) for p in m.parameters()]
        active = sum(p.numel() // len(p) for p in routed) * self.routing.top_k
        attended = 12 * self.depth * self.heads * self.head_dim * tokens
        return 6 * (matrices + active) + attended


def _routing_problems(
    routing: Routing, experts: int, dense_layers: int, layers: int, shared_experts: int
) -> list[str]:
    problems = []
    if routing.scores not in ("softmax", "sigmoid"):
        reason = "must be softmax or sigmoid"
        problems.append(f"scores={routing.scores}: {reason}; write model.scores=softmax")
    if experts % routing.groups:
        fit = max(n for n in range(1, routing.groups) if experts % n == 0)
        reason = f"does not divide experts={experts}"
        problems.append(f"groups={routing.groups}: {reason}; write model.groups={fit}")
    elif routing.groups_chosen > routing.groups:
        reason = f"there are groups={routing.groups}"
        fix = f"model.groups_chosen={routing.groups}"
        problems.append(f"groups_chosen={routing.groups_chosen}: {reason}; write {fix}")
    else:
        most = experts // routing.groups * routing.groups_chosen
        if routing.top_k > most:
            reason = f"a token has the choice of {most} experts"
            problems.append(f"top_k={routing.top_k}: {reason}; write model.top_k={most}")
    if not 0 <= dense_layers < layers:
        reason = f"leaves none of layers={layers} with experts, or is negative"
        problems.append(f"dense_layers={dense_layers}: {reason}; write model.dense_layers=0")
    numbers = {"shared_experts": shared_experts, "bias_rate": routing.bias_rate}
    numbers |= {"balance_loss": routing.balance_loss, "z_loss": routing.z_loss}
    for key, value in numbers.items():
        if value < 0:
            problems.append(f"{key}={value}: must not be negative; write model.{key}=0")
    return problems
