"""Llama: RMSNorm (arXiv 1910.07467), rotary embedding, grouped-query attention, SwiGLU (arXiv
2302.13971, 2407.21783).

Parameters and sizes have the names of transformers' LlamaForCausalLM.

Shapes: B batch, T tokens, D hidden_size, H query heads, K key/value heads, E head_dim (D // H),
F intermediate_size, V vocab_size. The model contains no parallelism.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.models.attention import attention
from titanlike.core.models.documents import Mask, attention_inputs, within_window
from titanlike.core.models.rope_scaling import RopeScaling, scaling_of

if TYPE_CHECKING:
    from titanlike.core.models.cache import KeyValueCache


def rotary_table(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Tensor:
    """cos and sin of position * frequency (arXiv 2104.09864): [..., T] -> fp32 [2, ..., T, E/2].

    Computed in every forward: its cost is negligible beside a block's.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequency = theta**-exponent  # [E/2]
    if scaling is not None:
        frequency = scaling.frequencies(frequency, theta)
    angle = positions.float().unsqueeze(-1) * frequency  # [..., T, E/2]
    table = torch.stack([angle.cos(), angle.sin()])
    return table if scaling is None else table * scaling.of_table


Rotary = tuple[int, float, RopeScaling | None]  # arguments of `rotary_table` after positions


def rotate(table: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Rotate the two halves of each head in fp32: heads [B, H, T, E] -> the same shapes and
    dtypes."""
    if torch.compiler.is_compiling():  # which makes such a node itself, also of changing lengths
        return tuple([_rotated(x, table, 1.0) for x in heads])
    return _Rotation.apply(table, *heads)


class _Rotation(torch.autograd.Function):
    """(a, b) -> (a * cos - b * sin, b * cos + a * sin) for the halves of each head, keeping the
    memory layout; the backward rotates in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(table)
        return tuple(_rotated(x, table, 1.0) for x in heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (table,) = ctx.saved_tensors
        return None, *(_rotated(gradient, table, -1.0) for gradient in gradients)


def _rotated(x: Tensor, table: Tensor, sign: float) -> Tensor:
    cos, sin = table.unsqueeze(-3) if table.dim() == 4 else table  # [B, 1, T, E/2] or [T, E/2]
    halves = x.unflatten(-1, (2, -1))  # [B, H, T, 2, E/2]
    turned = halves * cos.unsqueeze(-2)
    turned[..., 0, :].addcmul_(halves[..., 1, :], sin, value=-sign)
    turned[..., 1, :].addcmul_(halves[..., 0, :], sin, value=sign)
    return turned.flatten(-2).type_as(x)


class Sinks(nn.Module):
    """One more score for each head's softmax, without a value (see `attention`)."""

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class Attention(nn.Module):
    """Causal self-attention; K < H key/value heads are shared by groups of query heads."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        qk_norm_eps: float | None = None,
        bias: bool = False,
        sinks: bool = False,
        window: int | None = None,
    ):
        """head_dim: E, default hidden_size // heads; qk_norm_eps: of the norms of each head's query
        and key, None = no norms; window: a token attends to so many tokens at most, itself
        included. With sinks or a window the mask is `Documents`, or with a cache a tensor."""
        super().__init__()
        self.head_dim = head_dim or hidden_size // heads
        # features of queries, of results
        self.widths = (heads * self.head_dim, heads * self.head_dim)
        self.q_proj = nn.Linear(hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden_size, bias=bias)
        self.window, self.sinks = window, Sinks(heads) if sinks else None
        self.normed = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(self.head_dim, qk_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, qk_norm_eps)

    def forward(
        self, x: Tensor, table: Tensor, mask: Mask, cache: KeyValueCache | None = None
    ) -> Tensor:
        q, k, v = (  # [B, T, D] -> [B, T, H or K, E] -> q [B, H, T, E]; k, v [B, K, T, E]
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(table, q, k)
        if cache is not None:
            k, v = cache.extend(self, k, v)  # [B, K, S, E]
        if self.window is not None and mask is not None:
            mask = within_window(mask, self.window)
        sinks = None if self.sinks is None else self.sinks.weight
        y = attention(q, k, v, mask, sinks=sinks)  # [B, H, T, E]
        return self.o_proj(y.transpose(1, 2).flatten(-2))  # [B, T, H * E] -> [B, T, D]

    def tp_plan(self) -> dict[str, Any]:
        """The tensor-parallel plan, which shards heads."""
        more = {"[qk]_norm": "replicate_sum"} if self.normed else {}
        more |= {"sinks": "rows"} if self.sinks is not None else {}
        return more | {
            "": "gather",
            "q_proj": {"colwise": self.head_dim},
            "[kv]_proj": {"colwise_kv": self.head_dim},
            "o_proj": "rowwise",
        }


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): [B, T, D] -> [B, T, F] -> [B, T, D]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, elementwise; only `gate` and `up` are saved for the backward."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    """Values and gradients are bitwise those of the two operators, which also save silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
        return gate_gradient, F.silu(gate).mul_(gradient)


class Block(nn.Module):
    """A pre-norm transformer block: [B, T, D] -> [B, T, D]."""

    def __init__(self, hidden_size: int, attention: nn.Module, mlp: nn.Module, norm_eps: float):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, norm_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor, table: Tensor, mask: Mask, cache: KeyValueCache | None = None
    ) -> Tensor:
        cached = () if cache is None else (cache,)
        x = x + self.self_attn(self.input_layernorm(x), table, mask, *cached)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids [B, T] -> the last block's normed output [B, T, D]."""

    def __init__(
        self, vocab_size: int, hidden_size: int, blocks: Iterable[nn.Module], norm_eps: float
    ):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden_size, norm_eps)

    def forward(
        self, ids: Tensor, table: Tensor, mask: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        x = self.embed_tokens(ids)  # [B, T] -> [B, T, D]
        cached = () if cache is None else (cache,)  # blocks of a user's own know none
        for block in self.layers:
            x = block(x, table, mask, *cached)
        return self.norm(x)


class NextTokenBlock(nn.Module):
    """One more predicted token (multi-token prediction, arXiv 2412.19437, section 2.2): the output
    [B, T, D] before it and the embeddings [B, T, D] of a later token -> its normed output."""

    def __init__(self, hidden_size: int, block: Block, norm_eps: float):
        super().__init__()
        self.hnorm, self.enorm = (nn.RMSNorm(hidden_size, norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        self.norm = nn.RMSNorm(hidden_size, norm_eps)

    def forward(self, x: Tensor, later: Tensor, table: Tensor, mask: Any) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(later), self.hnorm(x)], -1))
        return self.norm(self.block(x, table, mask))


