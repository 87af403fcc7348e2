"""What every family of models has to show on four pipeline ranks and in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support.cells import GRID, slow
from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config, Custom, PointSplit, Schedule
from titanlike.data.loader import batches, open_data
from titanlike.graph.cut import messages
from titanlike.launch.worker import Worker
from titanlike.models.registry import build_model, resolve_model
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.training.build import build
from titanlike.training.feed import to_device

HF = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 8}
HF |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 8, "n_head": 4}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MASKS = Custom("support.vision_models.images", {"size": 8, "masks": True})
IMAGES = Custom("support.vision_models.images", {"size": 8})


def on_four(**changes: Any) -> Config:
    return tiny(4, 1, Schedule("1f1b", 4), **changes)


FAMILIES = {
    "llama": (on_four(), "head.weight"),
    "llama, tied": (on_four(tied=True), "embedding.weight"),
    "gpt2": (on_four(family="gpt2"), "embedding.tokens.weight"),
    "U-Net": (
        on_four(
            model=Custom("support.vision_models.UNet"),
            data=MASKS,
            seq_len=1,
            split=PointSplit(points=["down.2", "up.0", "up.2"]),
        ),
        "head.weight",
    ),
    "ResNet": (
        on_four(model=Custom("support.vision_models.ResNet"), data=IMAGES, seq_len=1),
        "fc.weight",
    ),
    "LSTM": (on_four(model=Custom("support.forwards.Lstm")), "out.weight"),
    "experts": (on_four(model=Custom("support.forwards.Routed")), "out.weight"),
    "hf llama": (on_four(model=Custom("hf", {"family": "llama", "config": HF})), "lm_head.weight"),
    "hf gpt2": (
        on_four(model=Custom("hf", {"family": "gpt2", "config": GPT2})),
        "transformer.wte.weight",
    ),
}


class Seen(NamedTuple):
    """Of one rank in one step."""

    largest: dict[str, float]  # gradient of each parameter
    held: int  # numbers in parameters
    sent: list[list[tuple]]  # shape and dtype of what each stage sent for each microbatch
    declared: list[list[tuple]]  # of each stage, by its graph
    loss: float


def one_step(config: Config, worker: Worker) -> Seen:
    mesh = open_mesh(config, worker)
    data = open_data(config)
    run = build(config, mesh, data)
    sent: list[list[tuple]] = [[] for _ in run.stages]
    for stage, shapes in zip(run.stages, sent, strict=True):
        stage.register_forward_hook(lambda _, __, out, into=shapes: into.append(described(out)))
    batch = next(batches(data.train, config, dp_rank=0))
    loss, _ = run.pipeline.train(to_device(batch, mesh, config))
    graphs = run.draft.model_graph.graphs(run.draft.fields, True)
    declared = [described(messages(graphs[i])[1]) for i in run.draft.order.local(mesh.pp_rank)]
    named = [pair for part in run.stage_states for pair in part.parameters()]
    seen = Seen(
        {name: p.grad.abs().max().item() for name, p in named},
        sum(p.numel() for _, p in named),
        sent,
        declared,
        loss.item(),
    )
    close_mesh()
    return seen


def described(tensors: Any) -> list[tuple]:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


QUICK = ("llama, tied", "U-Net")
LEFT_OUT = ("LSTM", "experts")  # by .ci/run, too
OTHERS = [name for name in FAMILIES if name not in QUICK + LEFT_OUT]


@pytest.mark.parametrize("family", [*QUICK, *slow(*OTHERS), *slow(*LEFT_OUT, marks=GRID)])
def test_a_family_on_four_ranks_and_in_one_process(family: str, tmp_path: Path) -> None:
    config, head = FAMILIES[family]
    ranks = run_world(one_step, config, tmp_path / "four", timeout=40)
    (alone,) = run_world(one_step, replace(config, pp=1, split=tiny().split), tmp_path / "one")
    model = build_model(resolve_model(config))
    names = {name for name, _ in model.named_parameters()}
    # every parameter is in a stage, and learns; the head too
    assert set().union(*(seen.largest for seen in ranks)) == names == set(alone.largest)
    for seen in (*ranks, alone):
        assert all(0 < largest < 1e4 for largest in seen.largest.values()), seen.largest
    assert head in ranks[-1].largest
    # what is sent is what was declared, for every microbatch
    for seen in ranks:
        for shapes, declared in zip(seen.sent, seen.declared, strict=True):
            assert len(shapes) == 4 and all(shape == declared for shape in shapes)
    # a rank holds a part of the model
    assert max(seen.held for seen in ranks) < 0.7 * alone.held
    assert sum(seen.held for seen in ranks) >= alone.held
    assert ranks[0].loss == pytest.approx(alone.loss, rel=1e-5)
