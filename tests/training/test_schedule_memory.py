"""vhalf and vmin hold the part of 1f1b's activations that their papers say, measured on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.live_memory import measured
from support.models import tiny
from support.world import run_world
from titanlike.config.groups import BalanceSplit, Schedule, ZeroBubbleSchedule
from titanlike.config.schema import Custom, Sgd
from titanlike.training.draft import draft

MODEL = {"dim": 32, "heads": 4, "kv_heads": 4, "ffn_dim": 96, "layers": 32, "vocab_size": None}


def activations(schedule: Schedule, pp: int, folder: Path) -> tuple[float, float]:
    """Bytes that the fullest rank holds beyond weights and gradients: measured, and estimated."""
    stages = pp * (1 if schedule.name == "1f1b" else 2)
    split = BalanceSplit(balance=[MODEL["layers"] // stages] * stages)
    changes = {"split": split, "model": Custom("llama", MODEL), "seq_len": 256, "batch_size": 8}
    config = tiny(pp, 1, schedule, optimizer=Sgd(), **changes)
    drafted = draft(config)
    state = [
        8 * sum(drafted.stage_numel(stage) for stage in drafted.order.local(rank))
        for rank in range(pp)
    ]
    ranks = run_world(measured, config, folder, timeout=120)
    peaks = [rank.peak - own for rank, own in zip(ranks, state, strict=True)]
    estimates = drafted.memory().of_ranks(drafted.recomputed.blocks)
    return max(peaks), max(e - own for e, own in zip(estimates, state, strict=True))


@pytest.mark.slow
def test_v_half_and_v_min_hold_a_half_and_a_third(tmp_path: Path) -> None:
    """Of 1f1b's p microbatches (p + 2) // 2 and (p + 4) // 3: 3/4 and 1/2 of four (the
    model of `rank_memory.py` has 5/8 and 1/2 of eight); a little is added by what a block takes while it runs."""
    pp = 4
    whole, _ = activations(Schedule("1f1b", 8), pp, tmp_path / "1f1b")
    for name, count in (("vhalf", (pp + 2) // 2), ("vmin", (pp + 4) // 3)):
        schedule = ZeroBubbleSchedule(name, 8, "together")
        found, estimated = activations(schedule, pp, tmp_path / name)
        print(f"pp={pp} {name}: {found / whole:.2f} of 1f1b's, {count / pp:.2f} by microbatches")
        assert found / whole == pytest.approx(count / pp, abs=0.08)
        assert estimated == pytest.approx(found, rel=0.1)
