"""deterministic=true: the same numbers to the last bit, and nothing of it left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.cells import slow
from support.data import Dropping
from support.models import tiny
from support.saved_tensors import saved
from support.world import RankError, run_world
from titanlike.config.schema import Checkpoint, Config, Custom, Precision
from titanlike.device.settings import deterministic
from titanlike.launch.worker import Worker
from titanlike.metrics.sinks import read_jsonl
from titanlike.training import loop
from titanlike.training.train import train

SIZES = {"dim": 32, "layers": 4, "vocab_size": None}
REFUSED = "put_.*does not have a deterministic implementation"


def scatter() -> None:
    """Two numbers into one place: which of them remains is not defined."""
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


class Scattering(Dropping):
    """A model that uses an operation without a deterministic kernel."""

    def forward(self, x: Tensor) -> Tensor:
        scatter()
        return super().forward(x)


def test_a_model_that_cannot_be_deterministic_is_an_error_and_not_silence(tmp_path: Path) -> None:
    model = Custom("test_determinism.Scattering", SIZES)
    run_world(train, tiny(model=model, steps=1), tmp_path / "free")
    with pytest.raises(RankError, match=REFUSED):
        run_world(train, tiny(model=model, steps=1, deterministic=True), tmp_path / "fixed")


@pytest.mark.parametrize("pp", [1, *slow(2)])
def test_two_runs_are_equal_to_the_last_bit_in_bf16_with_dropout(pp: int, tmp_path: Path) -> None:
    config = tiny(
        pp,
        model=Custom("support.data.Dropping", SIZES),
        precision=Precision("bf16"),
        checkpoint=Checkpoint(every=0, last=True),
        deterministic=True,
    )
    for run in ("one", "two"):
        run_world(train, config, tmp_path / run)
    numbers = [
        [(row["loss"], row["grad_norm"]) for row in read_jsonl(tmp_path / run / "metrics.jsonl")]
        for run in ("one", "two")
    ]
    assert len(numbers[0]) == 5 and numbers[0] == numbers[1]
    two = saved(tmp_path / "two", 5)
    for name, tensor in saved(tmp_path / "one", 5).items():
        assert torch.equal(tensor, two[name]), name


def test_an_operation_that_has_no_deterministic_kernel_is_an_error_within_and_not_after() -> None:
    """A sweep's jobs share a process: the next one, without deterministic, is as if alone."""

    def settings() -> tuple:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.utils.deterministic.fill_uninitialized_memory,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        )

    before = settings()
    with pytest.raises(RuntimeError, match=REFUSED), deterministic(True):
        assert settings() == (True, False, False, True, False, ":4096:8")
        scatter()
    assert settings() == before
    with deterministic(False):
        scatter()
        assert settings() == before


def precision_seen(config: Config, worker: Worker) -> tuple[set[str], str]:
    """torch's setting in the steps of a run, and after it."""
    seen = set()
    step_right = loop.forward_backward

    def forward_backward(*args):
        seen.add(torch.get_float32_matmul_precision())
        return step_right(*args)

    loop.forward_backward = forward_backward
    train(config, worker)
    return seen, torch.get_float32_matmul_precision()


def test_matmul_precision_holds_in_a_run_and_not_after_it(tmp_path: Path) -> None:
    config = tiny(steps=1, matmul_precision="high")
    assert run_world(precision_seen, config, tmp_path) == [({"high"}, "highest")]
