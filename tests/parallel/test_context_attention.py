"""Attention of a rank's tokens with those of all ranks is that of whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config
from titanlike.launch.worker import Worker
from titanlike.parallel.cp.attention import ContextAttention
from titanlike.parallel.cp.context_parallel import IGNORED, ContextParallel
from titanlike.parallel.cp.tokens import ContextRanks
from titanlike.parallel.mesh import open_mesh

METHODS = ("gather", "ulysses", "ring")
RANKS = 3  # of two, the rank before and the rank behind are one
TOKENS = 18
HEADS = ((6, 2), (6, 6), (6, 1))  # of queries, of keys and values


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


def differences(config: Config, worker: Worker) -> dict[str, dict[str, float]]:
    """Method -> case -> largest difference from whole sequences, of results and gradients."""
    mesh = open_mesh(config, worker)
    return {
        method: _differences(ContextRanks(mesh.cp, mesh.cp_rank, dist.group.WORLD, method=method))
        for method in METHODS
    }


def _differences(ranks: ContextRanks) -> dict[str, float]:
    found: dict[str, float] = {}
    torch.manual_seed(0)
    for heads, kv_heads in HEADS:
        q, k, v = (
            torch.randn(2, n, TOKENS, 8).requires_grad_() for n in (heads, kv_heads, kv_heads)
        )
        gradient = torch.randn(2, heads, TOKENS, 8)
        given: dict[str, dict] = {"causal": {"is_causal": True}, "all tokens": {}}
        if ranks.method != "ring":
            given |= {name: {"attn_mask": mask} for name, mask in masks(heads).items()}
        for name, options in given.items():
            expected = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=True)
            truth = torch.autograd.grad(expected, (q, k, v), gradient)
            mask = options.get("attn_mask")
            alone = mask is not None and 1 in mask.shape[-2:]
            if mask is not None and (ranks.method == "gather" or alone):  # as graphs do
                dim = mask.dim() - (1 if mask.shape[-2] == 1 else 2)
                options = {"attn_mask": ranks.take(mask, dim)}
            mine = [ranks.take(x.detach(), 2).requires_grad_() for x in (q, k, v)]
            with ContextAttention(ranks):
                result = F.scaled_dot_product_attention(*mine, **options, enable_gqa=True)
            own = torch.autograd.grad(result, mine, ranks.take(gradient, 2))
            pairs = zip((result, *own), (expected, *truth), strict=True)
            worst = max((a - ranks.take(b, 2)).abs().max().item() for a, b in pairs)
            found[f"{name}, {heads} and {kv_heads} heads"] = worst
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """Of each rank."""
    config = tiny(cp=RANKS, batch_size=RANKS, seq_len=TOKENS)
    return run_world(differences, config, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("method", METHODS)
def test_it_is_that_of_whole_sequences(method: str, found: list) -> None:
    for of_rank in found:
        assert max(of_rank[method].values()) < 1e-5, of_rank[method]


def test_ranks_have_each_token_once_and_equal_shares_of_causal_attention() -> None:
    tokens = torch.arange(24)
    for size in (2, 3, 4):
        for method in METHODS:
            ranks = [ContextRanks(size, rank, method=method) for rank in range(size)]
            parts = [one.take(tokens, 0) for one in ranks]
            assert torch.equal(torch.cat(parts).sort().values, tokens)
            assert torch.equal(ranks[0].in_order(torch.cat(parts), 0), tokens)
            if method != "ulysses":  # which attends with whole sequences
                assert len({int(part.sum()) for part in parts}) == 1


@pytest.mark.parametrize("tp, length", [(1, 20), (4, 24)])
def test_a_batch_is_padded_with_what_does_not_count(tp: int, length: int) -> None:
    """To what two ranks can share, whose tokens tp ranks divide once more."""
    ranks = ContextRanks(2, 1)
    context = ContextParallel(ranks, ContextAttention(ranks), tp)
    batch = {
        "inputs": torch.ones(3, 17, dtype=torch.int64),
        "targets": torch.ones(3, 17, dtype=torch.int64),
        "document_ids": torch.ones(3, 17, dtype=torch.int64),
        "attn_mask": torch.ones(3, 17, 17, dtype=torch.bool),
        "label": torch.ones(3, 2),
    }
    padded = context.padded(batch)
    assert padded["inputs"].shape == (3, length) and padded["attn_mask"].shape[1:] == (length,) * 2
    assert padded["targets"][:, 17:].eq(IGNORED).all()
    assert padded["document_ids"][:, 17:].eq(-1).all()
    assert not padded["attn_mask"][:, 17:].any() and not padded["attn_mask"][..., 17:].any()
    assert torch.equal(padded["label"], batch["label"])
    assert context.batch(batch)["targets"].shape == (3, length // 2)
    assert context.padded(padded) is padded
