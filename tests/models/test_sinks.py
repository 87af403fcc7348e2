"""Attention with sinks and windows, and experts with biases, as GPT-OSS has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cells import cells
from support.families import gpt_oss
from support.models import tiny
from support.proven import assert_proven
from support.varlen import as_on_a_gpu, uncompiled_flex
from titanlike.core.config.groups.computation import ActivationCheckpoint
from titanlike.core.config.groups.data import TextData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.schema import Config
from titanlike.core.models import document_attention as kernels
from titanlike.core.models.attention import attention
from titanlike.core.models.documents import Documents, document_spans, sequence_spans
from titanlike.core.models.registry import build_model
from titanlike.core.optim.optimizer import hidden_matrices
from titanlike.core.training.preflight import preflight
from titanlike.techniques.mixture.biased_experts import ALPHA, BiasedExperts
from titanlike.techniques.mixture.experts import expert_linear

DOCUMENTS = TextData(documents=True)


def windowed(*mesh: Any, **changes: Any) -> Config:
    return tiny(*mesh, **{"model": gpt_oss(num_hidden_layers=4), **changes})


@pytest.mark.parametrize(
    "config",
    cells(
        {},
        {
            "tp": windowed(tp=2, model=gpt_oss()),
            "tp and pp": windowed(2, 1, "zbvzerobubble", tp=2, data=DOCUMENTS),
            "cp, gathered": windowed(cp=2, data=DOCUMENTS, context_parallel="gather"),
            "cp, heads, tp": windowed(
                cp=2, tp=2, activation_checkpoint=ActivationCheckpoint("full")
            ),
            "ep": windowed(2, 2, "zbh1", ep=2),
        },
    ),
)
def test_attention_sinks_in_layouts_match_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


def plain(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, sinks: Tensor) -> Tensor:
    """With the sinks as a column more of the scores."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = (q @ k.mT * 0.3).masked_fill(~allowed, float("-inf"))
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", ["a key more", "flex"])
def test_sinks_enter_each_querys_softmax(kernel: str, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 37, 16), (2, 2, 37, 16), (2, 2, 37, 16), (4,)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    ids = torch.tensor([[5] * 9 + [7] + [5] * 27, [2] * 37])
    for spans in (document_spans(ids), sequence_spans(ids)):
        documents = Documents(spans, window)
        expected = plain(*inputs[:3], kernels.document_mask(documents, 2, 37), inputs[3])
        *heads, sinks = inputs
        if kernel == "flex":
            with as_on_a_gpu(kernel=False), uncompiled_flex():
                found = attention(*heads, documents, scale=0.3, sinks=sinks)
        else:
            found = attention(*heads, documents, scale=0.3, sinks=sinks)
        weights = torch.randn(found.shape, generator=generator)
        pairs = [
            [result, *torch.autograd.grad((result * weights).sum(), inputs)]
            for result in (found, expected)
        ]
        torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-5)


def test_biased_experts_have_the_gradients_of_plain_operators() -> None:
    torch.manual_seed(0)
    experts = BiasedExperts(3, 1, 8, 16, limit=0.7)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    tokens, counts = torch.randn(9, 8, requires_grad=True), torch.tensor([4, 0, 5])
    rows = []
    for row, of in zip(tokens, [0] * 4 + [2] * 5, strict=True):
        gate, up = (experts.gate_up_proj[of] @ row + experts.gate_up_proj_bias[of]).view(-1, 2).T
        gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
        hidden = (up + 1) * gate * F.sigmoid(ALPHA * gate)
        rows.append(experts.down_proj[of] @ hidden + experts.down_proj_bias[of])
    weights = torch.randn(9, 8)
    inputs = [tokens, *experts.parameters()]
    pairs = [
        [result, *torch.autograd.grad((result * weights).sum(), inputs)]
        for result in (experts(tokens, counts), torch.stack(rows))
    ]
    torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-5)
    experts.product = lambda rows, weight, counts: 2 * expert_linear(rows, weight, counts)
    assert not torch.allclose(experts(tokens, counts), pairs[0][0])  # float8's own


def test_muon_updates_expert_matrices_but_not_biases() -> None:
    model = build_model(Custom("moe", gpt_oss().args | {"vocab_size": 64}))
    names = hidden_matrices(model, Muon())
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(name.endswith("bias") for name in names)


def test_a_mask_of_a_batch_is_refused() -> None:
    config = windowed(data=Custom("support.data.masked", {}))
    assert any("takes document_ids alone" in str(problem) for problem in preflight(config))
