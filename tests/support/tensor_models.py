"""Models of a user's own with a tensor-parallel plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from titanlike.models.attention import attention
from titanlike.models.documents import Documents
from titanlike.models.llama import Attention, Llama, RMSNorm, rotate


class NormedAttention(Attention):
    """Queries and keys are normalized, each head by itself."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__(dim, heads, kv_heads)
        self.q_norm = RMSNorm(self.head_dim, 1e-5)
        self.k_norm = RMSNorm(self.head_dim, 1e-5)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | Documents | None) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(self.q_norm(q), table), rotate(self.k_norm(k), table)
        return self.wo(attention(q, k, v, mask).transpose(1, 2).flatten(-2))


class Normed(Llama):
    def __init__(self, *, vocab_size: int, dim: int = 32, heads: int = 4, **more: Any) -> None:
        super().__init__(vocab_size=vocab_size, dim=dim, heads=heads, **more)
        kv_heads = self.layers[0].attention.wk.out_features // self.head_dim
        for block in self.layers:
            block.attention = NormedAttention(dim, heads, kv_heads)

    def initial(self, name: str) -> tuple[float, float]:
        # not 1 alone: a norm's gradient is then not the same for all heads
        return (1.0, 0.2) if "norm" in name else super().initial(name)

    def tp_plan(self) -> dict[str, Any]:
        return super().tp_plan() | {"layers.*.attention.[qk]_norm": "replicate_sum"}
