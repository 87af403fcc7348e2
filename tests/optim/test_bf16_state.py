"""optimizer.state_dtype=bf16: AdamW's running means in half the memory.

Layouts of it: `test_muon.py` (packed shards of parts) and `tests/proof/test_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from support.models import tiny
from support.world import run_world
from titanlike.config.optimizers.adamw import AdamW
from titanlike.config.optimizers.muon import Muon
from titanlike.config.schema import Checkpoint, Config, ConstantLr
from titanlike.distributed.placement import Part
from titanlike.metrics.sinks import read_jsonl
from titanlike.optim.bf16_state import Bf16StateAdamW, Positions, random_bits, round_stochastically
from titanlike.optim.fused import OptimizerContext
from titanlike.training.loop import train


def test_rounding_is_exact_on_average_and_never_further_than_one_digit() -> None:
    values = torch.tensor([1.0, 1.001, -1.003, 3e-5, -7e-12, 0.0]).repeat(40_000, 1)
    positions = torch.arange(values.numel()).view(values.shape)
    bits = random_bits(positions, seed=5, step=torch.tensor(3.0))
    for noise in (bits >> 16, bits & 0xFFFF):
        rounded = round_stochastically(values, noise)
        assert rounded.dtype == torch.bfloat16
        error = rounded.float() - values
        assert (error.abs() <= values.abs() / 128).all()
        assert (error[:, 0] == 0).all() and (error[:, -1] == 0).all(), "bf16 numbers stay"
        assert (error.mean(0).abs() <= values[0].abs() / 128 / 50).all()


def test_nonfinite_values_stay_nonfinite() -> None:
    """CUDA's NaN has all bits set, so that a carry would make -0 of it."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x00800000], dtype=torch.int32)
    rounded = round_stochastically(bits.view(torch.float32), torch.full((3,), 0xFFFF))
    assert rounded[0].isnan() and rounded[1:].tolist() == [float("inf"), float("-inf")]


def test_rounding_bits_do_not_depend_on_sharding_and_differ_by_step_and_tensor() -> None:
    whole = Positions(torch.empty(6, 100)).of_rows(slice(0, 6))
    assert torch.equal(whole, torch.arange(600).view(6, 100))
    step = torch.tensor(7.0)
    bits = random_bits(whole, 1, step)
    for dim, local, index in (
        (0, (4, 100), (torch.tensor([1, 2, 4, 5]),)),
        (1, (6, 4), (slice(None), torch.tensor([1, 2, 4, 5]))),
    ):
        part = Part(torch.Size((6, 100)), dim, ((1, 3), (4, 6)))
        held = Positions(torch.empty(local), part)
        rows = [held.of_rows(rows) for rows in (slice(0, 3), slice(3, local[0]))]
        assert torch.equal(random_bits(torch.cat(rows), 1, step), bits[index])
    for other in (random_bits(whole, 1, step + 1), random_bits(whole, 2, step)):
        assert (bits != other).float().mean() > 0.99
        correlation = torch.corrcoef(torch.stack([bits.flatten(), other.flatten()]).double())
        assert abs(correlation[0, 1]) < 0.15


def test_exp_avg_sq_decays_in_bf16_with_stochastic_rounding() -> None:
    """beta2 = 0.999 lets it fall by a thousandth a step, less than half of bf16's last digit."""
    parameter = nn.Parameter(torch.ones(64, 64))
    config, context = AdamW(betas=[0.9, 0.999]), OptimizerContext(seeds={parameter: 0})
    groups = [{"params": [parameter], "weight_decay": 0.0}]
    optimizer = Bf16StateAdamW(groups, config, context)
    nearest = torch.zeros(64, 64, dtype=torch.bfloat16)
    exact = torch.zeros(64, 64)
    for step in range(500):
        parameter.grad = torch.full((64, 64), 1.0 if step < 50 else 0.0)
        optimizer.step()
        exact = 0.999 * exact + 0.001 * parameter.grad.square()
        nearest = (0.999 * nearest.float() + 0.001 * parameter.grad.square()).bfloat16()
    mean = optimizer.state[parameter]["exp_avg_sq"].float().mean()
    assert mean == pytest.approx(exact.mean().item(), rel=0.01)
    assert nearest.float().mean() > 1.2 * exact.mean(), "else there is nothing to cure"


def test_a_chunked_update_equals_an_unchunked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (2**22, 40):
        monkeypatch.setattr("titanlike.optim.bf16_state._CHUNK", chunk)
        parameters = [nn.Parameter(torch.ones(shape)) for shape in ((7, 16), (50,), ())]
        groups = [{"params": parameters, "weight_decay": 0.1}]
        seeds = {parameter: at for at, parameter in enumerate(parameters)}
        optimizer = Bf16StateAdamW(groups, AdamW(lr=0.1), OptimizerContext(seeds=seeds))
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        results.append([p.detach() for p in parameters])
        results[-1] += [s["exp_avg_sq"] for s in optimizer.state.values()]
        assert {s["step"].item() for s in optimizer.state.values()} == {3.0}
    assert all(map(torch.equal, *results))


SAVING = {"tied": True, "checkpoint": Checkpoint(every=3), "lr": ConstantLr(warmup=0)}
BF16 = Muon(state_dtype="bf16")  # AdamW's, too


def losses(folder: Path, first: Config, then: Config) -> list[float]:
    """Of a run that stopped after three steps."""
    run_world(train, replace(first, steps=3), folder)
    run_world(train, replace(then, steps=6), folder)
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_resumes_in_another_layout_and_state_dtype(tmp_path: Path) -> None:
    """In the same layout and dtype its losses are those of a run that was not stopped, to the last
    bit."""
    same, fp32 = (tiny(dp=2, optimizer=choice, **SAVING) for choice in (BF16, Muon()))
    run_world(train, replace(same, steps=6), tmp_path / "whole")
    whole = [row["loss"] for row in read_jsonl(tmp_path / "whole" / "metrics.jsonl")]
    assert losses(tmp_path / "same", same, same) == whole
    other = (tiny(*layout, optimizer=BF16, **SAVING) for layout in ((2, 2), (4, 1)))
    assert losses(tmp_path / "other", *other) == pytest.approx(whole, abs=1e-5)
    for name, pair in {"to bf16": (fp32, same), "to fp32": (same, fp32)}.items():
        assert losses(tmp_path / name, *pair) == pytest.approx(whole, abs=1e-3)


def test_state_is_still_bf16_after_a_resume() -> None:
    """torch's Optimizer.load_state_dict would make it fp32."""
    parameter = nn.Parameter(torch.ones(3, 3))
    context = OptimizerContext(seeds={parameter: 0})
    groups = [{"params": [parameter], "weight_decay": 0.0}]
    optimizers = [Bf16StateAdamW(groups, AdamW(lr=0.1), context) for _ in range(2)]
    parameter.grad = torch.ones(3, 3)
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for optimizer in optimizers:
        state = optimizer.state[parameter]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert state["step"].dtype == torch.float32
