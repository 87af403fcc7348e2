"""Equal blocks of titanlike's own models are recorded once; what is recorded is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.models import tiny
from titanlike.core.graph.units import call_key
from titanlike.core.models import gpt2, llama
from titanlike.core.training.train_plan import make_plan


def recorded(family: str) -> list[Any]:
    """What is recorded for three stages: calls, messages, where gradients flow."""
    plan = make_plan(tiny(pp=4, family=family))
    return [
        (
            [(node.kind, str(node.target), node.random, node.once) for node in graph.nodes],
            [[tuple(node.shape) for node in part] for part in (graph.receives, graph.sends)],
            [graph.receives.index(node) for node in graph.receives if node in graph.differentiated],
            [graph.sends.index(node) for node in graph.sends if node in graph.differentiated_later],
        )
        for training in (True, False)
        for graph in plan.model_graph.graphs(plan.fields, training)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_equal_blocks_share_one_recording(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, calls = (llama.Block if family == "llama" else gpt2.Block), []
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args: (calls.append(1), forward(*args))[1])
    once = recorded(family)
    few = len(calls)
    monkeypatch.setattr("titanlike.core.graph.record_forward.call_key", lambda *_: None)
    assert recorded(family) == once
    assert len(calls) - few >= 8 * few / 2  # 8 blocks


class Counting(torch.nn.Linear):
    """A user's block, with a state that no attribute shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_blocks_with_different_state_are_not_taken_for_equal() -> None:
    def key(change: Any) -> Any:
        with torch.device("meta"):
            block = llama.Block(8, llama.Attention(8, 2, 2), llama.MLP(8, 16), 1e-5)
            change(block)
            return call_key(block, (torch.empty(1, 4, 8), None, None), {})

    assert key(lambda block: None) == key(lambda block: None) is not None
    assert key(lambda block: block.eval()) != key(lambda block: None)
    assert key(lambda block: setattr(block.post_attention_layernorm, "eps", 1e-6)) != key(
        lambda block: None
    )
    assert key(lambda block: setattr(block.mlp, "up_proj", Counting(8, 16))) is None
    assert key(lambda block: setattr(block, "seen", [])) is None
    assert key(lambda block: block.mlp.register_forward_hook(print)) is None
    assert key(lambda block: block.register_buffer("mask", torch.ones(1))) is None