class NextTokens(nn.Module):
    """A block for each further token, named 0, 1, ...: not a ModuleList, whose entries a split may
    separate, since all are in the head's stage."""

    def __init__(self, hidden_size: int, blocks: Iterable[Block], norm_eps: float):
        super().__init__()
        for number, block in enumerate(blocks):
            self.add_module(str(number), NextTokenBlock(hidden_size, block, norm_eps))

    def __len__(self) -> int:
        return len(self._modules)

    def forward(self, x: Tensor, later: list[Tensor], table: Tensor, mask: Any) -> Tensor:
        """x [B, T, D], and the embeddings for each further token -> [B, (1 + P) * T, D]."""
        outputs = [x]
        for block, embedded in zip(self.children(), later, strict=True):
            outputs.append(block(outputs[-1], embedded, table, mask))
        return torch.cat(outputs, 1)


class CausalLM(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]; in training [B, (1 + P) * T, V].

    P = num_nextn_predict_layers: so many tokens after the next one are predicted, in training only;
    the p-th's logits follow those of the one before, for all T positions. Their loss:
    `loss.mtp_weight`.
    """

    by_documents = False  # whether its attention needs `Documents`
    # sizes that may be 0
    may_be_zero: Collection[str] = ("num_nextn_predict_layers",)

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        depth: int,
        longest: int | None,
        blocks: Iterator[Block],
        norm_eps: float,
        rotary: Rotary,
        tied: bool,
    ):
        """longest: tokens of the longest sequence, None = any; blocks: the first `depth` of them
        are the decoder's, and each further one predicts a token more; tied: the head uses the
        embedding's weight."""
        scaling = rotary[2]
        if scaling is not None and scaling.rope_type == "dynamic" and longest is None:
            reason = "dynamic scales what is longer than max_position_embeddings, which is null"
            raise ValueError(f"rope_scaling: {reason}; write model.max_position_embeddings=4096")
        super().__init__()
        self.rotary, self.depth, self.max_seq_len = rotary, depth, longest
        self.model = Decoder(vocab_size, hidden_size, islice(blocks, depth), norm_eps)
        self.mtp = NextTokens(hidden_size, blocks, norm_eps)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        ids: Tensor,
        *,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """document_ids, positions, mask: see `attention_inputs` in `documents.py`; cache: of
        previous tokens, which then supplies positions and mask."""
        if self.by_documents and mask is not None:
            raise ValueError("mask: attention with sinks or windows takes document_ids alone")
        always = self.by_documents
        positions, mask = attention_inputs(ids, document_ids, positions, mask, True, cache, always)
        table = rotary_table(positions, *self.rotary)  # [2, (B,) T, E/2]
        x = self.model(ids, table, mask, cache)
        if self.mtp and self.training:
            # the tokens after the last ones are unknown, so their loss is ignored
            rolled = [ids.roll(-later, 1) for later in range(1, len(self.mtp) + 1)]
            # a function call: this stage uses the first one's weight, not its module
            table_of_ids = self.model.embed_tokens.weight
            x = self.mtp(x, [F.embedding(later, table_of_ids) for later in rolled], table, mask)
        return self.lm_head(x)  # [B, T, D] -> [B, T, V]

    def tp_plan(self) -> dict[str, Any]:
        """The tensor-parallel plan, see `techniques/tp/plan.py`."""
        block = "model.layers.*"
        attention: Any = self.model.layers[0].self_attn
        styles = attention.tp_plan().items()
        return {f"{block}.self_attn.{name}".rstrip("."): style for name, style in styles} | {
            "model.embed_tokens": "vocab",
            f"{block}.input_layernorm": "sequence",
            f"{block}.post_attention_layernorm": "sequence",
            f"{block}.mlp": "gather",
            f"{block}.mlp.gate_proj": "colwise",
            f"{block}.mlp.up_proj": "colwise",
            f"{block}.mlp.down_proj": "rowwise",
            "model.norm": "sequence",
            "lm_head": "vocab",
        }

    def initial(self, name: str) -> tuple[float, float]:
        """(mean, standard deviation) of the normal distribution of a parameter's initial values."""
        return initial_normal(name, self.depth)

    def flops_per_token(self, tokens: int) -> float:
        """FLOPs of forward and backward per token, in sequences of `tokens`; of the whole model.

        6 per matrix parameter, and per layer and attended token 6 for each feature of all heads'
        queries and values: the convention of arXiv 2204.02311, appendix B, which does not subtract
        the causal half. Embedding lookups are free.
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        matrices += len(self.mtp) * self.lm_head.weight.numel()
        layers: list[Any] = [m.self_attn for m in self.modules() if isinstance(m, Block)]
        attended = sum(sum(a.widths) * min(tokens, a.window or tokens) for a in layers)
        return 6 * (matrices + attended)


class Llama(CausalLM):
    """Token ids [B, T] -> logits [B, T, V], see `CausalLM`.

    qk_norm: norms of each head's query and key, as in Qwen3. rope_scaling: see `rope_scaling.py`.
    max_position_embeddings: tokens of the longest sequence, null = any. tie_word_embeddings: the
    head uses the embedding's weight.

    Raises ValueError with one argument per problem if sizes do not fit each other.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int = 128,
        intermediate_size: int = 352,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int | None = None,
        qk_norm: bool = False,
        num_nextn_predict_layers: int = 0,
        max_position_embeddings: int | None = None,
        rope_theta: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        rms_norm_eps: float = 1e-5,
        tie_word_embeddings: bool = False,
    ):
        heads, kv_heads = num_attention_heads, num_key_value_heads
        if problems := attention_problems(hidden_size, heads, kv_heads, head_dim):
            raise ValueError(*problems)
        qk_norm_eps = rms_norm_eps if qk_norm else None
        blocks = (
            Block(
                hidden_size,
                Attention(hidden_size, heads, kv_heads, head_dim, qk_norm_eps),
                MLP(hidden_size, intermediate_size),
                rms_norm_eps,
            )
            for _ in range(num_hidden_layers + max(0, num_nextn_predict_layers))
        )
        rotary = head_dim or hidden_size // heads, rope_theta, scaling_of(rope_scaling)
        sizes = vocab_size, hidden_size, num_hidden_layers, max_position_embeddings
        super().__init__(*sizes, blocks, rms_norm_eps, rotary, tie_word_embeddings)


