"""compile=true: the same numbers, one graph for equal blocks, compiled before the first message.

Which numbers each layout gives is proven in `tests/proof/test_layouts.py`.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import SelectiveCheckpointContext

from support.cells import slow
from support.models import tiny
from support.proven import assert_proven
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.torch_private.compiler import graph_count
from titanlike.core.training.loop import train
from titanlike.run.checks import problems
from titanlike.techniques import compiled_blocks
from titanlike.techniques.activation_checkpoint import checkpoint_blocks
from titanlike.techniques.compiled_blocks import CompiledBlocks
from titanlike.techniques.weight_gradients import DeferredWeightGradients

PATIENCE = 300  # seconds: the first one compiles, the others find it on disk


@pytest.mark.slow
def test_branches_that_alternate_between_steps_match_eager(tmp_path: Path) -> None:
    model = Custom("support.unreached.Net", {"block": "Alternating"})
    config = tiny(pp=2, schedule=Schedule("gpipe", 1), model=model, compile=True)
    assert_proven(config, tmp_path, PATIENCE)


@pytest.mark.grid
def test_batches_of_many_lengths_share_a_graph(tmp_path: Path) -> None:
    data = Custom("support.samples.phrases", {})
    config = tiny(pp=2, compile=True, layers=4, data=data, steps=8)
    run_world(train, config, tmp_path, timeout=PATIENCE)
    (event,) = read_jsonl(tmp_path / "events.jsonl")  # no step compiled again
    assert re.match(r"compiled the blocks: \d graphs( a rank)?, [\d.]+ s$", event["text"])
    # of a block behind a message and of one behind a block, in training and in evaluation
    assert int(event["text"].split()[3]) <= 4


class Twice(nn.Module):
    """Calls a layer twice with the same input, and one whose input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x) + self.a(x) + self.b(Stopped.apply(x.exp()))


class Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return None


class Shared(nn.Module):
    """Two layers with one weight, and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).tanh())


class InPlace(Twice):
    """Changes a result of a matrix product, which `selective` keeps."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu_())


class Looks(nn.Module):
    """Looks at a value, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x) * (2 if x.sum().item() > 0 else 1)


def gradients(blocks: nn.ModuleList, deferred: DeferredWeightGradients | None) -> list[Tensor]:
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = x
    for block in blocks:
        y = block(y)
    y.square().mean().backward()
    if deferred is not None:
        deferred.take()()
        deferred.check_all_taken()
    found = [x.grad, *(parameter.grad for parameter in blocks.parameters())]
    blocks.zero_grad()
    return found


@pytest.fixture(params=["aot_eager", *slow("inductor")])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Torch's compiler but for its last stage, which makes C++ of graphs, or all of it."""
    torch._dynamo.reset()
    compile_with = functools.partial(torch.compile, backend=request.param)
    monkeypatch.setattr(torch, "compile", compile_with)
    return request.param


@pytest.mark.parametrize("kind", [Twice, *slow(Shared, InPlace, Looks)])
@pytest.mark.parametrize("save", [None, [], ["aten.*mm"]], ids=["kept", "recomputed", "selective"])
def test_deferred_weight_gradients_match_in_compiled_blocks(
    kind: type, save: list | None, backend: str
) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([kind(), kind()])
    truth = gradients(blocks, None)
    deferred = DeferredWeightGradients(blocks, torch.device("cpu"))
    if save is not None:
        checkpoint_blocks(blocks, ["0", "1"], save)
    before, compiled = graph_count(), CompiledBlocks(False, lambda stage: ["0", "1"])
    compiled.on_stage(0, blocks, ())
    says_output = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
    if kind is InPlace and save and not says_output:
        pytest.skip("2.11 does not say what an operator returned")
    if kind is InPlace and save:
        with pytest.raises(ConfigError, match="changes a result of aten.mm in place"):
            gradients(blocks, deferred)
        return
    for _ in range(2):
        for mine, right in zip(gradients(blocks, deferred), truth, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
    if kind is Looks:
        (note,) = compiled.notes
        assert "0 and 1 more not compiled as a whole: " in note and "test_compile.py" in note
    else:
        assert graph_count() - before == 1 and not compiled.notes


def test_a_missing_compiler_is_reported_before_launch(monkeypatch) -> None:
    monkeypatch.setattr(compiled_blocks.shutil, "which", lambda name: None)
    (problem,) = problems(tiny(compile=True))
    assert str(problem) == (
        "compile=true: a C++ compiler is needed to compile for the CPU, and g++ is not found; "
        "write compile=false"
    )
