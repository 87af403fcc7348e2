"""deterministic=true: the same numbers to the last bit, and nothing of it left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.cells import slow
from support.models import tiny
from support.records import numbers
from support.runs import train_each
from support.saved_tensors import saved
from support.world import run_world
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.device.accelerator import deterministic
from titanlike.core.launch.worker import Worker
from titanlike.core.training import loop

SIZES = {"dim": 32, "layers": 4, "vocab_size": None}
REFUSED = "put_.*does not have a deterministic implementation"


def scatter() -> None:
    """Two numbers into one place: which of them remains is not defined."""
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def settings() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        torch.get_float32_matmul_precision(),
    )


def settings_in_steps(config: Config, worker: Worker, configs: list[Config]) -> tuple:
    """Before runs, in their steps, and after them."""
    before, seen, step_right = settings(), [], loop.forward_backward

    def forward_backward(*args):
        seen.append(settings())
        return step_right(*args)

    loop.forward_backward = forward_backward
    train_each(config, worker, configs)
    return before, set(seen), settings()


@pytest.mark.parametrize("pp", [1, *slow(2)])
def test_two_runs_are_equal_to_the_last_bit_in_bf16_with_dropout(pp: int, tmp_path: Path) -> None:
    """They share a process, as a sweep's jobs do, which has its own settings back after them."""
    config = tiny(
        pp=pp,
        model=Custom("support.data.Dropping", SIZES),
        precision=Precision("bf16"),
        checkpoint=Checkpoint(every=0, last=True),
        deterministic=True,
        matmul_precision="high",
    )
    configs = [replace(config, run_dir=str(tmp_path / name)) for name in "ab"]
    for each in configs:
        Path(each.run_dir).mkdir()
    before, within, after = run_world(settings_in_steps, config, tmp_path, configs)[0]
    assert before == after and before[-1] == "highest"
    assert within == {(True, False, False, True, False, ":4096:8", "high")}
    assert len(numbers(tmp_path / "a")) == 5
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    again = saved(tmp_path / "b", 5)
    for name, tensor in saved(tmp_path / "a", 5).items():
        assert torch.equal(tensor, again[name]), name


def test_nondeterministic_operations_are_errors_during_a_run_only() -> None:
    before = settings()
    with pytest.raises(RuntimeError, match=REFUSED), deterministic(True):
        scatter()
    assert settings() == before
    with deterministic(False):
        scatter()
        assert settings() == before
