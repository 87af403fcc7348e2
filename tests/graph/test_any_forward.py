"""Whatever a forward does, its stages one after another do the same, gradients included."""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import any_models, device_dependent, forwards, stashed
from support.cells import slow
from support.counted_calls import CountedCalls
from support.forwards import DIM, VOCAB, Blocks
from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.world import run_world
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.pipeline import EvenSplit, PointSplit
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.graph.cut import message, message_problem, same_messages
from titanlike.core.graph.model_graph import Field, ModelGraph
from titanlike.core.graph.partition import partition
from titanlike.core.graph.record_forward import record_forward
from titanlike.core.graph.recording import RecordError
from titanlike.core.graph.stage import Stage
from titanlike.core.launch.worker import Worker
from titanlike.core.models.registry import build_model, initial_weights_of
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan

# --- models whose later stages use a tensor without needing its gradient: ids [B, T] -> [B, T, 64]


class _Residual(Blocks):
    def step(self, block: int, x: Tensor) -> Tensor:
        return x + self.blocks[block](x).tanh()


class Detached(_Residual):
    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in range(4):
            x = self.step(block, x) + first.detach()
        return self.out(x)


class Compared(_Residual):
    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in range(4):
            x = self.step(block, x) * (1 + (first > 0).to(torch.int8))
        return self.out(x)


class NormOfTheFirst(_Residual):
    """The first value passes by every stage, and the last uses it under no_grad."""

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in range(4):
            x = self.step(block, x)
        with torch.no_grad():
            scale = first.norm(dim=-1, keepdim=True)
        return self.out(x / (1 + scale))


class OnlyDetached(_Residual):
    """`side` has no way to the loss but a detached one: it has no gradient and does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        side = self.side(x)
        for block in range(4):
            x = self.step(block, x)
        return self.out(x + side.detach())


class ExtraOutputs(_Residual):
    """Returns tensors that the loss ignores; `side` makes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.tokens(ids)
        hidden = [self.side(x)]
        for block in range(4):
            x = self.step(block, x)
            hidden.append(x)
        return {"logits": self.out(x), "hidden": hidden}


