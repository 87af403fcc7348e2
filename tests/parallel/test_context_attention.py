"""Attention of a rank's tokens with those of all ranks is that of whole sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from support.cells import GRID, slow
from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config
from titanlike.launch.worker import Worker
from titanlike.parallel.cp.attention import ContextAttention
from titanlike.parallel.cp.tokens import ContextRanks
from titanlike.parallel.mesh import close_mesh, open_mesh

TOKENS = 16
HEADS = ((4, 2), (4, 4), (8, 1))  # of queries, of keys and values


def masks(heads: int) -> dict[str, Tensor]:
    """Of each kind that a model may give: bool, or added to scores."""
    itself = torch.eye(TOKENS, dtype=torch.bool)
    any_key = torch.rand(2, 1, 1, TOKENS) < 0.7
    any_key[..., 0] = True
    return {
        "of the batch": (torch.rand(2, 1, TOKENS, TOKENS) < 0.7) | itself,
        "of each head": (torch.rand(1, heads, TOKENS, TOKENS) < 0.7) | itself,
        "two dimensions": (torch.rand(TOKENS, TOKENS) < 0.7) | itself,
        "added": torch.randn(1, heads, TOKENS, TOKENS),
        "keys alone": any_key,
        "queries alone": torch.randn(2, 1, TOKENS, 1),
    }


def differences(config: Config, worker: Worker, method: str) -> dict[str, float]:
    """Case -> largest difference from whole sequences, of results and gradients."""
    mesh = open_mesh(config, worker)
    ranks = ContextRanks(mesh.cp, mesh.cp_rank, dist.group.WORLD, method=method)
    found: dict[str, float] = {}
    torch.manual_seed(0)
    for heads, kv_heads in HEADS:
        q, k, v = (
            torch.randn(2, n, TOKENS, 8).requires_grad_() for n in (heads, kv_heads, kv_heads)
        )
        gradient = torch.randn(2, heads, TOKENS, 8)
        given: dict[str, dict] = {"causal": {"is_causal": True}, "all tokens": {}}
        if method != "ring":
            given |= {name: {"attn_mask": mask} for name, mask in masks(heads).items()}
        for name, options in given.items():
            expected = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=True)
            truth = torch.autograd.grad(expected, (q, k, v), gradient)
            mask = options.get("attn_mask")
            alone = mask is not None and 1 in mask.shape[-2:]
            if mask is not None and (method == "gather" or alone):  # as graphs do
                dim = mask.dim() - (1 if mask.shape[-2] == 1 else 2)
                options = {"attn_mask": ranks.take(mask, dim)}
            mine = [ranks.take(x.detach(), 2).requires_grad_() for x in (q, k, v)]
            with ContextAttention(ranks):
                result = F.scaled_dot_product_attention(*mine, **options, enable_gqa=True)
            own = torch.autograd.grad(result, mine, ranks.take(gradient, 2))
            pairs = zip((result, *own), (expected, *truth), strict=True)
            worst = max((a - ranks.take(b, 2)).abs().max().item() for a, b in pairs)
            found[f"{name}, {heads} and {kv_heads} heads"] = worst
    close_mesh()
    return found


@pytest.mark.parametrize("ranks", [2, *slow(4, marks=GRID)])
@pytest.mark.parametrize("method", ["gather", "ulysses", "ring"])
def test_it_is_that_of_whole_sequences(method: str, ranks: int, tmp_path: Path) -> None:
    for found in run_world(differences, tiny(cp=ranks), tmp_path, method):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("method", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_have_each_token_once_and_equal_shares_of_causal_attention(
    method: str, size: int
) -> None:
    tokens = torch.arange(24)
    ranks = [ContextRanks(size, rank, method=method) for rank in range(size)]
    parts = [one.take(tokens, 0) for one in ranks]
    assert torch.equal(torch.cat(parts).sort().values, tokens)
    assert torch.equal(ranks[0].in_order(torch.cat(parts), 0), tokens)
    if method != "ulysses":  # which attends with whole sequences
        assert len({int(part.sum()) for part in parts}) == 1
