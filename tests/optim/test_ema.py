"""ema.decay: an average of the weights, exact in every layout, saved, resumed and evaluated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from support.cells import cells
from support.models import tiny
from support.proven import assert_proven
from support.world import run_world
from titanlike.core.checkpoint.integrity import MODEL
from titanlike.core.checkpoint.reader import ShardReader
from titanlike.core.config.files import parse_object
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.optimization import ConstantLr, Ema
from titanlike.core.config.groups.user_code import CustomOptimizer
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import optimizer_state
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.optim.fused import step_unless
from titanlike.core.optim.optimizer import build_optimizers
from titanlike.core.training.loop import train

AVERAGED = {"ema": Ema(0.6), "layers": 2, "steps": 4, "validation": Validation(2, 1)}
AVERAGED |= {"checkpoint": Checkpoint(every=2), "lr": ConstantLr(warmup=0)}


class Extending(torch.optim.SGD):
    """Calls the step of the class that it extends, of which there is an instance, too."""

    def __init__(self, parameters: Any, lr: float) -> None:
        torch.optim.SGD([torch.zeros(1)])
        super().__init__(parameters, lr=lr)

    def step(self, closure: None = None) -> None:
        super().step(closure)


@pytest.mark.parametrize(
    "choice",
    [AdamW(), Sgd(), Muon(), CustomOptimizer(f"{__name__}.Extending", lr=0.01)],
)
def test_the_average_matches_torchs_averaged_model_without_skipped_steps(
    choice: AdamW | Sgd | Muon | CustomOptimizer,
) -> None:
    config = tiny(layers=1, optimizer=choice, ema=Ema(0.6))
    model = build_model(resolve_model(config)).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape)
    optimizers = build_optimizers(dict(model.named_parameters()), model, config)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6))
    for skip in (0.0, 0.0, 1.0, 0.0):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        for optimizer in optimizers:
            step_unless(optimizer, torch.tensor(skip), {})
        if not skip:
            expected.update_parameters(model)
    for parameter, average in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(optimizer_state(optimizers, parameter)["ema"], average)


class Operators(TorchDispatchMode):
    """Counts operators; one with a list of scalar tensors is a kernel for each of them on a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), more: Any = None) -> Any:
        lists = [arg for arg in args if isinstance(arg, list) and arg]
        self.count += max((len(a) for a in lists if all(t.dim() == 0 for t in a)), default=1)
        return function(*args, **more or {})


def operators(layers: int, **more: Any) -> int:
    """Of an optimizer's third step."""
    config = tiny(layers=layers, optimizer=Sgd(), **more)
    model = build_model(resolve_model(config)).to_empty(device="cpu")
    optimizers = build_optimizers(dict(model.named_parameters()), model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape)
    for _ in range(3):
        with Operators() as counted:
            for optimizer in optimizers:
                step_unless(optimizer, torch.tensor(0.0), {})
    return counted.count


def test_all_weights_are_averaged_in_a_few_operators() -> None:
    """A GPU would wait for the host that launches some for each of hundreds of weights."""
    of_one, of_three = (operators(n, ema=Ema(0.6)) - operators(n) for n in (1, 3))
    assert of_one == of_three <= 2 * 6, "of the weights with and without weight decay"


@pytest.mark.parametrize(
    "config",
    cells(
        {"pp and dp": tiny(2, 2, **AVERAGED)},
        {
            "tp": tiny(tp=2, dp=2, optimizer=Muon(), **AVERAGED),
            "cp": tiny(cp=2, fsdp=Fsdp(3), **AVERAGED),
        },
    ),
)
def test_the_average_in_a_layout_matches_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


@pytest.mark.parametrize("config", cells({"ZeRO 2": {}}, {"stateless": {"optimizer": Sgd()}}))
def test_ema_can_be_enabled_on_a_resume(config: Any, tmp_path: Path) -> None:
    config = tiny(dp=2, fsdp=Fsdp(2), **AVERAGED, **config)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1, keep=0))
    run_world(train, replace(config, steps=2, ema=Ema()), tmp_path)
    run_world(train, config, tmp_path)
    folders = [str(tmp_path / "checkpoints" / f"step-{step:08d}") for step in (3, 4, 4)]
    loaded, last, average = (
        ShardReader.open("RUN", folder, ema=ema)
        for folder, ema in zip(folders, (False, False, True), strict=True)
    )
    assert config.ema.decay is not None
    for name in last.entries(MODEL):
        before, after, ema = (reader.whole(MODEL + name) for reader in (loaded, last, average))
        expected = before.lerp(after, 1 - config.ema.decay)
        torch.testing.assert_close(ema, expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(ema, before) and not torch.equal(ema, after)


@pytest.mark.parametrize(
    "config",
    cells(
        {"ZeRO 2": tiny(dp=2, fsdp=Fsdp(2), **AVERAGED)},
        {"ZeRO 3": tiny(dp=2, fsdp=Fsdp(3), **AVERAGED), "pp": tiny(2, tied=True, **AVERAGED)},
    ),
)
def test_ema_resumes_and_validates_in_another_layout_like_one_process(
    config: Config, tmp_path: Path
) -> None:
    """Its weights are exported, too."""
    whole = replace(config, pp=1, dp=1, fsdp=Fsdp())
    run_world(train, whole, tmp_path / "whole")
    run_world(train, replace(config, steps=2), tmp_path / "moved")
    run_world(train, whole, tmp_path / "moved")
    records = {
        run: [parse_object(line) for line in (tmp_path / run / "metrics.jsonl").open()]
        for run in ("whole", "moved")
    }
    for one, other in zip(records["whole"], records["moved"], strict=True):
        for key in one.keys() & {"val_loss", "val_loss_ema"}:
            assert one[key] == pytest.approx(other[key], rel=1e-5), key
    last = records["whole"][-1]
    assert last["val_loss_ema"] != pytest.approx(last["val_loss"], rel=1e-4)
    rows = {run: ShardReader.open("RUN", str(tmp_path / run), ema=True) for run in records}
    for name in rows["whole"].entries(MODEL):
        one, other = (reader.whole(MODEL + name) for reader in rows.values())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
