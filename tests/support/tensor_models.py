"""Models of a user's own with a tensor-parallel plan."""

from __future__ import annotations

from typing import Any

from titanlike.models.llama import Attention, Llama


class Normed(Llama):
    """Queries and keys are normalized, each head by itself."""

    def __init__(self, *, vocab_size: int, **more: Any) -> None:
        super().__init__(vocab_size=vocab_size, hidden_size=32, num_attention_heads=4, **more)
        for block in self.model.layers:
            block.self_attn = Attention(32, 4, 2, qk_norm_eps=1e-5)

    def initial(self, name: str) -> tuple[float, float]:
        # not 1 alone: a norm's gradient is then not the same for all heads
        return (1.0, 0.2) if "norm" in name else super().initial(name)

    def tp_plan(self) -> dict[str, Any]:
        return super().tp_plan() | {"model.layers.*.self_attn.[qk]_norm": "replicate_sum"}