def initial_normal(name: str, depth: int) -> tuple[float, float]:
    """Return (mean, standard deviation): biases are 0, norms 1, and projections that write into the
    residual stream are scaled down by the square root of their number (Radford et al. 2019,
    section 2.3)."""
    if name.endswith("bias"):
        return 0.0, 0.0
    if "norm" in name or ".ln_" in name:
        return 1.0, 0.0
    residual = name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight"))
    return 0.0, 0.02 / (2 * depth) ** 0.5 if residual else 0.02


def attention_problems(
    hidden_size: int, heads: int, kv_heads: int, head_dim: int | None = None
) -> list[str]:
    """Return why these attention sizes are invalid, with valid ones."""
    problems = []
    if head_dim is None and hidden_size % (2 * heads):
        fit = -(-hidden_size // (2 * heads)) * 2 * heads
        reason = "does not give each head an even size (the rotary embedding rotates pairs)"
        problems.append(
            f"num_attention_heads={heads}: hidden_size={hidden_size} {reason}; write "
            f"model.hidden_size={fit}"
        )
    if head_dim is not None and head_dim % 2:
        reason = "is odd, and the rotary embedding rotates pairs"
        problems.append(f"head_dim={head_dim}: {reason}; write model.head_dim={head_dim + 1}")
    if heads % kv_heads:
        fit = max(k for k in range(1, kv_heads) if heads % k == 0)
        reason = f"does not divide num_attention_heads={heads}"
        problems.append(
            f"num_key_value_heads={kv_heads}: {reason}; write model.num_key_value_heads={fit}"
        )
    return problems
