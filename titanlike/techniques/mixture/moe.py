"""A mixture of experts: Llama's blocks, in which a router sends each token to a few of many MLPs.

With the right sizes it is Mixtral (arXiv 2401.04088), Qwen3-MoE (2505.09388), DeepSeek-V3
(2412.19437) or GPT-OSS (2508.10925). Experts have no capacity: no token is dropped.

Sizes have the names of transformers' mixtures, and parameters those of Qwen3-MoE's files, with the
experts' matrices stacked.

Shapes: B batch, T tokens, D hidden_size, N = B * T, E experts, K experts per token, V vocab_size.
The model contains no parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlike.core.models.llama import MLP, Attention, Block, CausalLM, attention_problems
from titanlike.core.models.rope_scaling import scaling_of
from titanlike.core.torch_private.tensors import add_values, copy_values
from titanlike.techniques.mixture.experts import AddLoss, Experts, through_experts


class Routing(NamedTuple):
    """How the router chooses and weights a token's experts."""

    num_experts_per_tok: int
    scoring_func: str  # softmax or sigmoid, of the router's logits
    norm_topk_prob: bool  # divide the weights of a token's experts by their sum
    routed_scaling_factor: float  # multiplies these weights
    n_group: int  # equal groups of adjacent experts
    topk_group: int  # groups per token: those with the largest sums of their two best scores
    bias_rate: float  # update rate of the balance bias; 0 = off
    balance_loss: float  # weight of the balance loss; 0 = off
    z_loss: float  # weight of the router's z-loss; 0 = off


