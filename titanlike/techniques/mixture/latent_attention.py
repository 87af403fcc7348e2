"""Multi-head latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, section 2.1).

Keys and values of all heads are computed from one latent per token; all heads share the rotary part
of a key. A cache stores latents and rotary parts: with DeepSeek-V3's sizes 576 numbers per token
and layer instead of 40,960.

Shapes: B batch, T tokens, S tokens so far with a cache, D hidden_size, H heads, C kv_lora_rank, N
qk_nope_head_dim, R qk_rope_head_dim, E v_head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlike.core.models.attention import attention
from titanlike.core.models.documents import Mask
from titanlike.core.models.llama import rotate
from titanlike.core.models.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from titanlike.core.models.cache import KeyValueCache

_EPS = 1e-6  # of the latents' norms, independent of rms_norm_eps


class Latent(NamedTuple):
    """The sizes of latent attention, with transformers' names."""

    q_lora_rank: int | None  # None = queries are projected without a latent
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool  # pairs are neighbours, not the halves of a head


class LatentAttention(nn.Module):
    """Causal self-attention: [B, T, D] -> [B, T, D]."""

    window = None

    def __init__(self, hidden_size: int, heads: int, sizes: Latent, scaling: RopeScaling | None):
        super().__init__()
        self.sizes = sizes
        self.key_width = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        self.widths = heads * self.key_width, heads * sizes.v_head_dim
        self.scale = self.key_width**-0.5 * (1.0 if scaling is None else scaling.of_scores)
        if sizes.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, self.widths[0], bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, sizes.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(sizes.q_lora_rank, _EPS)
            self.q_b_proj = nn.Linear(sizes.q_lora_rank, self.widths[0], bias=False)
        latent, rotated = sizes.kv_lora_rank, sizes.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, latent + rotated, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(latent, _EPS)
        self.shared_k_rope = nn.Identity()  # shared by the heads: tensor parallelism gathers it
        head_features = sizes.qk_nope_head_dim + sizes.v_head_dim
        self.kv_b_proj = nn.Linear(latent, heads * head_features, bias=False)
        self.o_proj = nn.Linear(self.widths[1], hidden_size, bias=False)

    def forward(
        self, x: Tensor, table: Tensor, mask: Mask, cache: KeyValueCache | None = None
    ) -> Tensor:
        """table: see `rotate`; cache: earlier tokens' latents and keys, see `_with_cache`."""
        nope, rope = self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim
        if self.sizes.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (-1, self.key_width)).transpose(1, 2)  # [B, H, T, N + R]
        q_nope, q_rope = q.split([nope, rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.sizes.kv_lora_rank, rope], -1)
        latent = self.kv_a_layernorm(latent)  # [B, T, C]
        k_rope = self.shared_k_rope(k_rope).unsqueeze(1)  # [B, 1, T, R]
        q_rope, k_rope = rotate(table, self._halves(q_rope), self._halves(k_rope))
        if cache is not None:
            y = self._with_cache(q_nope, q_rope, latent, k_rope, mask, cache)
        else:
            k, v = self._split_heads(self.kv_b_proj(latent).unflatten(-1, (-1, self._of_head)), -1)
            k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, N], [B, H, T, E]
            k = torch.cat([k, k_rope.expand(-1, k.size(1), -1, -1)], -1)
            y = attention(torch.cat([q_nope, q_rope], -1), k, v, mask, scale=self.scale)
        return self.o_proj(y.transpose(1, 2).flatten(-2))  # [B, T, H * E] -> [B, T, D]

    def _with_cache(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        mask: Any,
        cache: KeyValueCache,
    ) -> Tensor:
        """Compute attention from cached latents, which serve all heads as keys and values: a head's
        up-projections are applied to its queries and its result instead."""
        latent, k_rope = cache.extend(self, latent.unsqueeze(1), k_rope)  # [B, 1, S, C or R]
        key_weight, value_weight = self._split_heads(
            self.kv_b_proj.weight.unflatten(0, (-1, self._of_head)), 1
        )  # [H, N, C], [H, E, C]
        q = torch.cat([q_nope @ key_weight, q_rope], -1)  # [B, H, T, C + R]
        y = attention(q, torch.cat([latent, k_rope], -1), latent, mask, scale=self.scale)
        return y @ value_weight.mT  # [B, H, T, C] -> [B, H, T, E]

    @property
    def _of_head(self) -> int:
        return self.sizes.qk_nope_head_dim + self.sizes.v_head_dim

    def _split_heads(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return the keys' and the values' part of each head."""
        return x.split([self.sizes.qk_nope_head_dim, self.sizes.v_head_dim], dim)

    def _halves(self, x: Tensor) -> Tensor:
        """Reorder a head's interleaved pairs to halves, as `rotate` expects."""
        return x.unflatten(-1, (-1, 2)).mT.flatten(-2) if self.sizes.rope_interleave else x

    def tp_plan(self) -> dict[str, Any]:
        """Latents are computed for a rank's shard of the sequence, and gathered for its heads."""
        queries: dict[str, Any] = {"q_proj": {"colwise": self.key_width}}
        if self.sizes.q_lora_rank is not None:
            queries = {"q_a_proj": "sequence", "q_a_layernorm": "sequence"}
            queries |= {"q_b_proj": {"colwise": self.key_width}}
        return queries | {
            "kv_a_proj_with_mqa": "sequence",
            "kv_a_layernorm": "sequence",
            "shared_k_rope": "gather",
            "kv_b_proj": {"colwise": self._of_head},
            "o_proj": "rowwise",
        }


def latent_problems(sizes: Latent, qk_norm: bool, head_dim: int | None) -> list[str]:
    """Return why these sizes of latent attention are invalid, with valid ones."""
    problems, width = [], sizes.qk_rope_head_dim
    if width % 2:
        reason = "is odd, and the rotary embedding rotates pairs"
        problems.append(
            f"qk_rope_head_dim={width}: {reason}; write model.qk_rope_head_dim={width + 1}"
        )
    for key, value, fix in (("qk_norm", qk_norm, "false"), ("head_dim", head_dim, "null")):
        if value:
            reason = "latent attention (kv_lora_rank) has its own norms and sizes of heads"
            problems.append(f"{key}={str(value).lower()}: {reason}; write model.{key}={fix}")
    return problems
