"""A model or loss that mixes the samples of a batch is refused by name; no other one is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.cells import cells
from support.commands import command
from support.hf_tiny import model_of
from support.models import tiny
from support.proven import assert_proven
from support.records import numbers
from support.runs import train_each
from support.vision_models import of_images
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.training import first_batch as mixing
from titanlike.core.training.first_batch import unchanged

BF16 = Precision("bf16")
CHUNKED = ChunkedCrossEntropy(chunk=32)
SINGLE = Schedule("1f1b", 16)  # microbatches of one sample


def net(block: str, pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **more: Any) -> Config:
    model = Custom("support.mixing.Net", {"block": block, **more.pop("args", {})})
    return tiny(pp=pp, dp=dp, schedule=schedule, **{"model": model, "steps": 1, **more})


def loss(name: str) -> Custom:
    return Custom(f"support.mixing.{name}")


A_LITTLE = {"share": 1e-3}
# what is refused, and what trains; each world has one of its layouts
WORLDS = {
    "one process": ([
        net("Capacity", batch_size=3),
        net("Plain", 1, 1, SINGLE, loss=loss("by_batch_size")),
        net("Centered", loss=CHUNKED, args={"share": 1e-2}),
        net("CenteredInTraining"),
        net("Normed"),
    ], [
        net("Plain", 1, 1, SINGLE, precision=BF16),
        net("BatchNormed"),
        net("Plain", loss=CHUNKED),
        net("Plain", loss=loss("transposed")),
    ]),
    "pp=2": (
        [net("Plain", 2, loss=loss("balanced")), net("Centered", 2)],
        [tiny(pp=2, model=Custom("support.forwards.Routed"), steps=1)],
    ),
}  # fmt: skip
MORE_WORLDS = {
    "dp=2": (
        [net("Centered", 1, 2, batch_size=2), net("Normed", 1, 2)],
        [net("Plain", 1, 2, data=Custom("support.samples.phrases"))],
    ),
    "more of one process": ([
        net("Centered", precision=BF16, args=A_LITTLE),
        net("Attention"),
        net("DroppingAndCentered"),
        net("Shifted"),
        net("Centered", 1, 1, SINGLE, args=A_LITTLE),
    ], [
        net("Attention", args={"batch_first": True}, precision=BF16),
        tiny(model=Custom("support.forwards.TorchEncoder"), steps=1),
        tiny(model=model_of("mixtral"), steps=1),
        of_images("ResNet", 1, 1, steps=1),
        of_images("UNet", 1, 1, steps=1),
    ])
}  # fmt: skip


def refusals(_: Config, worker: Worker, configs: list[Config]) -> list[str]:
    """Train each, one after the other; the refusal of each, "" for one that has trained."""
    found = []
    for number, config in enumerate(configs):
        store = worker.store and dist.PrefixStore(f"{number}", worker.store)
        try:
            train_each(config, replace(worker, store=store), [config])
            found.append("")
        except ConfigError as error:  # on all ranks
            found.append(str(error))
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", cells(WORLDS, MORE_WORLDS, most=1))
def test_only_models_that_mix_samples_are_refused(
    world: tuple[list[Config], list[Config]], tmp_path: Path
) -> None:
    mixed, separate = world
    configs = []
    for number, config in enumerate((*mixed, *separate)):
        configs.append(replace(config, run_dir=str(tmp_path / f"{number}")))
        Path(configs[-1].run_dir).mkdir()
    found = run_world(refusals, configs[0], tmp_path / "world", configs)[0]
    for config, text in zip(mixed, found, strict=False):
        assert "mixes_samples=false: " in text and "mixes the samples of a batch" in text, config
    assert found[len(mixed) :] == [""] * len(separate)
    trained = [bool(numbers(Path(config.run_dir))) for config in configs]
    assert trained == [False] * len(mixed) + [True] * len(separate)


class Remembers(nn.Module):
    """In every way that a forward can change its module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, None
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("added", torch.zeros(2))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = "forward"
        self.assigned = self.assigned + 1
        self.added += x.sum()
        return x * torch.rand(())


def test_state_changed_by_the_trial_forwards_is_restored() -> None:
    module = Remembers()
    stage = nn.Sequential(module)
    run = SimpleNamespace(stages=[stage], mesh=SimpleNamespace(device=torch.device("cpu")))
    before, assigned, random = dict(vars(module)), module.assigned, torch.get_rng_state()
    found = []
    for _ in range(2):
        with unchanged(run, seed=3):
            stage.eval()
            found.append(stage(torch.ones(2)))
            assert module.calls == 1 and module.assigned == 1
        assert module.assigned is assigned and assigned == 0
        assert module.added.tolist() == [0, 0] and module.nothing is None
        assert (module.calls, module.last, module.training) == (0, None, True)
        assert vars(module).keys() == before.keys()
        assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(*found), "random numbers follow from the seed"


def train_and_count_checks(config: Config, worker: Worker, configs: list[Config]) -> int:
    with mock.patch.object(
        mixing, "refuse_mixed_samples", wraps=mixing.refuse_mixed_samples
    ) as check:
        train_each(config, worker, configs)
    return check.call_count


def test_the_check_leaves_no_trace_and_a_resumed_run_has_none(tmp_path: Path) -> None:
    """The same dropout masks, the same branches, and the same first batch as without it."""
    saving = Checkpoint(every=0, last=True)
    runs = {"checked": False, "unchecked": True}
    configs = [
        net(block, steps=3, mixes_samples=on, run_dir=str(tmp_path / f"{block} {name}"))
        for block in ("Counting", "Dropping")
        for name, on in runs.items()
    ]
    first = replace(configs[0], checkpoint=saving)
    configs = [first, replace(first, steps=4), *configs[1:]]
    for config in configs:
        Path(config.run_dir).mkdir(exist_ok=True)
    [checks] = run_world(train_and_count_checks, first, tmp_path / "world", configs)
    assert checks == 2, "of first starts, where it is asked for"
    for block in ("Counting", "Dropping"):
        checked, unchecked = (numbers(tmp_path / f"{block} {name}") for name in runs)
        assert checked[:3] == unchecked, block


@pytest.mark.parametrize(
    "config",
    cells({}, {"a mean": net("Centered", 2, 2), "attention": net("Attention", 2, 2, args={"dropout": 0.0})}),
)  # fmt: skip
def test_allowed_mixing_matches_one_process_with_the_same_microbatches(
    config: Config, tmp_path: Path
) -> None:
    assert_proven(replace(config, steps=2, mixes_samples=True), tmp_path)


@pytest.mark.slow
def test_the_command_ends_with_the_cause_and_the_exit_code_of_a_wrong_config(
    tmp_path: Path,
) -> None:
    words = ["model=own", "model.name=support.mixing.Net", "+model.block=Centered"]
    words += ["data=synthetic", "data.vocab_size=64", "seq_len=8", "logger=none", "run_dir=run"]
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "write mixes_samples=true" in done.stderr
