"""With cp a sequence that is n times as long takes no more memory for activations on n ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.live_memory import measured
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.training.train_plan import make_plan

# activations are the most of it
MODEL = Model(
    "llama",
    {
        "vocab_size": None,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
    },
)


def config_of(tokens: int, cp: int, method: str = "auto") -> Config:
    return tiny(model=MODEL, seq_len=tokens, cp=cp, batch_size=1, context_parallel=method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_a_longer_sequence_takes_no_more_on_as_many_ranks(method: str, tmp_path: Path) -> None:
    [alone] = run_world(measured, config_of(256, 1), tmp_path / "alone")
    ranks = run_world(measured, config_of(256 * 8, 8, method), tmp_path / "cp", timeout=200)
    peaks = [one.peak for one in ranks]
    print(f"{method}: 1 rank {alone.peak:,}, cp=8 {max(peaks):,} B")
    assert max(peaks) <= alone.peak
    assert min(peaks) > 0.98 * max(peaks)  # all have as much to do


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_the_plan_predicts_context_parallel_memory(method: str) -> None:
    def saved(tokens: int, cp: int) -> list[int]:
        costs = make_plan(config_of(tokens, cp, method)).memory().unit_costs
        assert costs is not None
        return costs.saved_bytes()

    # Ulysses saves attention's result on both sides of its all-to-all
    more = [few - one for few, one in zip(saved(512, 4), saved(128, 1), strict=True)]
    assert {*more} == ({0, 128 * 32 * 4} if method == "ulysses" else {0})
