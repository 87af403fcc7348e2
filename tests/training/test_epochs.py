"""How often a run reads its data is shown before its first step."""

from __future__ import annotations

import pytest

from titanlike.config.schema import Config
from titanlike.training.report import epochs


@pytest.mark.parametrize(
    "sequences, said",
    [
        (1 << 40, ""),  # synthetic data never end
        (9600, "0.5 of 9.6 k sequences by step 300"),
        (2400, "2 of 2.4 k sequences by step 300: each is read again"),
        (48, "100 of 48 sequences by step 300; WARNING"),
    ],
)
def test_epochs_are_said_and_many_are_a_warning(sequences: int, said: str) -> None:
    config = Config(steps=300, batch_size=16)
    assert epochs(config, sequences).replace(" k ", "k ").startswith(said.replace(" k ", "k "))


def test_the_steps_that_a_warning_names_are_fewer_epochs() -> None:
    config = Config(steps=300, batch_size=16)
    steps = int(epochs(config, 48).rpartition("steps=")[2])
    assert "WARNING" not in epochs(Config(steps=steps - 1, batch_size=16), 48)
