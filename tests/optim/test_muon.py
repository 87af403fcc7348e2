"""optimizer=muon: Muon for the matrices of the blocks, AdamW for the rest, exact in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.cells import cells
from support.models import tiny
from support.proven import assert_proven
from support.world import run_world
from titanlike.config.schema import Checkpoint, Config, ConstantLr, Fsdp, Muon, Precision
from titanlike.launch.worker import Worker
from titanlike.metrics.sinks import read_jsonl
from titanlike.models.registry import build_model, resolve_model
from titanlike.optim import muon, orthogonalize
from titanlike.optim.learning_rate import set_lr
from titanlike.optim.optimizer import build_optimizers
from titanlike.proof.verification import verify
from titanlike.training.draft import preflight
from titanlike.training.guard import Guard
from titanlike.training.train import train

MUON = Muon()
OTHER = Muon(adjust_lr="original", nesterov=False, ns_steps=3, momentum=0.8, adamw_lr=1e-3)


@pytest.mark.parametrize(
    "config",
    cells(
        {"shards of parts": tiny(dp=2, tp=2, layers=2, optimizer=MUON)},
        {
            "a pipeline of shards": tiny(2, 2, optimizer=MUON),
            "parts, repeated heads": tiny(tp=4, tied=True, optimizer=OTHER),
            "a pipeline of parts": tiny(2, tp=2, optimizer=MUON),
            "packed parts, replicas": tiny(
                dp=2, replicate=2, tp=2, family="gpt2", layers=2, optimizer=MUON
            ),
            "ZeRO 3": tiny(dp=2, fsdp=Fsdp(3), optimizer=OTHER),
            "replicas": tiny(dp=2, replicate=2, optimizer=MUON),
            "HSDP": tiny(dp=4, replicate=2, optimizer=OTHER),
            "uneven shards": tiny(dp=3, batch_size=12, optimizer=MUON),
            "tied, in a V": tiny(2, 2, "zbvzerobubble", tied=True, optimizer=OTHER),
            "CPU offload": tiny(dp=2, fsdp=Fsdp(cpu_offload=True), optimizer=MUON),
            "bf16": tiny(2, 2, precision=Precision("bf16"), optimizer=MUON),
            "GPT-2": tiny(2, 2, family="gpt2", optimizer=MUON),
        },
    ),
)
def test_every_layout_updates_as_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


def verify_on_shards_alone(config: Config, worker: Worker) -> dict:
    """`verify`, where each rank orthogonalizes the rows that it has."""
    muon.shard_group = lambda parameter: None
    return verify(config, worker)


@pytest.mark.slow
def test_an_update_of_shards_alone_is_caught(tmp_path: Path) -> None:
    results = run_world(verify_on_shards_alone, tiny(dp=2, optimizer=MUON), tmp_path)
    assert {result["exit_code"] for result in results} == {1}
    assert "update of layers.0.attention.wq.weight" in (tmp_path / "rank0.out").read_text()


@pytest.mark.parametrize("settings", [Muon(), OTHER])
def test_matrices_of_blocks_are_updated_as_torchs_muon_does_and_all_others_as_adamw(
    settings: Muon,
) -> None:
    """Over several steps of a warm-up, to the last bit, in one process in bf16."""
    config = tiny(layers=2, optimizer=settings, precision=Precision("bf16"), tied=False)
    model, right = (seeded_model(config) for _ in range(2))
    optimizers = build_optimizers(dict(model.named_parameters()), model, config)
    hidden = [p for name, p in right.named_parameters() if "layers." in name and p.dim() == 2]
    assert len(hidden) == 2 * 7
    rest = [p for p in right.parameters() if not any(p is matrix for matrix in hidden)]
    decayed = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in rest]
    expected = [
        torch.optim.Muon(
            hidden,
            lr=settings.lr,
            weight_decay=0.1,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            ns_steps=settings.ns_steps,
            adjust_lr_fn=settings.adjust_lr,
        ),
        torch.optim.AdamW(decayed, betas=(0.9, 0.95), fused=True),
    ]
    for step in (1, 2, 3):
        generator = torch.Generator().manual_seed(step)
        for mine, its in zip(model.parameters(), right.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            its.grad = mine.grad.clone()
        set_lr(optimizers, config, step)
        for optimizer, peak in zip(expected, (settings.lr, settings.adamw_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = (settings.lr if peak is None else peak) * (step / 20)
        for optimizer in (*optimizers, *expected):
            optimizer.step()
    for (name, mine), its in zip(model.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(mine, its), name


def seeded_model(config: Config) -> nn.Module:
    model = build_model(resolve_model(config)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def test_embeddings_in_blocks_tied_weights_and_named_matrices_are_left_to_adamw() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(4, 8)
    model.layers = nn.ModuleList(
        nn.ModuleDict(
            {"bias": nn.Embedding(4, 8), "up": nn.Linear(8, 8), "router": nn.Linear(8, 2)}
        )
        for _ in range(2)
    )
    model.head = nn.Linear(8, 4, bias=False)
    model.layers[1]["up"].weight = model.head.weight
    hidden = muon.hidden_matrices(model, Muon(adamw=["*.router.*"]))
    assert hidden == {"layers.0.up.weight"}


def test_the_head_of_a_chain_of_layers_is_left_to_adamw() -> None:
    """Each layer of a chain is a block, the last one as well."""
    chain = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert muon.hidden_matrices(chain, MUON) == {"1.weight"}


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"adamw": ["*.ruoter.*"]}, "optimizer.adamw=*.ruoter.*: no parameter has such a name"),
        ({"adamw": ["layers.*"]}, "nothing for Muon to update: it is for 2-D"),
    ],
)
def test_a_choice_that_names_nothing_or_leaves_nothing_is_refused(
    settings: dict, said: str
) -> None:
    (problem,) = preflight(tiny(optimizer=Muon(**settings)))
    assert said in str(problem)


def test_work_is_dealt_evenly_and_each_matrix_is_orthogonalized_by_one_rank(
    tmp_path: Path,
) -> None:
    shapes = [(64, 64)] * 4 + [(176, 64)] * 2 + [(64, 176)]
    owners = orthogonalize.deal(shapes, 2)
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in (0, 1)]
    assert max(loads) < 1.25 * min(loads)
    counts = run_world(count_work, tiny(2, 2, optimizer=MUON), tmp_path)
    # a stage of four blocks with seven matrices each, over two ranks; two messages
    assert [matrices for matrices, _ in counts] == [14] * 4
    assert [messages for _, messages in counts] == [2] * 4


def count_work(config: Config, worker: Worker) -> tuple[int, int]:
    """(matrices orthogonalized by this rank, all-to-alls) in a step."""
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.training.build import build
    from titanlike.training.step import measured_step

    calls = []
    for module, name in ((orthogonalize, "newton_schulz"), (dist, "all_to_all_single")):
        right = getattr(module, name)
        setattr(module, name, lambda *a, n=name, f=right, **k: (calls.append(n), f(*a, **k))[1])
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    batch = next(batches(open_data(config).train, config, dp_rank=mesh.dp_rank))
    measured_step(run, config, 1, iter([batch]), Guard(config, {}), worker)
    return calls.count("newton_schulz"), calls.count("all_to_all_single")


def weights_after_two_steps(config: Config, worker: Worker) -> tuple[int, dict]:
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.training.build import build
    from titanlike.training.step import measured_step

    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    stream = batches(open_data(config).train, config, dp_rank=mesh.dp_rank)
    for step in (1, 2):
        measured_step(run, config, step, stream, Guard(config, {}), worker)
    named = (pair for state in run.stage_states for pair in state.parameters())
    return mesh.axes.get_local_rank("shard"), {
        name: parameter.to_local().detach().numpy() for name, parameter in named
    }


@pytest.mark.slow
def test_replicas_of_shards_stay_equal_to_the_last_bit(tmp_path: Path) -> None:
    config = tiny(dp=4, replicate=2, optimizer=MUON)
    results = run_world(weights_after_two_steps, config, tmp_path)
    for shard in (0, 1):
        first, second = (weights for at, weights in results if at == shard)
        assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, then",
    [
        pytest.param(tiny(2, 2), tiny(), id="shards to one process"),
        pytest.param(tiny(2, 2), tiny(4, 1), id="to a pipeline"),
        pytest.param(tiny(dp=2, replicate=2), tiny(2, 2, "zbvzerobubble"), id="to a V"),
        pytest.param(tiny(dp=2, tp=2), tiny(tp=4), id="to parts with repeated heads"),
        pytest.param(tiny(2, tp=2), tiny(dp=2), id="parts to shards"),
    ],
)
def test_a_run_resumes_in_another_layout(first: Config, then: Config, tmp_path: Path) -> None:
    settings = {"checkpoint": Checkpoint(every=3), "lr": ConstantLr(warmup=0), "optimizer": MUON}
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_world(train, tiny(steps=6, **settings), whole)
    run_world(train, replace(first, steps=3, **settings), part)
    run_world(train, replace(then, steps=6, **settings), part)
    curves = [[row["loss"] for row in read_jsonl(f / "metrics.jsonl")] for f in (part, whole)]
    assert len(curves[0]) == 6
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)
