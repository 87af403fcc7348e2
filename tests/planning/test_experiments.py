"""The experiments that ship fit on the GPUs that they are for, by the estimate."""

from __future__ import annotations

import pytest

from support.cells import GRID, slow
from support.command_lines import examined
from titanlike.planning.estimate import estimate
from titanlike.training.draft import draft

LIMIT = 73 << 30  # bytes: an 80 GB GPU less 8%


@pytest.mark.parametrize(
    "words",
    [
        "experiment=llama3_8b",
        "experiment=llama3_8b pp=1 dp=8",
        "experiment=llama3_70b",
        *slow("experiment=llama3_70b dp=32 batch_size=1024 schedule.microbatches=32"),
        *slow("experiment=llama3_405b", "experiment=gpt2_124m", marks=GRID),
    ],
)
def test_an_experiment_fits_into_80_gb(words: str) -> None:
    memory = [] if "gpt2" in words else [f"activation_checkpoint.memory={LIMIT}"]
    checked = examined(*words.split(), *memory, "data=synthetic", "device=cpu")
    assert checked.config is not None and not checked.problems
    drafted = draft(checked.config)
    assert max(drafted.recomputed.memory, default=0) <= LIMIT
    assert estimate(checked.config, drafted).memory <= LIMIT