class _Perhaps(nn.Module):
    """Whether there is a gradient of `first` depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        x = x + self.linear(x).tanh()
        return x + first if first.isnan().any() else x


class ByValue(Blocks):
    def __init__(self) -> None:
        super().__init__(*(_Perhaps() for _ in range(4)))

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, first)
        return self.out(x)


class TableOfWeights(_Residual):
    """A stage in the middle sends a tensor that no received one has part in."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(DIM, DIM) for _ in range(6)))
        self.blocks[3] = nn.Embedding(VOCAB, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in range(3):
            x = self.step(block, x)
        table = self.blocks[3](torch.arange(ids.shape[1], device=ids.device))
        x = self.step(4, x)
        return self.out(self.step(5, x * table))


class Noisy(Blocks):
    """Random numbers of the forward's own, which all blocks use."""

    def forward(self, ids: Tensor) -> Tensor:
        x, noise = self.tokens(ids), torch.rand(ids.size(1), 1, device=ids.device)
        for block in self.blocks:
            x = x + block(x) * noise
        return self.out(x)


MODELS = {
    "torch's encoder": forwards.TorchEncoder,
    "LSTM": forwards.Lstm,
    "experts": forwards.Routed,
    "checkpointed": forwards.Checkpointed,
    "checkpointed, reentrant": lambda: forwards.Checkpointed(reentrant=True),
    "in place": forwards.InPlace,
    "complex buffer": forwards.Rotating,
    "one block": forwards.OneBlock,
    "items set": forwards.Filled,
    "weight norm": forwards.Normed,
    "dense skips": forwards.Dense,
    "two towers": forwards.TwoTowers,
    "no lists": forwards.Flat,
    "no gradients": forwards.WithoutGradient,
    "gradient of its own": forwards.Reversed,
    "a stage of one unit": forwards.Reversed,
    "noise for all blocks": Noisy,
    "made when needed": forwards.Lazy,
    "ViT": forwards.Vit,
    "parameters and inputs of its own": any_models.Direct,
    "called in another order": any_models.Plain,
    "a Sequential": any_models.sequential,
    "detached": Detached,
    "only detached": OnlyDetached,
    "compared": Compared,
    "without gradients, relayed": NormOfTheFirst,
    "by value": ByValue,
    "a table of weights": TableOfWeights,
    "stash and pop within a block": stashed.within_blocks,
    "kept by a hook": stashed.KeptByAHook,
    "a table of all blocks": stashed.table_of_all_blocks,
    "asks for the device": device_dependent.AsksForTheDevice,
    "looks at a constant mask": device_dependent.MaskedEncoder,
    "skips a full mask": device_dependent.SkipsAFullMask,
}


POINTS = {  # where the even split in four would not cut
    "parameters and inputs of its own": ["steps.1", "steps.2", "again"],
    "no gradients": ["out"],
    "two towers": ["blocks.1", "other", "blocks.3"],
    "a stage of one unit": ["blocks.1", "blocks.3", "out"],
}


def batch_for(model: nn.Module) -> Tensor:
    if isinstance(model, forwards.Vit):
        return torch.randn(4, 3, 16, 16)
    return torch.randint(0, VOCAB, (4, 12))


def loss_of(output: Any) -> Tensor:
    return (output["logits"] if isinstance(output, dict) else output).square().mean()


class Selecting(nn.Module):
    """Hands on the rows of a mask: as many as it has, which is another number in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.linear(x) + (0 if rows is None else rows.sum())
        return x, x[x[..., 0] > x[..., 1]]


class SelectsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Selecting() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = None
        for at, block in enumerate(self.blocks):
            x, rows = block(x, rows)
            rows = None if at == 2 else 2 * rows  # in a call between blocks as well
        return x


def test_a_tensor_whose_size_depends_on_values_is_passed_on_within_a_stage_alone() -> None:
    with torch.device("meta"):
        model = SelectsRows()
    graph = ModelGraph(model, {"inputs": Field((64, 8), torch.float32)}, 4, [])
    for stages in (2, 4):
        graph.stages = partition(graph.units, EvenSplit(), stages)
        assert "size depends on values" in message_problem(graph.graphs(graph.fields, True)[1])
    graph.stages = [["blocks.0", "blocks.1", "blocks.2"], ["blocks.3"]]  # here x alone
    assert not any(map(message_problem, graph.graphs(graph.fields, True)))


@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_unsplit_model_computes(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.device("meta"):
        meta_model = MODELS[name]()
    inputs = batch_for(model)
    fields = {"inputs": Field(tuple(inputs.shape[1:]), inputs.dtype)}
    points = POINTS.get(name, [])
    buffers = dict(model.named_buffers())
    model_graph = ModelGraph(meta_model, fields, len(inputs), points, buffers=lambda: buffers)
    split = PointSplit(points=points) if points else EvenSplit()
    model_graph.stages = partition(model_graph.units, split, len(points) + 1 if points else 4)
    graphs = model_graph.graphs(fields, True)
    assert not any(map(message_problem, graphs))

    truth = copy.deepcopy(model)
    torch.manual_seed(1)
    right = truth(inputs)
    torch.manual_seed(1)
    loss_of(right).backward()

    chain, sent = [], []
    mailbox: dict[tuple[int, int], list[Tensor]] = {(-1, 0): [inputs]}  # (from stage, to stage)
    back: dict[tuple[int, int], list[Tensor]] = {}
    for index, graph in enumerate(graphs):
        stage = Stage(copy.deepcopy(model), graph.units, graph.weights)
        stage.add_forwards("a shape", {True: graph}, index, torch.device("cpu"))
        ways = list(dict.fromkeys([index - 1, *graph.skips_in]))
        arrived = [t.detach().requires_grad_(index > 0) for at in ways for t in mailbox[at, index]]
        answer = stage(*arrived, inputs=inputs)
        sent = list(answer) if isinstance(answer, tuple) else [answer]
        declared = [(message(node).shape, message(node).dtype) for node in graph.sends]
        assert [(tensor.shape, tensor.dtype) for tensor in sent] == declared
        near = [index + 1] * (len(sent) - len(graph.skips_out))
        to = [*near, *graph.skips_out]
        for place, tensor in zip(to, sent, strict=True):
            mailbox.setdefault((index, place), []).append(tensor)
        sources = [index - 1] * (len(arrived) - len(graph.skips_in)) + [*graph.skips_in]
        chain.append((stage, index, sent, list(dict.fromkeys(to)), arrived, sources))
    assert torch.equal(sent[0], right["logits"] if isinstance(right, dict) else right)

    back[len(graphs), len(graphs) - 1] = [torch.autograd.grad(sent[0].square().mean(), sent[0])[0]]
    for _, index, answer, to, leaves, sources in reversed(chain):
        gradients = [gradient for place in to for gradient in back[place, index]]
        torch.autograd.backward(answer[: len(gradients)], gradients)
        for leaf, source in zip(leaves, sources, strict=True):
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            back.setdefault((index, source), []).append(gradient)
    canonical, found = model_graph.canonical_names(), Counter()
    for stage, *_ in chain:
        for key, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[canonical[key]] = found[canonical[key]] + parameter.grad
    for key, parameter in truth.named_parameters():
        if parameter.grad is None:
            assert key not in found, "it would be decayed"
            continue
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("Checkpointed", "zbvzerobubble"),
        *slow(
            ("HalfAsleep", "1f1b"),
            ("Dense", "dualpipev"),
            ("WithoutGradient", "interleaved1f1b"),
            ("TableOfWeights", "zbvzerobubble"),
            ("OnlyDetached", "dualpipev"),
        ),
    ],
)
def test_stages_run_in_torchs_pipeline_runtime(name: str, schedule: str, tmp_path: Path) -> None:
    module = "support.forwards" if hasattr(forwards, name) else __name__
    config = tiny(pp=2, schedule=schedule, model=Custom(f"{module}.{name}"))
    config.data = SyntheticData(vocab_size=VOCAB)
    assert_proven(config, tmp_path)


def test_a_skip_connection_works_in_evaluation() -> None:
    """Else it is relayed: a stage that uses it in training alone would wait for it."""
    with torch.device("meta"):
        model = forwards.HelpedInTraining()
    graph = ModelGraph(model, {"inputs": Field((12,), torch.int64)}, 4, [])
    graph.stages = partition(graph.units, EvenSplit(), 4)
    both = [graph.graphs(graph.fields, training) for training in (True, False)]
    assert all(map(same_messages, *both))
    assert [len(stage.receives) for stage in both[1]] == [0, 2, 2, 2]
    points = PointSplit(points=["blocks.2", "blocks.3", "out"])
    graph.stages = partition(graph.units, points, 4)
    both = [graph.graphs(graph.fields, training) for training in (True, False)]  # now alike
    assert [stage.skips_in for stage in both[1]] == [(), (), (0,), ()]


def test_a_skip_connection_is_read_from_a_stage_on_the_same_rank() -> None:
    with torch.device("meta"):
        model = forwards.Dense()
    graph = ModelGraph(model, {"inputs": Field((12,), torch.int64)}, 4, [])
    graph.stages, graph.place = partition(graph.units, EvenSplit(), 4), (0, 1, 0, 1)
    sources = [stage.skips_in for stage in graph.graphs(graph.fields, True)]
    first = len(graph.graphs(graph.fields, True)[0].sends) // 2
    assert sources == [(), (), (0,) * first, (1,) * len(sources[3])] and first and sources[3]
    graph.place = None
    assert not any(stage.skips_in for stage in graph.graphs(graph.fields, True))


def one_stage(kind: type[nn.Module]) -> tuple[nn.Module, Stage]:
    """A model, and the stage that has all of it."""
    with torch.device("meta"):
        meta = kind()
    model, model_graph = kind(), ModelGraph(meta, {"inputs": Field((12,), torch.int64)}, 4, ())
    model_graph.stages = [[unit.name for unit in model_graph.units]]
    (graph,) = model_graph.graphs(model_graph.fields, True)
    stage = Stage(model, graph.units, graph.weights)
    stage.add_forwards("a shape", {True: graph}, 0, torch.device("cpu"))
    return model, stage


def test_a_models_own_checkpointing_still_recomputes_in_a_stage() -> None:
    model, stage = one_stage(forwards.Checkpointed)
    calls = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    stage(torch.randint(0, VOCAB, (4, 12))).sum().backward()
    assert len(calls) == 8


def test_a_value_is_freed_after_its_last_use() -> None:
    """What autograd does not need would otherwise be held to the end of the stage."""
    model, stage = one_stage(forwards.Flat)
    inputs, most = weakref.WeakSet[Tensor](), list[int]()  # inputs of layers, while they are held

    def called(_: nn.Module, args: tuple[Tensor]) -> None:
        inputs.add(args[0])
        most.append(len(inputs))

    for i in range(9):
        getattr(model, f"layer{i}").register_forward_pre_hook(called)
    with torch.no_grad():
        stage(torch.randint(0, VOCAB, (4, 12)))
    assert len(most) == 9 and max(most) <= 2


class Refused(nn.Module):
    """Two layers, and what a forward may misuse."""

    def __init__(self, call: Callable[[Refused, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = Given(), nn.Linear(4, 4)
        self.drop, self.steps, self.loose, self.call = nn.Dropout(0.5), 0, torch.ones(4), call
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class Given(nn.Linear):
    """Appends to a list that it is given, and calls a module that it is given."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor, seen: Any = (), module: Any = None) -> Tensor:
        if isinstance(seen, list):
            seen.append(x)
        return super().forward(module(x) if module else x)


def under_autocast(model: Refused, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.second(model.first(x))


def hooked(model: Refused, x: Tensor) -> Tensor:
    (y := model.first(x)).register_hook(lambda gradient: 2 * gradient)
    return model.second(y)


def changed_input(model: Refused, x: Tensor) -> Tensor:
    x[:, 0] = 1.0
    return model.second(model.first(x))


def counted(model: Refused, x: Tensor) -> Tensor:
    model.steps += 1
    return model.second(model.first(x)) * model.steps


def normed(model: Refused, x: Tensor) -> Tensor:
    return model.second(F.batch_norm(model.first(x), model.mean, model.var, training=True))


REFUSED = {
    "reads the values": lambda m, x: m.second(m.first(x)) if x.sum() > 0 else m.first(x),
    "turns autocast on": under_autocast,
    "neither a parameter nor a buffer": lambda m, x: m.second(m.first(x) * m.loose),
    "changes the buffer calls": lambda m, x: m.second(m.first(x)) * m.calls.add_(1),
    "calls register_hook": hooked,
    "changes the batch's inputs": changed_input,
    "changes self.steps": counted,
    "random numbers of Python": lambda m, x: m.second(m.first(x)) * random.random(),
    "first changes an object, list or dict": lambda m, x: m.second(m.first(x, [])),
    "passes a Dropout to another module": lambda m, x: m.second(m.first(x, module=m.drop)),
    "batch_norm with running statistics": normed,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_forward_that_cannot_be_cut_is_refused_with_the_reason(reason: str) -> None:
    with torch.device("meta"):
        model = Refused(REFUSED[reason])
    with pytest.raises(RecordError, match=reason):
        record_forward(model, {"inputs": torch.empty(2, 4, device="meta")}, ["first", "second"])


def test_a_split_with_a_different_boundary_in_evaluation_is_refused() -> None:
    config = tiny(pp=3, model=Custom("support.forwards.OtherInEvaluation"))
    (problem,) = preflight(config)
    assert "other tensors in evaluation" in problem.reason
    assert not preflight(tiny(dp=2, model=config.model))


def test_experts_reached_on_one_rank_match_one_process(tmp_path: Path) -> None:
    """One sequence a rank: FSDP would add up gradients of different experts."""
    config = tiny(dp=2, batch_size=2, seq_len=1, optimizer=Sgd())
    config.model = Custom("support.forwards.Routed")
    assert_proven(config, tmp_path)


def test_random_buffers_and_dtypes_of_a_constructor_are_equal_on_all_ranks() -> None:
    model = Custom("support.forwards.Shuffled")
    first, again, other = (initial_weights_of(model, seed).buffer("order") for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert {p.dtype for p in build_model(model).parameters()} == {torch.float32}


def test_a_parameter_behind_an_output_that_the_loss_ignores_gets_no_gradient() -> None:
    plan = make_plan(tiny(pp=2, model=Custom(f"{__name__}.ExtraOutputs")))
    assert plan.model_graph.trained_outputs == [True] + [False] * 5
    first, last = plan.model_graph.graphs(plan.fields, True)
    side = next(node for node in first.nodes if node.target == "side")
    assert side in first.sends and side not in first.differentiated_later
    assert len(last.differentiated) == 1, "the residual, and no other hidden state"


def test_parameters_that_the_forward_does_not_use_are_on_the_first_stage() -> None:
    """They are saved and loaded with the others."""
    plan = make_plan(tiny(pp=2, model=Custom("support.any_models.Unused")))
    graphs = [plan.model_graph.graphs(plan.fields, mode) for mode in (True, False)]
    stages = plan.model_graph.stage_modules(*graphs)
    assert {"spare.weight", "spare.bias"} <= {*stages[0][1]} and len(stages) == 2


class Viewed(nn.Module):
    """Blocks that return views; its loss may be cut off."""

    def __init__(self, vocab_size: int, cut: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), Turned()) for _ in range(2))
        self.head, self.cut = nn.Linear(16, vocab_size), cut

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).detach() if self.cut else self.head(x)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)


def strict_step(config: Config, worker: Worker) -> tuple[float, set[int]]:
    """The loss, and the widths of what is copied."""
    warnings.filterwarnings("error", "FSDP2-wrapped module .* returned a view")
    with opened(config, worker) as job, CountedCalls() as counted:
        loss = job.train().item()
    return loss, {call.shapes[0][-1] for call in counted.calls if call.name == "aten::clone"}


def test_blocks_that_return_views_are_sharded_without_a_warning(tmp_path: Path) -> None:
    """And the logits of a head with a bias, a view of what it has computed, are not copied."""
    config = tiny(dp=2, model=Model(f"{__name__}.Viewed"), fsdp=Fsdp(3))
    both = run_world(strict_step, config, tmp_path)
    [(one, _)] = run_world(strict_step, replace(config, dp=1, fsdp=Fsdp()), tmp_path)
    assert [loss for loss, _ in both] == pytest.approx([one] * 2, rel=1e-6)
    assert [copied for _, copied in both] == [{16}, {16}]


def test_a_loss_without_gradient_is_told_before_launch() -> None:
    [problem] = preflight(tiny(model=Model(f"{__name__}.Viewed", {"cut": True})))
    assert problem.key == "model.name" and "its loss has no gradient" in problem.reason
