"""The kernels of ring attention, and why torch's own function does not do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titanlike.torch_private import block_attention
from titanlike.torch_private.block_attention import Block


def test_attention_gives_no_sums() -> None:
    """Once it does, `block_attention` can use it."""
    text = F.scaled_dot_product_attention.__doc__ or ""
    assert "logsumexp" not in text and "return_lse" not in text


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_is_attention_with_its_sums_and_gradient(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    gradient = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, (q, k, v), gradient)
    with torch.no_grad():
        block = block_attention.forward(q, k, v, causal, None)
        scores = q @ k.mT / 4
        later = torch.ones(8, 8, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf")) if causal else scores
        torch.testing.assert_close(block.result, expected)
        torch.testing.assert_close(block.sums, scores.logsumexp(-1))
        found = block_attention.backward(gradient, q, k, v, block, causal, None)
    for mine, other in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, other)


def test_on_meta_it_has_the_same_shapes() -> None:
    real = block_attention.forward(*(torch.randn(2, 3, 8, 16) for _ in range(3)), False, None)
    meta = [torch.empty(2, 3, 8, 16, device="meta") for _ in range(3)]
    block = block_attention.forward(*meta, False, None)
    assert [x.shape for x in block] == [x.shape for x in real]
    found = block_attention.backward(meta[0], *meta, Block(*block), False, None)
    assert [x.shape for x in found] == [x.shape for x in meta]
