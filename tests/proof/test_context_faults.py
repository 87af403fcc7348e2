"""What may go wrong with parts of sequences and experts without an error: verify finds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.cells import slow
from support.families import moe
from support.models import tiny
from support.proven import assert_proven
from support.world import run_world
from titanlike.config.groups import ActivationCheckpoint
from titanlike.config.schema import Config, TextData
from titanlike.launch.worker import Worker
from titanlike.models.moe import RoutedFeedForward
from titanlike.parallel import expert_parallel
from titanlike.parallel.cp import attention
from titanlike.parallel.cp.context_parallel import ContextParallel
from titanlike.parallel.cp.tokens import ContextRanks
from titanlike.proof.verification import verify


def swap_chunks(worker: Worker) -> None:
    """Keys and values of a rank's second chunk are taken for its first."""
    in_order = ContextRanks.in_order

    def swapped(self: ContextRanks, gathered: Tensor, dim: int) -> Tensor:
        return in_order(
            self,
            gathered.unflatten(dim, (self.size, 2, -1)).flip(dim + 1).flatten(dim, dim + 2),
            dim,
        )

    ContextRanks.in_order = swapped


def slice_twice(worker: Worker) -> None:
    """Rows of a mask that are the rank's already are taken for those of the first rank."""
    attend = attention.ContextAttention.attention

    def sliced(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if attn_mask is not None and not query.is_meta and attn_mask.shape[-2] == query.shape[2]:
            whole = attn_mask.repeat_interleave(self.ranks.size, dim=-2)
            attn_mask = self.ranks.take(whole, whole.dim() - 2)
        return attend(self, query, key, value, attn_mask, *args, **kwargs)

    attention.ContextAttention.attention = sliced


def wrong_targets(worker: Worker) -> None:
    """Targets are dealt to ranks one after the other, and tokens in the balanced order."""
    ContextParallel.targets = lambda self, targets: targets.chunk(self.ranks.size, 1)[
        self.ranks.rank
    ].contiguous()


def reverse_queries(worker: Worker) -> None:
    """Each rank's queries meet the keys in the reverse order."""
    causal = attention._causal

    def shifted(q: Tensor, k: Tensor, v: Tensor, ranks: ContextRanks, options: Any) -> Tensor:
        return causal(q.flip(2), k, v, ranks, options).flip(2)

    attention._causal = shifted


def too_large(worker: Worker) -> None:
    """Gradients of experts count once for each rank of the group."""
    exchanged = expert_parallel._exchanged

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, route: Any, there: bool) -> Tensor:
            ctx.route, ctx.there = route, there
            return exchanged(x, route, there)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            factor = 1 if ctx.there else 2
            return exchanged(gradient, ctx.route, not ctx.there) * factor, None, None

    expert_parallel._Exchange = Twice


def wrong_order(worker: Worker) -> None:
    """Results come back in the order of experts, not of tokens."""
    exchanged = expert_parallel._exchanged

    def unsorted(x: Tensor, route: Any, there: bool) -> Tensor:
        return exchanged(x, route, there) if there else exchanged(x.flip(0), route, there)

    expert_parallel._exchanged = unsorted


def update_on_one(worker: Worker) -> None:
    """The bias of experts is updated on the first rank alone."""
    if worker.rank:
        RoutedFeedForward.balance = lambda self, counts, skip=None: None


RECOMPUTED = ActivationCheckpoint("full")
GATHER = {"cp": 2, "context_parallel": "gather", "layers": 2}
EP = {"dp": 2, "ep": 2, "model": moe()}
FAULTS = {
    "chunks of a sequence in the wrong order": (swap_chunks, GATHER),
    "a mask that is sliced twice": (slice_twice, GATHER | {"data": TextData(documents=True)}),
    "targets of other tokens": (wrong_targets, GATHER),
    "queries in another order than keys": (reverse_queries, GATHER),
    "gradients of experts that are too large": (too_large, EP),
    "results of experts in another order": (wrong_order, EP),
    "a bias that is updated on one rank": (update_on_one, EP),
}
QUICK = ("chunks of a sequence in the wrong order", "results of experts in another order")


def verify_with(config: Config, worker: Worker, fault: str) -> dict:
    FAULTS[fault][0](worker)
    return verify(config, worker)


@pytest.mark.parametrize(
    "fault", [*QUICK, *slow(*(fault for fault in FAULTS if fault not in QUICK))]
)
def test_verify_finds(fault: str, tmp_path: Path) -> None:
    config = tiny(**FAULTS[fault][1], steps=3)
    results = run_world(verify_with, config, tmp_path, fault)
    assert {result["exit_code"] for result in results} == {1}
    assert (tmp_path / "rank0.out").read_text().splitlines()[-1].startswith("FAIL")


def test_verify_finds_nothing_without_a_fault(tmp_path: Path) -> None:
    config = tiny(**EP, cp=2, context_parallel="gather", activation_checkpoint=RECOMPUTED, steps=3)
    assert_proven(config, tmp_path)
