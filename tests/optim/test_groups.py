"""optimizer.groups: what updates the parameters that a pattern names, exact in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.cells import cells
from support.families import gpt_oss, hf
from support.models import tiny
from support.proven import assert_proven
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.optimizer import ParameterGroup
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.optim.optimizer import build_optimizers, hidden_matrices, set_lr
from titanlike.core.training.preflight import preflight

EMBEDDING = ParameterGroup(lr=1e-3, weight_decay=0.0)
NORMS = ParameterGroup(weight_decay=0.3, betas=[0.8, 0.9])
HEAD = ParameterGroup(optimizer="sgd", momentum=0.5)
OF_ALL = {"*embed*": EMBEDDING, "*norm*": NORMS, "lm_head.*": HEAD}
OF_MUON = Muon(groups={**OF_ALL, "*.[qk]_proj.*": ParameterGroup(lr=1e-2, momentum=0.7)})
MOE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": None}
MOE |= {"intermediate_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32}
EXPERTS = tiny(dp=2, ep=2, optimizer=AdamW(groups={"*.experts.*": NORMS, "*norm*": EMBEDDING}))


class Scan(nn.Module):
    """Layers in stacks, whose norms have a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"weight": (3, 8, 8), "scale": (3, 8), "up_bias": (3, 8), "gate_weight": (3, 8)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device="meta")))
        self.norms = nn.ParameterList([nn.Parameter(torch.empty(3, 8, device="meta"))])


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scan = Scan()
        self.norm = nn.LayerNorm((8, 8), device="meta")
        self.block = nn.Module()
        self.block.conv = nn.Conv1d(8, 8, 3, bias=False, device="meta")
        self.block.proj = nn.Linear(8, 8, bias=False, device="meta")
        self.pos_bias = nn.Parameter(torch.empty(4, 8, device="meta"))
        self.bias_proj = nn.Parameter(torch.empty(4, 8, device="meta"))
        self.table = nn.Parameter(torch.empty(4, 8, device="meta"))


@pytest.mark.parametrize(
    "model, matrices",
    [
        (
            Own(),
            {"scan.weight", "scan.gate_weight", "block.conv.weight"}
            | {"block.proj.weight", "bias_proj", "table"},
        ),
        (gpt_oss(attention_bias=True), None),
        (hf("gpt_oss", num_hidden_layers=2), None),
        (hf("qwen3_moe", num_hidden_layers=2), None),
    ],
    ids=["own", "gpt_oss", "hf gpt_oss", "hf qwen3_moe"],
)
def test_stacked_vectors_do_not_decay_and_muon_takes_none(model: Any, matrices: Any) -> None:
    built = model if matrices else build_model(resolve_model(tiny(model=model)))
    stacks = ("_proj", "gate_up_proj", "down_proj", "up_proj")
    names = {name for name, _ in built.named_parameters()}
    right = matrices or {n for n in names if n.endswith((*stacks, "weight")) and "norm" not in n}
    right -= {name for name in right if "sinks" in name}
    config = tiny(model=model) if matrices is None else tiny()
    for choice in (AdamW(), Muon(), Sgd(weight_decay=0.1)):
        parameters = dict(built.named_parameters())
        optimizers = build_optimizers(parameters, built, replace(config, optimizer=choice))
        of = {id(p): name for name, p in parameters.items()}
        groups = [group for each in optimizers for group in each.param_groups]
        decayed = {of[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
        assert decayed == right
    if not matrices:  # blocks are found by their list
        assert hidden_matrices(built, Muon()) <= right


def test_parameter_groups_match_torchs() -> None:
    """To the last bit, over a warm-up; also a decay of vectors."""
    config = tiny(layers=1, optimizer=AdamW(groups=OF_ALL))
    model, right = (build_model(resolve_model(config)).to_empty(device="cpu") for _ in range(2))
    for at, (mine, its) in enumerate(zip(model.parameters(), right.parameters(), strict=True)):
        mine.data = torch.randn(mine.shape, generator=torch.Generator().manual_seed(at))
        its.data = mine.data.clone()
    optimizers = build_optimizers(dict(model.named_parameters()), model, config)
    named = dict(right.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    rest = [p for name, p in named.items() if "proj" in name]
    expected: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [
                {"params": [named["model.embed_tokens.weight"]], "peak": 1e-3, "weight_decay": 0.0},
                {"params": norms, "peak": 3e-3, "weight_decay": 0.3, "betas": (0.8, 0.9)},
                {"params": rest, "peak": 3e-3, "weight_decay": 0.1},
            ],
            betas=(0.9, 0.95),
            fused=True,
        ),
        torch.optim.SGD(
            [{"params": [named["lm_head.weight"]], "peak": 3e-3}],
            weight_decay=0.1,
            momentum=0.5,
            fused=True,
        ),
    ]
    for step in (1, 2, 3):
        for mine, its in zip(model.parameters(), right.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step))
            its.grad = mine.grad.clone()
        set_lr(optimizers, config, step)
        for group in (group for optimizer in expected for group in optimizer.param_groups):
            group["lr"] = group["peak"] * (step / 20)
        for optimizer in (*optimizers, *expected):
            optimizer.step()
    for (name, mine), its in zip(model.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(mine, its), name


@pytest.mark.parametrize(
    "config",
    cells(
        {"muon": tiny(2, 2, layers=2, optimizer=OF_MUON)},
        {
            "tp": tiny(dp=2, tp=2, layers=2, optimizer=OF_MUON),
            "sgd": tiny(2, 2, layers=2, optimizer=Sgd(groups={"*norm*": HEAD})),
            "ep": replace(EXPERTS, model=Model("moe", MOE)),
        },
    ),
)
def test_parameter_groups_in_a_layout_match_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


@pytest.mark.parametrize(
    "groups, said",
    [
        ({"*embod*": EMBEDDING}, "no parameter has such a name; a pattern of names such as"),
        (
            {"*norm*": EMBEDDING, "model.norm.*": NORMS},
            "model.norm.weight is matched by model.norm",
        ),
        ({"*up_proj*": ParameterGroup(optimizer="muon")}, "with optimizer=adamw there is no Muon"),
        ({"lm_head*": NORMS}, "lm_head.weight is tied to model.embed_tokens.weight"),
        ({"*norm*": ParameterGroup(momentum=0.5)}, "momentum has no effect: its parameters are"),
    ],
)
def test_patterns_and_settings_without_effect_are_refused(
    groups: dict[str, ParameterGroup], said: str
) -> None:
    (problem,) = preflight(tiny(layers=1, tied=True, optimizer=AdamW(groups=groups)))
    assert problem.key.startswith("optimizer.groups.") and said in str(problem)
