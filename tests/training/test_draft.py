"""What a config decides before anything is allocated: stages, names, and what is refused."""

from __future__ import annotations

import pytest
import torch

from support.models import tiny
from titanlike.config.errors import ConfigError
from titanlike.config.schema import BalanceSplit, Config, Custom, Fsdp, LoopedSchedule
from titanlike.graph.cut import message
from titanlike.graph.stage import Stage
from titanlike.models.registry import build_model, initial_weights_of
from titanlike.parallel.initialize import initialize
from titanlike.training.draft import draft, preflight


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_run_one_after_another_are_the_model(family: str) -> None:
    config = tiny(4, 1, LoopedSchedule("interleaved1f1b", None, 2), family=family)
    plan = draft(config)
    assert [name for names in plan.stages for name in names] == [
        u.name for u in plan.model_graph.units
    ]
    start = initial_weights_of(plan.model, config.seed)
    canonical = plan.model_graph.canonical_names()
    whole, parts = build_model(plan.model), []
    initialize(whole, start, torch.device("cpu"))
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    arrived = (ids,)
    for index, graph in enumerate(plan.model_graph.graphs(plan.fields, True)):
        stage = Stage(build_model(plan.model), graph.units, graph.weights)
        initialize(stage, start, torch.device("cpu"), canonical)
        stage.add_forwards("a shape", {True: graph}, index, torch.device("cpu"))
        parts += [name for name, _ in stage.named_parameters()]
        sent = stage(*arrived, inputs=ids)
        arrived = sent if isinstance(sent, tuple) else (sent,)
        assert [message(node).shape[1:] for node in graph.sends] == [t.shape[1:] for t in arrived]
    assert torch.equal(arrived[0], whole(ids))
    assert sorted(parts) == sorted(name for name, _ in whole.named_parameters())


def test_a_405b_model_is_drafted_in_seconds() -> None:
    sizes = {"dim": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn_dim": 53248}
    config = tiny(
        16, 64, batch_size=16 * 64, model=Custom("llama", {**sizes, "vocab_size": 128256})
    )
    plan = draft(config)
    assert plan.whole_numel == pytest.approx(405.9e9, rel=1e-3)
    biggest = max(plan.stage_numel(stage) for stage in range(16))
    assert biggest < 1.1 * plan.whole_numel / 16


def own(name: str = "llama", **sizes: object) -> Config:
    return tiny(model=Custom(name, {"vocab_size": None, **sizes}))


@pytest.mark.parametrize(
    "config, expected",
    [
        (own(dim=30, heads=4), "model.dim=32"),
        (own(heads=6, dim=48, kv_heads=4), "model.kv_heads=3"),
        (own(width=4), "width"),
        (own(dimm=64), "model.dim=64"),
        (own("lama"), "llama"),
        (own("no.such.module"), "no.such"),
        (own(vocab_size=10), "model.vocab_size=null"),
        (own("gpt2", max_seq_len=8), "seq_len=8"),
        (tiny(2, 2, "zbvzerobubble", fsdp=Fsdp(3)), "fsdp.zero=1"),
        (tiny(2, 1, split=BalanceSplit(balance=[4, 3])), "sums to 7"),
    ],
)
def test_a_model_that_cannot_be_laid_out_is_refused_with_one_that_can(
    config: Config, expected: str
) -> None:
    """By the launcher, and by a rank that drafts it."""
    assert expected in "\n".join(map(str, preflight(config)))
    with pytest.raises((ConfigError, ImportError, ValueError), match=expected.replace(".", r"\.")):
        draft(config)
