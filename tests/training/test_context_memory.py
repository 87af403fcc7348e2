"""With cp a sequence that is n times as long takes no more memory for activations on n ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cells import slow
from support.live_memory import measured
from support.models import tiny
from support.world import run_world
from titanlike.config.keys import Model
from titanlike.config.schema import Config
from titanlike.training.draft import draft

# activations are the most of it
MODEL = Model(
    "llama",
    {"vocab_size": None, "dim": 32, "heads": 8, "kv_heads": 8, "ffn_dim": 88, "layers": 4},
)


def config_of(tokens: int, cp: int, method: str = "auto") -> Config:
    return tiny(model=MODEL, seq_len=tokens, cp=cp, batch_size=1, context_parallel=method)


@pytest.mark.parametrize("method, ranks", slow(("ulysses", 8), ("ring", 8)))
def test_a_longer_sequence_takes_no_more_on_as_many_ranks(
    method: str, ranks: int, tmp_path: Path
) -> None:
    short = {"seq_len": 256, "batch_size": 1}
    [alone] = run_world(measured, tiny(model=MODEL, **short), tmp_path / "alone")
    # weights sharded as they are with cp: what differs is the sequence
    of_batches = tiny(model=MODEL, **short | {"dp": ranks, "batch_size": ranks})
    apart = run_world(measured, of_batches, tmp_path / "apart", timeout=200)
    config = config_of(256 * ranks, ranks, method)
    together = run_world(measured, config, tmp_path / "together", timeout=200)
    peaks = [one.peak for one in together]
    print(
        f"{method}: 1 rank {alone.peak:,}, dp={ranks} {apart[0].peak:,}, cp={ranks} {max(peaks):,} B"
    )
    assert max(peaks) <= alone.peak
    assert max(peaks) <= 1.02 * apart[0].peak
    assert min(peaks) > 0.98 * max(peaks)  # all have as much to do


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_it_is_known_before(method: str) -> None:
    def saved(tokens: int, cp: int) -> list[int]:
        costs = draft(config_of(tokens, cp, method)).memory().unit_costs
        assert costs is not None
        return costs.saved_bytes()

    assert saved(1024, 8) == saved(128, 1)
