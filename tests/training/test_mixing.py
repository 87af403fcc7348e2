"""A model or loss that mixes the samples of a batch is refused by name; no other one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.cells import GRID, cells, slow
from support.commands import command
from support.hf_tiny import model_of
from support.models import tiny
from support.proven import assert_proven
from support.records import numbers
from support.vision_configs import of_images
from support.world import RankError, run_world
from titanlike.config.schema import (
    Checkpoint,
    ChunkedCrossEntropy,
    Config,
    Custom,
    Precision,
    Schedule,
)
from titanlike.launch.worker import Worker
from titanlike.training import loop
from titanlike.training.train import train

BF16 = Precision("bf16")
CHUNKED = ChunkedCrossEntropy(chunk=32)
SINGLE = Schedule("1f1b", 16)  # microbatches of one sample


def net(block: str, pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **more: Any) -> Config:
    model = Custom("support.mixing.Net", {"block": block, **more.pop("args", {})})
    return tiny(pp, dp, schedule, **{"model": model, "steps": 2, **more})


A_LITTLE = {"share": 1e-3}
MIXED = {
    "a mean, one sample a rank": net("Centered", 2, 2, batch_size=2),
    "experts of limited capacity": net("Capacity", batch_size=3),
    "a loss that divides by the batch size": net(
        "Plain", 1, 1, SINGLE, loss=Custom("support.mixing.by_batch_size")
    ),
    "a loss": net("Plain", 2, 1, loss=Custom("support.mixing.balanced")),
    "a loss in chunks": net("Centered", loss=CHUNKED, args={"share": 1e-2}),
}
MORE_MIXED = {
    "a mean": net("Centered", 2, 2),
    "a thousandth of a mean in bf16": net("Centered", 2, 1, precision=BF16, args=A_LITTLE),
    "attention over samples": net("Attention", 2, 1, "zbvzerobubble"),
    "the norm of a batch": net("Normed", 2, 1),
}
REST_OF_MIXED = {  # left out by .ci/run
    "a mean, in training only": net("CenteredInTraining", dp=2),
    "a mean beside dropout": net("DroppingAndCentered"),
    "neighbours": net("Shifted"),
    "a mean, one sample a microbatch": net("Centered", 1, 1, SINGLE, args=A_LITTLE),
}
SEPARATE = {
    "bf16, one sample a microbatch": net("Plain", 1, 1, SINGLE, precision=BF16),
    "batch norm without running statistics": net("BatchNormed", args={"tracked": False}),
    "a loss in chunks": net("Plain", loss=CHUNKED),
    "experts of any capacity": tiny(2, model=Custom("support.forwards.Routed"), steps=2),
}
MORE_SEPARATE = {
    "plain": net("Plain", 2, 2),
    "images in bottlenecks": of_images("ResNet", 1, 2, steps=2),
    "transformers' experts": tiny(2, 1, model=model_of("mixtral"), steps=2),
    "different lengths": net("Plain", 2, 2, data=Custom("support.samples.phrases")),
    "images": of_images("UNet", 2, 1, steps=2),
}
REST_OF_SEPARATE = {  # left out by .ci/run
    "batch norm": net("BatchNormed", dp=2),
    "attention over tokens": net("Attention", 2, 1, args={"batch_first": True}, precision=BF16),
    "a loss in columns": net("Plain", loss=Custom("support.mixing.transposed")),
    "torch's encoder": tiny(model=Custom("support.forwards.TorchEncoder"), steps=2),
}


@pytest.mark.parametrize("config", cells(MIXED, MORE_MIXED, REST_OF_MIXED))
def test_what_mixes_samples_is_refused(config: Config, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="mixes_samples=false: .* mixes the samples of a batch"):
        run_world(train, config, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists() or not numbers(tmp_path)


@pytest.mark.parametrize("config", cells(SEPARATE, MORE_SEPARATE, REST_OF_SEPARATE))
def test_what_mixes_nothing_trains(config: Config, tmp_path: Path) -> None:
    run_world(train, config, tmp_path)
    assert len(numbers(tmp_path)) == 2


@pytest.mark.parametrize("block", ["Counting", *slow("Dropping", marks=GRID)])
def test_the_check_leaves_no_trace(block: str, tmp_path: Path) -> None:
    """The same dropout masks, and the same branches, as in a run that is not checked."""
    config = net(block, 2, 1, steps=3)
    run_world(train, config, tmp_path / "checked")
    run_world(train, net(block, 2, 1, steps=3, mixes_samples=True), tmp_path / "unchecked")
    assert numbers(tmp_path / "checked") == numbers(tmp_path / "unchecked")


def train_and_count_checks(config: Config, worker: Worker) -> int:
    checked = []
    check = loop.refuse_mixed_samples
    loop.refuse_mixed_samples = lambda *args: checked.append(1) or check(*args)
    train(config, worker)
    return len(checked)


def test_a_resumed_run_is_not_checked_again(tmp_path: Path) -> None:
    saving = Checkpoint(every=0, last=True)
    first, second = net("Plain", checkpoint=saving), net("Plain", checkpoint=saving, steps=3)
    assert run_world(train_and_count_checks, first, tmp_path) == [1]
    assert run_world(train_and_count_checks, second, tmp_path) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("block", ["Centered", "Attention"])
def test_mixing_that_is_meant_trains_as_one_process_with_the_same_microbatches(
    block: str, tmp_path: Path
) -> None:
    args = {} if block == "Centered" else {"dropout": 0.0}
    assert_proven(net(block, 2, 2, args=args, mixes_samples=True), tmp_path)


@pytest.mark.parametrize("tool", ["train.py", *slow("tools/verify.py")])
def test_the_command_ends_with_the_cause_and_the_exit_code_of_a_wrong_config(
    tool: str, tmp_path: Path
) -> None:
    words = ["model=own", "model.name=support.mixing.Net", "+model.block=Centered", "pp=2"]
    words += ["data=synthetic", "data.vocab_size=64", "seq_len=8", "logger=none", "run_dir=run"]
    done = command(*words, cwd=tmp_path, tool=tool)
    assert done.returncode == 2, done.stderr
    assert "write mixes_samples=true" in done.stderr
