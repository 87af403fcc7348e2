"""optimizer=muon: Muon for the matrices of the blocks, AdamW for the rest, exact in every
layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.cells import cells
from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.world import run_world
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.optim.optimizer import build_optimizers, hidden_matrices, set_lr
from titanlike.core.training.preflight import preflight
from titanlike.techniques import muon

MUON = Muon()
OTHER = Muon(adjust_lr="original", nesterov=False, ns_steps=3, momentum=0.8, adamw_lr=1e-3)


PACKED = tiny(dp=2, tp=2, family="gpt2", layers=2, tied=True, optimizer=Muon())
UNEVEN = tiny(dp=3, batch_size=12, layers=2, optimizer=Muon())
HSDP = tiny(dp=4, replicate=2, layers=2, optimizer=OTHER)
REPEATED = tiny(tp=4, tied=True, layers=2, optimizer=OTHER)


@pytest.mark.parametrize(
    "config",
    cells(
        {"packed": PACKED},
        {"uneven": UNEVEN, "repeated heads": REPEATED, "replicas of shards": HSDP},
    ),
)
def test_muon_in_layouts_matches_one_process(config: Config, tmp_path: Path) -> None:
    """Also what is left to AdamW, whose state in bf16 is rounded as in one process."""
    assert_proven(config, tmp_path)


@pytest.mark.parametrize("settings", [Muon(), OTHER])
def test_block_matrices_match_torchs_muon_and_others_adamw(settings: Muon) -> None:
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
    hidden = hidden_matrices(model, Muon(adamw=["*.router.*"]))
    assert hidden == {"layers.0.up.weight"}


def test_the_head_of_a_chain_of_layers_is_left_to_adamw() -> None:
    """Each layer of a chain is a block, the last one as well."""
    chain = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert hidden_matrices(chain, MUON) == {"1.weight"}


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"adamw": ["*.ruoter.*"]}, "optimizer.adamw=*.ruoter.*: no parameter has such a name"),
        ({"adamw": ["*.layers.*"]}, "nothing for Muon to update: it is for 2-D"),
    ],
)
def test_a_pattern_that_matches_nothing_or_everything_is_refused(settings: dict, said: str) -> None:
    (problem,) = preflight(tiny(optimizer=Muon(**settings)))
    assert said in str(problem)


def test_each_matrix_is_orthogonalized_by_one_rank_in_equal_shares(tmp_path: Path) -> None:
    shapes = [(64, 64)] * 4 + [(176, 64)] * 2 + [(64, 176)]
    owners = muon.deal(shapes, 2)
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in (0, 1)]
    assert max(loads) < 1.25 * min(loads)
    counts = run_world(count_work, tiny(dp=2, layers=2, optimizer=MUON), tmp_path)
    # two blocks with seven matrices each, over two ranks; two messages
    assert counts == [(7, 2), (7, 2)]


def count_work(config: Config, worker: Worker) -> tuple[int, int]:
    """(matrices orthogonalized by this rank, all-to-alls) in a step."""
    calls = []
    for module, name in ((muon, "newton_schulz"), (dist, "all_to_all_single")):
        right = getattr(module, name)
        setattr(module, name, lambda *a, n=name, f=right, **k: (calls.append(n), f(*a, **k))[1])
    with opened(config, worker) as job:
        job.step(1)
    return calls.count("newton_schulz"), calls.count("all_to_all_single")
