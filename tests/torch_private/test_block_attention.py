"""The kernels of ring attention, and why torch's own function does not do."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from titanlike.core.torch_private import block_attention
from titanlike.core.torch_private.block_attention import Block


def test_attention_gives_no_sums() -> None:
    """Once it does, `block_attention` can use it."""
    text = F.scaled_dot_product_attention.__doc__ or ""
    assert "logsumexp" not in text and "return_lse" not in text


@pytest.mark.parametrize("causal", [False, True])
def test_block_attention_returns_logsumexp_and_gradients(causal: bool) -> None:
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


@pytest.mark.parametrize("kernel", ["the CPU's", "flash", "efficient"])
def test_heads_of_queries_may_share_keys_and_values(kernel: str) -> None:
    """Whatever the kernel, there are as many heads of their gradients."""
    device = "cpu" if kernel == "the CPU's" else "meta"
    q, k, v = (torch.randn(2, heads, 8, 16, device=device) for heads in (6, 2, 2))
    with mock.patch.object(block_attention, "_takes_flash", lambda _: kernel == "flash"):
        block = block_attention.forward(q, k, v, True, None)
        found = block_attention.backward(q, q, k, v, block, True, None)
    assert block.result.shape == q.shape and block.sums.shape == q.shape[:3]
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
    if device == "cpu":
        each = [x.repeat_interleave(3, 1) for x in (k, v)]
        torch.testing.assert_close(block, block_attention.forward(q, *each, True, None))
        of_q, *of_each = block_attention.backward(q, q, *each, block, True, None)
        summed = [x.unflatten(1, (2, 3)).sum(2) for x in of_each]
        torch.testing.assert_close([*found], [of_q, *summed])


def test_block_attention_on_meta_has_the_same_shapes() -> None:
    real = block_attention.forward(*(torch.randn(2, 3, 8, 16) for _ in range(3)), False, None)
    meta = [torch.empty(2, 3, 8, 16, device="meta") for _ in range(3)]
    block = block_attention.forward(*meta, False, None)
    assert [x.shape for x in block] == [x.shape for x in real]
    found = block_attention.backward(meta[0], *meta, Block(*block), False, None)
    assert [x.shape for x in found] == [x.shape for x in meta]


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_a_gpu_kernel_gets_a_contiguous_logsumexp(kernel: str) -> None:
    """It reads them by address; those of a chunk of a rank's queries are apart."""
    q, k, v, gradient = (torch.empty(2, 3, 32, 16, device="meta") for _ in range(4))
    whole = Block(q, torch.empty(2, 3, 64, device="meta").chunk(2, 2)[1])
    operators = mock.Mock(wraps=torch.ops.aten)
    with (
        mock.patch.object(block_attention, "_aten", operators),
        mock.patch.object(block_attention, "_takes_flash", lambda _: kernel == "flash"),
    ):
        block_attention.backward(gradient, q, k, v, whole, True, None)
    called = getattr(operators, f"_scaled_dot_product_{kernel}_attention_backward").call_args
    sums = next(x for x in called.args if isinstance(x, Tensor) and x.shape == whole.sums.shape)
    assert not whole.sums.is_contiguous() and sums.is_contiguous()


# --- the last queries of a sequence
# -----------------------------------------------------------------


def compiled(function: Any, *tensors: Tensor) -> list[str]:
    """The operators of its graph, which nothing may break."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return lambda *inputs: (torch.zeros_like(tensors[0]),)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    return [str(node.target) for graph in graphs for node in graph.graph.nodes]


def last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return block_attention.causal_lower_right(q, k, v, dropout_p=0.0, scale=None, enable_gqa=True)


def test_the_last_queries_see_all_keys_before_them() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 16) for heads in (4, 2, 2))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(last(q[:, :, 7:], k, v), whole[:, :, 7:])


def test_on_a_gpu_a_block_with_the_last_queries_is_compiled_as_a_whole() -> None:
    q, k, v = (torch.randn(2, 2, tokens, 16) for tokens in (4, 12, 12))
    with mock.patch.object(block_attention, "_aligns_last", lambda *_: True):
        targets = compiled(last, q, k, v)
    assert any("_scaled_dot_product_flash_attention" in target for target in targets), targets


def test_torchs_bias_breaks_the_graph() -> None:
    """Once it does not, `causal_lower_right` can use it."""
    q, k, v = (torch.randn(2, 2, tokens, 16) for tokens in (4, 12, 12))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal_lower_right(4, 12)),
            *(q, k, v),
        )
