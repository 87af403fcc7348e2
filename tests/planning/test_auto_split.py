"""split=auto: what units cost, the stages that follow from it, and that all ranks agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import tiny
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import Fsdp, Precision
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy
from titanlike.core.config.groups.pipeline import AutoSplit, Schedule
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer
from titanlike.core.config.optimizer import ParameterGroup
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.distributed.sharding import StateBytes
from titanlike.core.graph.model_graph import Field, ModelGraph
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics import units
from titanlike.core.optim.loss import build_loss
from titanlike.core.optim.optimizer import moment_bytes
from titanlike.core.pipeline.schedules import SCHEDULES, gpipe, one_f_one_b, zbv_zero_bubble
from titanlike.core.training.build import build
from titanlike.core.training.train_plan import make_plan
from titanlike.planning.costs.auto_split import TIMES_FILE, stages_in_flight
from titanlike.planning.costs.unit_costs import UnitCosts
from titanlike.planning.known_hardware import shipped
from titanlike.planning.search import search

ROWS, TOKENS, WIDTH, VOCAB = 2, 8, 4, 64


class Mixed(nn.Module):
    """A tied head that is a call in the forward, blocks of unequal width, a residual."""

    def __init__(self, vocab_size: int = VOCAB, broken: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))
            for wide in (8, 8, 32, 8)
        )
        self.once = Once() if broken else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for layer in self.layers:
            x = x + layer(x)
        return F.linear(self.once(x), self.embed.weight)


class Twice(nn.Module):
    """A block that is given one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Product(), nn.Linear(WIDTH, VOCAB)])

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        return self.layers[1](self.layers[0](x, x))


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class Once(nn.Module):
    """Can be called in its model's forward alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.grad_fn or "Add" not in x.grad_fn.name():
            raise LookupError("where am I?")
        return x


def unit_costs_of(config: Config) -> UnitCosts:
    graph = make_plan(config).model_graph
    sizes = graph.microbatch_size, config.seq_len
    targets = torch.empty(sizes, dtype=torch.int64, device="meta")
    return UnitCosts(graph, targets, build_loss(config.loss))


def mixed(kind: type[nn.Module] = Mixed) -> UnitCosts:
    with torch.device("meta"):
        model = kind()
        targets = torch.empty(ROWS, TOKENS, dtype=torch.int64)
    model_graph = ModelGraph(model, {"inputs": Field((TOKENS,), torch.int64)}, ROWS, [])
    return UnitCosts(model_graph, targets, build_loss(tiny().loss))


def own(**changes: Any) -> Config:
    model = Custom(f"{__name__}.Mixed", {"vocab_size": None, **changes.pop("args", {})})
    return tiny(pp=2, model=model, **changes)


# --- costs -------------------------------------------------------------------------------------


def test_flops_count_the_matmuls_of_forward_and_backward() -> None:
    tokens = ROWS * TOKENS
    layers = [6 * tokens * 2 * WIDTH * wide for wide in (8, 8, 32, 8)]
    # embedding, blocks, and the last unit with the tied head, which no module calls
    assert mixed().flops() == [0, *layers, 6 * tokens * WIDTH * VOCAB]


def test_shared_parameters_count_once_in_a_stage() -> None:
    held = mixed().parameter_table(lambda p: p.numel())
    tied, layer = VOCAB * WIDTH, 2 * WIDTH * 8 + WIDTH + 8
    assert held[0, 1] == tied and held[5, 6] == tied and held[1, 2] == layer
    assert held[0, 6] == sum(p.numel() for p in Mixed().parameters())
    assert held[1, 6] == held[0, 6]


def test_an_activation_passed_twice_to_a_module_counts_once() -> None:
    assert mixed(Twice).saved_bytes()[1] == 4 * ROWS * TOKENS * WIDTH


def test_activation_memory_is_what_the_backward_needs() -> None:
    tokens, fp32 = ROWS * TOKENS, 4
    saved = mixed().saved_bytes()
    # of a block: its input, what GELU takes and what it gives
    assert saved[1:5] == [fp32 * tokens * (WIDTH + 2 * wide) for wide in (8, 8, 32, 8)]
    # of the end: the input, log probabilities, targets, and the sum that they are weighted with
    least = fp32 * tokens * (WIDTH + VOCAB) + 8 * tokens
    assert least <= saved[5] <= least + 16


def test_memory_of_attention_does_not_grow_with_the_square_of_the_sequence() -> None:
    short, long = (unit_costs_of(tiny(seq_len=n, batch_size=4)).saved_bytes() for n in (64, 256))
    assert [x / y for x, y in zip(long, short, strict=True)] == pytest.approx([4] * 11, rel=0.02)


def test_a_chunked_loss_holds_no_logits() -> None:
    config = tiny(
        pp=2,
        model=Custom(
            "llama",
            {
                "hidden_size": 8,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "vocab_size": 64,
            },
        ),
    )
    whole, chunked = (
        unit_costs_of(replace(config, loss=loss, batch_size=4)).saved_bytes()
        for loss in (config.loss, ChunkedCrossEntropy(chunk=4))
    )
    tokens = make_plan(replace(config, batch_size=4)).model_graph.microbatch_size * config.seq_len
    gradients = 4 * 8 * (64 + tokens)  # of the head and its input, which the forward computes
    assert whole[:-1] == chunked[:-1]
    assert chunked[-1] <= whole[-1] - 4 * 64 * tokens + gradients


_OF_SGD = {"*mlp*": ParameterGroup(optimizer="sgd")}


@pytest.mark.parametrize(
    "optimizer, mlp, attention, norm",
    [
        (AdamW(), 8, 8, 8),
        (Muon(), 4, 4, 8),
        (AdamW(groups=_OF_SGD), 0, 8, 8),
        (Muon(groups=_OF_SGD), 0, 4, 8),
        (Sgd(momentum=0.9, groups={"*mlp*": ParameterGroup(optimizer="adamw")}), 8, 4, 4),
        (Sgd(groups={"*mlp*": ParameterGroup(momentum=0.9)}), 4, 0, 0),
        (CustomOptimizer("torch.optim.Adagrad"), 4, 4, 4),
        (CustomOptimizer("torch.optim.Adam", {"amsgrad": True}), 12, 12, 12),
    ],
)
def test_optimizer_state_bytes_follow_each_parameters_optimizer(
    optimizer: Any, mlp: int, attention: int, norm: int
) -> None:
    config = tiny(dp=2, optimizer=optimizer)
    memory = make_plan(config).memory()
    found = moment_bytes(config.optimizer, make_plan(config).model_graph.model)
    block = "model.layers.0"
    names = f"{block}.mlp.up_proj.weight", f"{block}.self_attn.q_proj.weight", "model.norm.weight"
    assert [found[name] for name in names] == [mlp, attention, norm]
    sizes = make_plan(config).stage_parameters[0]
    assert memory.layout.moments == [(sum(n * found[name] for name, n in sizes.items()), 0)]


@pytest.mark.parametrize(
    "changes, each",
    [
        ({}, 16),
        ({"optimizer": Sgd()}, 8),
        ({"optimizer": Sgd(momentum=0.9)}, 12),
        ({"precision": Precision("bf16")}, 18),
        ({"dp": 4}, 16 / 4),
        ({"dp": 4, "replicate": 2, "fsdp": Fsdp(2)}, 16 / 2 + 4),
        ({"dp": 4, "fsdp": Fsdp(1), "precision": Precision("bf16")}, 12 / 4 + 2 + 4),
        ({"fsdp": Fsdp(cpu_offload=True)}, 4),
    ],
)
def test_bytes_of_a_parameter(changes: dict[str, Any], each: float) -> None:
    config = tiny(**changes)
    zero = 3 if config.fsdp.zero == "auto" else config.fsdp.zero
    (moments,) = {*moment_bytes(config.optimizer, make_plan(config).model_graph.model).values()}
    assert StateBytes.of(config, zero, moments).whole == each


def test_microbatches_in_flight_follow_from_the_order() -> None:
    assert stages_in_flight(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert stages_in_flight(gpipe(2, 8)) == [8, 8]
    assert stages_in_flight(SCHEDULES["zbh2"](4, 8)) == [7, 7, 7, 7]  # until the weight gradient
    flying = stages_in_flight(zbv_zero_bubble(4, 8))
    assert flying[0] == max(flying) and len(flying) == 8


def test_a_module_that_cannot_run_alone_is_an_error_with_a_fix() -> None:
    config = own(args={"broken": True}, split=AutoSplit())
    with pytest.raises(ConfigError) as caught:
        make_plan(config)
    (problem,) = caught.value.problems
    assert (problem.key, problem.fix) == ("split.cost", "split.cost=params")
    assert "LookupError: where am I?" in problem.reason
    assert make_plan(replace(config, split=AutoSplit(cost="params"))).auto_split is not None
    with pytest.raises(ConfigError, match="cannot be compared: once alone raised LookupError"):
        search(replace(config, hardware=shipped("cpu")), [], gpus=2)


# --- stages ------------------------------------------------------------------------------------


def test_the_stages_follow_the_cost() -> None:
    config = own(split=AutoSplit(cost="flops"), batch_size=4)
    found = make_plan(config)
    # 16 + 16 + 64 of 176: the wide block is with those before it, as the head is as heavy
    assert found.stages[1] == ["layers.3", "once"]
    assert found.auto_split.chosen.imbalance <= found.auto_split.even.imbalance
    # 1F1B holds twice the microbatches on the first stage, and bytes of the head are few here
    gpt2 = {"n_embd": 32, "n_head": 4, "n_layer": 8, "vocab_size": None, "n_positions": None}
    by_memory = tiny(pp=4, model=Custom("gpt2", gpt2), split=AutoSplit("auto", "memory"))
    sizes = [len(stage) for stage in make_plan(replace(by_memory, seq_len=256)).stages]
    assert sizes[1] < sizes[2] < sizes[3]


def test_one_stage_and_more_stages_than_units_work() -> None:
    assert make_plan(tiny(dp=2, split=AutoSplit())).auto_split is None
    few = make_plan(own(split=AutoSplit(), schedule=Schedule("zbvzerobubble"), batch_size=8))
    assert len(few.stages) == 4
    many = make_plan(replace(own(split=AutoSplit(), batch_size=8), pp=8))
    assert [len(stage) for stage in many.stages] == [1, 1, 1, 1, 1, 0, 0, 1]


def test_a_driver_measures_nothing() -> None:
    assert make_plan(tiny(pp=2, split=AutoSplit(cost="time"))).auto_split.cost == "flops"


def test_measured_times_are_reused_only_for_the_same_shapes() -> None:
    signatures = [unit_costs_of(tiny(seq_len=n)).signature for n in (8, 8, 16)]
    assert signatures[0] == signatures[1] != signatures[2]


def stages_twice(config: Config, worker: Worker) -> tuple[int, Any, list[list[list[str]]]]:
    """How often a rank measured, what is stored after that, and the stages of two starts."""
    mesh, path, found = open_mesh(config, worker), worker.run_dir / TIMES_FILE, []
    UnitCosts.times = measured = mock.Mock(wraps=UnitCosts.times)
    UnitCosts.times = lambda *args: measured(*args)
    for _ in range(2):
        found.append(build(config, mesh).plan.stages)
        dist.barrier()
        stored = json.loads(path.read_text())
        dist.barrier()
        if len(found) == 1 and worker.rank == 0:
            # times that nobody measures: a run that goes on takes what is kept
            never = [*[1] * (len(stored["nanoseconds"]) - 1), 10**9]
            path.write_text(json.dumps({**stored, "nanoseconds": never}))
            times = stored["nanoseconds"]
        dist.barrier()
    close_mesh()
    return measured.call_count, times if worker.rank == 0 else None, found


def test_one_rank_measures_times_and_shares_them(tmp_path: Path) -> None:
    """Of layers that are divided, too: the other ranks do not answer what a layer exchanges."""
    config = tiny(pp=2, tp=2, layers=2, split=AutoSplit(cost="time"), loss=ChunkedCrossEntropy())
    ranks = run_world(stages_twice, config, tmp_path)
    assert [count for count, *_ in ranks] == [1, 0, 0, 0]
    (_, times, stages), *others = ranks
    assert all(found == stages for _, _, found in others)
    assert len(times) == 5 and min(times) > 0 and times[1] == times[2]  # blocks are alike
    assert stages[1][1] == ["lm_head"]


def test_costs_are_printed_in_readable_units() -> None:
    flop = [units.flop(count) for count in (999, 1234, 999_960_000, 2e21)]
    assert flop == ["999 FLOP", "1.2 kFLOP", "1.0 GFLOP", "2000.0 EFLOP"]
    times = [units.short_time(seconds) for seconds in (12.34e-6, 0.99996, 0.0045)]
    assert times == ["12.3 us", "1.0 s", "4.5 ms"]