class RoutedMLP(nn.Module):
    """K of E experts for each token, and perhaps a shared one for all: [..., D] -> [..., D].

    Load is balanced per step, over the global batch without padding (`techniques/mixture/expert_parallel.py`
    calls `balance` once a step with the number of tokens of each expert):

    - without a loss (arXiv 2408.15664): `bias` is added to the scores only for the choice. After a
      step it grows by `bias_rate` for experts below the mean, and falls for those above it. Sigmoid
      scores always have it, as in DeepSeek-V3, whose files may contain it.
    - with a loss (2101.03961, equation 4): weight * E * sum over experts of f * p, where p is an
      expert's mean score share over the global batch and f (`load`) its share of tokens in the last
      applied step. The current step's f is not known before all microbatches' forwards, when the
      first backwards are done. In the first step f is uniform: no gradient.
    - z-loss (2202.08906, equation 5): weight * mean of logsumexp(logits)^2 over the global batch.

    Both losses are added in the backward: the reported loss is the text's only.
    """

    token_wise = True  # computes each token by itself
    keeps_choice = True  # a recomputation may keep what topk has chosen
    bias: Tensor  # [E], with routing.bias_rate or sigmoid scores
    load: Tensor  # [E], with routing.balance_loss

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        width: int,
        shared: int,
        routing: Routing,
        limit: float | None = None,
    ):
        """width: of an expert; shared: of the MLP for all tokens, 0 = none; limit: of experts with
        biases (`BiasedExperts`), whose router has one, too."""
        super().__init__()
        self.gate = nn.Linear(hidden_size, experts, bias=limit is not None)
        sizes = experts, routing.num_experts_per_tok, hidden_size, width
        self.experts: nn.Module
        if limit is None:
            self.experts = Experts(*sizes)
        else:
            from titanlike.techniques.mixture.biased_experts import BiasedExperts

            self.experts = BiasedExperts(*sizes, limit)
        self.shared_experts = MLP(hidden_size, shared) if shared else None
        self.routing = routing
        self.biased = routing.bias_rate > 0 or routing.scoring_func == "sigmoid"
        if self.biased:
            self.register_buffer("bias", torch.zeros(experts))
        if routing.balance_loss:
            self.register_buffer("load", torch.full((experts,), 1 / experts))
        # of each token 1 / tokens of the global batch, 0 for padding: a scalar or [N], on the
        # device; None = 1 / tokens of each forward
        self.token_share: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [N, D]
        logits = self.gate(tokens).float()  # [N, E]
        sigmoid = self.routing.scoring_func == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        chosen = self._choose(scores.detach())  # [N, K]
        weights = scores.gather(1, chosen)
        if self.routing.norm_topk_prob:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        weights = weights * self.routing.routed_scaling_factor
        if self.training and torch.is_grad_enabled():
            weights = self._with_losses(weights, logits, scores)
        shared = self.shared_experts
        beside = None if shared is None else lambda: shared(x)
        return through_experts(self.experts, tokens, weights, chosen, beside).view(x.shape)

    def _choose(self, scores: Tensor) -> Tensor:
        """Choose each token's experts: [N, E] -> [N, K]."""
        routing = self.routing
        if self.biased:
            scores = scores + self.bias
        if routing.n_group > 1:
            groups = scores.unflatten(1, (routing.n_group, -1))
            group_scores = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2)  # [N, groups]
            best = group_scores.topk(routing.topk_group, dim=1).indices
            out = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
            scores = groups.masked_fill(out.unsqueeze(2), float("-inf")).flatten(1)
        return scores.topk(routing.num_experts_per_tok, dim=1).indices

    def _with_losses(self, weights: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        routing = self.routing
        share = 1 / len(logits) if self.token_share is None else self.token_share
        if routing.balance_loss:
            of_token = scores / scores.sum(1, keepdim=True)
            balance = (share * (of_token @ self.load)).sum() * len(self.load)
            weights = AddLoss.apply(weights, routing.balance_loss * balance)
        if routing.z_loss:
            squares = (share * logits.logsumexp(1).square()).sum()
            weights = AddLoss.apply(weights, routing.z_loss * squares)
        return weights

    def balance(self, counts: Tensor, skip: Tensor | None = None) -> None:
        """Update the balance after a step: counts [E] int64 over the global batch.

        skip: a scalar on the device, 1 = the step was not applied; None = 0.
        """
        self.balance_layers([self], counts.unsqueeze(0), skip)

    @staticmethod
    @torch.no_grad()
    def balance_layers(layers: Sequence[RoutedMLP], counts: Tensor, skip: Tensor | None) -> None:
        """As `balance`: counts [L, E]. In as many kernels as for one layer, if settings are equal."""
        routing = layers[0].routing
        if any(layer.routing != routing for layer in layers):
            for layer, of_layer in zip(layers, counts, strict=True):
                layer.balance(of_layer, skip)
            return
        if routing.bias_rate:
            change = torch.sign(counts.double().mean(1, keepdim=True) - counts)
            # the choice depends on differences alone: their mean stays 0
            change = routing.bias_rate * (change - change.mean(1, keepdim=True))
            change = change if skip is None else change * (skip == 0)
            biases = [layer.bias for layer in layers]
            add_values(biases, change.to(biases[0]).unbind())
        if routing.balance_loss:
            loads = [layer.load for layer in layers]
            load = (counts / counts.sum(1, keepdim=True)).to(loads[0])
            load = load if skip is None else torch.where(skip > 0, torch.stack(loads), load)
            copy_values(loads, load.unbind())


class Moe(CausalLM):
    """Token ids [B, T] -> logits [B, T, V].

    The first first_k_dense_replace blocks have one MLP of intermediate_size; n_shared_experts:
    width of the MLP for all tokens, in moe_intermediate_size. kv_lora_rank: of latent attention,
    which has the sizes after it (`Latent`) and not num_key_value_heads and head_dim. rope_scaling,
    max_position_embeddings, tie_word_embeddings: see `Llama`. sliding_window: of all layers except
    each sliding_window_pattern-th. attention_sinks: see `attention`. swiglu_limit: see
    `BiasedExperts`. The others: see `CausalLM` and `Routing`.

    Raises ValueError with one argument per problem if sizes do not fit each other.
    """

    may_be_zero = (
        *("n_shared_experts", "first_k_dense_replace"),
        *("bias_rate", "balance_loss", "z_loss", "num_nextn_predict_layers"),
    )

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int = 128,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int | None = None,
        qk_norm: bool = False,
        attention_bias: bool = False,
        attention_sinks: bool = False,
        sliding_window: int | None = None,
        sliding_window_pattern: int = 2,
        q_lora_rank: int | None = None,
        kv_lora_rank: int | None = None,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rope_interleave: bool = True,
        num_local_experts: int = 8,
        num_experts_per_tok: int = 2,
        moe_intermediate_size: int = 176,
        swiglu_limit: float | None = None,
        n_shared_experts: int = 0,
        first_k_dense_replace: int = 0,
        intermediate_size: int = 352,
        scoring_func: str = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
        bias_rate: float = 0.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        num_nextn_predict_layers: int = 0,
        max_position_embeddings: int | None = None,
        rope_theta: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        rms_norm_eps: float = 1e-5,
        tie_word_embeddings: bool = False,
    ):
        routing = Routing(
            num_experts_per_tok,
            scoring_func,
            norm_topk_prob,
            routed_scaling_factor,
            n_group,
            topk_group,
            bias_rate,
            balance_loss,
            z_loss,
        )
        heads, kv_heads = num_attention_heads, num_key_value_heads
        dense, depth = first_k_dense_replace, num_hidden_layers
        scaling = scaling_of(rope_scaling)
        latent_attention: Callable[[], nn.Module] | None = None
        if kv_lora_rank is not None:
            from titanlike.techniques.mixture.latent_attention import (
                Latent,
                LatentAttention,
                latent_problems,
            )

            nope, rope = qk_nope_head_dim, qk_rope_head_dim
            latent = Latent(q_lora_rank, kv_lora_rank, nope, rope, v_head_dim, rope_interleave)
            problems = latent_problems(latent, qk_norm, head_dim)
            head_dim = rope
            latent_attention = partial(LatentAttention, hidden_size, heads, latent, scaling)
        else:
            problems = attention_problems(hidden_size, heads, kv_heads, head_dim)
        problems += _routing_problems(routing, num_local_experts, dense, depth, n_shared_experts)
        if problems:
            raise ValueError(*problems)

        def blocks() -> Iterator[Block]:
            shared = n_shared_experts * moe_intermediate_size
            qk_norm_eps = rms_norm_eps if qk_norm else None
            for layer in range(depth + max(0, num_nextn_predict_layers)):
                slides = (layer + 1) % sliding_window_pattern > 0
                more = attention_bias, attention_sinks, sliding_window if slides else None
                attention: nn.Module = (
                    latent_attention()
                    if latent_attention
                    else Attention(hidden_size, heads, kv_heads, head_dim, qk_norm_eps, *more)
                )
                mlp: nn.Module = MLP(hidden_size, intermediate_size)
                if layer >= dense:
                    width = moe_intermediate_size
                    experts = num_local_experts
                    mlp = RoutedMLP(hidden_size, experts, width, shared, routing, swiglu_limit)
                yield Block(hidden_size, attention, mlp, rms_norm_eps)

        rotary = head_dim or hidden_size // heads, rope_theta, scaling
        sizes = vocab_size, hidden_size, depth, max_position_embeddings
        super().__init__(*sizes, blocks(), rms_norm_eps, rotary, tie_word_embeddings)
        self.dense, self.routing = dense, routing
        self.by_documents = attention_sinks or sliding_window is not None

    def tp_plan(self) -> dict[str, Any]:
        """The tensor-parallel plan, see `techniques/tp/plan.py`: attention and dense layers are
        sharded by heads and features; experts are not, and each rank sends them its shard of the
        sequence."""
        plan = super().tp_plan()
        mlp = {name: plan.pop(name) for name in [*plan] if ".mlp" in name}
        for layer in range(self.depth):
            styles = mlp if layer < self.dense else {"model.layers.*.mlp": "sequence"}
            plan |= {name.replace("*", str(layer)): style for name, style in styles.items()}
        return plan

    def initial(self, name: str) -> tuple[float, float]:
        """As `CausalLM.initial`; an expert's projections are like a dense MLP's."""
        return super().initial(name if name.endswith(("weight", "bias")) else f"{name}.weight")

    def flops_per_token(self, tokens: int) -> float:
        """As `CausalLM.flops_per_token`; only a token's experts count."""
        routed = [p for m in self.modules() if isinstance(m, Experts) for p in m.parameters()]
        matrices = sum(p.numel() // len(p) for p in routed if p.dim() == 3)
        active = matrices * self.routing.num_experts_per_tok
        return super().flops_per_token(tokens) + 6 * active


def _routing_problems(
    routing: Routing, experts: int, dense: int, layers: int, shared: int
) -> list[str]:
    problems = []

    def wrong(key: str, value: Any, reason: str, fix: Any) -> None:
        problems.append(f"{key}={value}: {reason}; write model.{key}={fix}")

    if routing.scoring_func not in ("softmax", "sigmoid"):
        wrong("scoring_func", routing.scoring_func, "must be softmax or sigmoid", "softmax")
    if experts % routing.n_group:
        fit = max(n for n in range(1, routing.n_group) if experts % n == 0)
        wrong("n_group", routing.n_group, f"does not divide num_local_experts={experts}", fit)
    elif routing.topk_group > routing.n_group:
        reason = f"there are n_group={routing.n_group}"
        wrong("topk_group", routing.topk_group, reason, routing.n_group)
    elif routing.num_experts_per_tok > (most := experts // routing.n_group * routing.topk_group):
        reason = f"a token has the choice of {most} experts"
        wrong("num_experts_per_tok", routing.num_experts_per_tok, reason, most)
    if not 0 <= dense < layers:
        reason = f"leaves none of num_hidden_layers={layers} with experts, or is negative"
        wrong("first_k_dense_replace", dense, reason, 0)
    for key, value in {"n_shared_experts": shared, **routing._asdict()}.items():
        if key in Moe.may_be_zero and value < 0:
            wrong(key, value, "must not be negative", 0)
    return problems
