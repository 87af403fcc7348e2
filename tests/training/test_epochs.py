"""How often a run reads its data, and a warm-up that it does not finish, are shown before its first step."""

from __future__ import annotations

import pytest

from titanlike.config.groups import ConstantLr
from titanlike.config.schema import Config
from titanlike.training.report import epochs, warmup


@pytest.mark.parametrize(
    "sequences, said",
    [
        (1 << 40, ""),  # synthetic data never end
        (9600, "0.5 of 9.6 k sequences by step 300"),
        (2400, "2 of 2.4 k sequences by step 300: each is read again"),
        (48, "100 of 48 sequences by step 300; WARNING"),
    ],
)
@pytest.mark.parametrize("dp", [1, 2])
def test_epochs_are_said_and_many_are_a_warning(dp: int, sequences: int, said: str) -> None:
    """However many ranks share a batch."""
    config = Config(steps=300, batch_size=16, dp=dp)
    text = epochs(config, sequences)
    assert text.replace(" k ", "k ").startswith(said.replace(" k ", "k "))
    if "WARNING" in said:  # with fewer steps there is none
        steps = int(text.rpartition("steps=")[2])
        assert "WARNING" not in epochs(Config(steps=steps - 1, batch_size=16), sequences)


def test_a_warm_up_beyond_the_run_is_a_warning_with_numbers_that_work() -> None:
    config = Config(steps=50, lr=ConstantLr(warmup=1000))
    said = warmup(config)
    assert said.startswith("WARNING: the learning rate reaches 0.05 of its peak at step 50")
    steps, warm = said.split("steps=")[1].split()[0], said.rpartition("lr.warmup=")[2]
    assert not warmup(Config(steps=int(steps), lr=ConstantLr(warmup=1000)))
    assert not warmup(Config(steps=50, lr=ConstantLr(warmup=int(warm))))
    assert not warmup(Config(steps=20)), "the default's warm-up fits a short trial"
