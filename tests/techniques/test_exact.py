"""numerics=exact: losses, gradient norms and checkpoints of different layouts are equal bit by
bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from support import saved_runs
from support.cells import GRID, cells, slow
from support.families import hf, moe
from support.models import tiny
from support.world import run_world
from titanlike.core.checkpoint.digest import digest_of
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    Float8Precision,
    Fsdp,
    Numerics,
    Precision,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.jobs import Checkpoint, Validation, Verify
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, ConstantLr
from titanlike.core.config.groups.user_code import CustomOptimizer, Model
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import problems
from titanlike.core.data.registry import open_data
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.torch_private.fsdp_sums import ShardedGradients
from titanlike.core.torch_private.pipeline_stage import _Stage
from titanlike.core.training import step as steps
from titanlike.core.training.build import Run
from titanlike.core.training.preflight import preflight
from titanlike.proof import exact as exact_proof
from titanlike.proof.exact import first_difference
from titanlike.techniques.exact import Grains
from titanlike.techniques.exact_sums import SumTree, bins_of, keys_of, root_of_bins, tree_sum
from titanlike.techniques.mixture import moe as moe_model
from titanlike.techniques.mixture.experts import expert_linear


def test_a_tree_adds_in_one_order_whatever_arrives_first() -> None:
    values = torch.randn(11, 5) * torch.logspace(-6, 6, 11).unsqueeze(1)
    sums = []
    for order in (range(11), reversed(range(11)), (3, 7, 1, 0, 10, 2, 9, 8, 4, 6, 5)):
        tree: SumTree[torch.Tensor] = SumTree(11, torch.add)
        for leaf in order:
            tree.put((0, leaf), values[leaf].clone())
        sums.append(tree.root())
    # of three ranks, the nodes that remain
    tree = SumTree(11, torch.add)
    for leaves in ((0, 1, 2), (3, 8, 4, 9), (5, 7, 6, 10)):
        part: SumTree[torch.Tensor] = SumTree(11, torch.add)
        for leaf in leaves:
            part.put((0, leaf), values[leaf].clone())
        nodes = part.take()
        assert sorted(nodes, key=lambda key: key[1] << key[0]) == keys_of(11, leaves)
        for key, value in nodes.items():
            tree.put(key, value)
    sums.append(tree.root())
    assert all(torch.equal(other, sums[0]) for other in sums)
    plain = values.sum(0)
    assert torch.allclose(plain, sums[0], rtol=1e-5)


def test_squares_are_summed_exactly_in_any_order() -> None:
    values = torch.randn(5000).square() * torch.logspace(-30, 30, 5000)
    bins = bins_of(values)
    shuffled = values[torch.randperm(5000)]
    assert torch.equal(bins, bins_of(shuffled[:77]) + bins_of(shuffled[77:]))
    expected = sum(map(_as_integer, values.tolist()))
    assert sum(int(bins[k]) << 8 * k for k in range(32)) == expected
    assert root_of_bins(bins).item() == pytest.approx(values.double().sum().sqrt().item(), rel=1e-6)
    for wrong in (torch.nan, torch.inf):
        assert root_of_bins(bins_of(torch.tensor([1.0, wrong]))).isnan()
    assert tree_sum(torch.tensor([1.0, 2.0, 4.0])).item() == 7.0


def _as_integer(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * 2**149 // denominator


# --- layouts --------------------------------------------------------------------------------------


class Block(nn.Sequential):
    """A residual block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Skipping(nn.Module):
    """Dropout in blocks whose outputs later blocks take, too; a tied weight; sizes that fill no
    vector register."""

    def __init__(self, vocab_size: int = 64, dim: int = 36, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            Block(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Dropout(0.2))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x, skips = self.embed(inputs), []
        half = len(self.layers) // 2
        for index, layer in enumerate(self.layers):
            if index >= half:
                x = x + 0.5 * skips.pop()
            x = x + layer(x)
            if index < half:
                skips.append(x)
        return self.head(self.norm(x))


class SelfAttending(nn.Module):
    """Attention whose three arguments are one tensor; a frozen weight, a matrix of one row, and
    sizes that fill no vector register."""

    def __init__(self, vocab_size: int = 64, dim: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.frozen = nn.Parameter(torch.ones(dim), requires_grad=False)
        layers = (nn.MultiheadAttention(dim, 4, batch_first=True) for _ in range(2))
        self.layers, self.gate = nn.ModuleList(layers), nn.Linear(dim, 1)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs) * self.frozen
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.head(x * self.gate(x).sigmoid())


RESUMED = {"lr": ConstantLr(), "validation": Validation(every=1)}


def exact(run_dir: Path, pp: int = 1, dp: int = 1, schedule: str = "1f1b", **more: Any) -> Config:
    """A run of 3 steps, unless told, that ends with a checkpoint."""
    microbatches = more.get("batch_size", 16) // dp // more.pop("grain", 1)
    config = tiny(pp=pp, dp=dp, schedule=schedule, layers=4, **{"steps": 3} | more)
    return replace(
        config,
        schedule=replace(config.schedule, microbatches=microbatches),
        numerics=Numerics("exact", config.batch_size // dp // microbatches, digest_every=1),
        checkpoint=Checkpoint(every=0, keep=0),
        run_dir=str(run_dir / f"{pp} {dp} {len([*run_dir.iterdir()])}"),
    )


def bits(config: Config, steps: int = 3) -> tuple[Any, ...]:
    """All that a run leaves: losses, norms and digests of its steps, the digest of its
    checkpoint."""
    assert saved_runs.train_all(config) == [""]
    run_dir = Path(config.run_dir)
    keys = ("loss", "grad_norm", "digest", "val_loss")
    rows = [[r.get(key) for key in keys] for r in read_jsonl(run_dir / "metrics.jsonl")]
    state = json.loads((saved_runs.checkpoint(run_dir, steps) / "state.json").read_text())
    assert all(all(row[:3]) for row in rows) and len(rows) == steps
    return *rows, state["digest"]


BF16 = Precision("bf16")
OWN = {"model": Model(f"{__name__}.Skipping", {"layers": 4})}
ATTENDING = {"model": Model(f"{__name__}.SelfAttending"), "optimizer": Sgd(momentum=0.9)}
GPT2 = {"family": "gpt2", "tied": True, "precision": BF16}
MUON = {"optimizer": Muon()}
MOE = {
    "model": moe(
        num_hidden_layers=4,
        moe_intermediate_size=40,  # rows that do not fill the CPU's vector registers
        first_k_dense_replace=1,
        n_shared_experts=1,
        balance_loss=0.01,
        z_loss=0.001,
    )
}
CHUNKED = {"loss": ChunkedCrossEntropy(chunk=16)}
FULL = {"activation_checkpoint": ActivationCheckpoint("full")}
SELECTIVE = {"activation_checkpoint": SelectiveActivationCheckpoint()}
MOVES: list[dict[str, Any]] = [  # each resumes from where the one before has ended
    {"pp": 2, "dp": 2, "fsdp": Fsdp(zero=2)},
    {"dp": 2, "fsdp": Fsdp(zero=3)},
    {"pp": 4, **FULL},
    {"dp": 4, "replicate": 2},
    {"pp": 2, "schedule": "zbvzerobubble"},
    {},
    {"pp": 2, "dp": 2, "schedule": "interleaved1f1b"},
    {"dp": 2, "replicate": 2},
]
EXPERTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2, "fsdp": Fsdp(zero=3), **FULL},
    {"dp": 4, "ep": 4, "fsdp": Fsdp(zero=2)},
    {"pp": 2, "dp": 2, "ep": 2, "schedule": "zbvzerobubble"},
    {"dp": 4, "ep": 2, "replicate": 2},
    {"dp": 4, "ep": 2, "fsdp": Fsdp(zero=2), **SELECTIVE},
]
# what is trained, the first layout, and others that must leave the same bits
LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        {},
        [
            {"dp": 2, "fsdp": Fsdp(zero=3)},
            {"pp": 2, "schedule": "zbvzerobubble"},
            {"dp": 2, "replicate": 2},
        ],
    ),
    "own": (OWN, [{"dp": 2}, {"pp": 2, "schedule": "zbvzerobubble", **FULL}]),
    "attention": (ATTENDING, [{"dp": 2, "fsdp": Fsdp(zero=2)}]),
    "gpt2 bf16": (GPT2, [{"dp": 2, "fsdp": Fsdp(zero=2)}, {"pp": 2}]),
    # whose gradients are computed in the forward, or all forwards later
    "chunks": (CHUNKED, [{"pp": 2, "schedule": "gpipe"}, {"pp": 2, "dp": 2}]),
    # three grains a rank: in a tree of those no two ranks may be exchanged
    "experts": ({**MOE, "batch_size": 6}, [{"dp": 2, "ep": 2}]),
}
MORE_LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama, more": (
        {"grain": 2},
        [
            {"pp": 2, "dp": 2, "fsdp": Fsdp(zero=zero), "schedule": schedule}
            for zero in (1, 2, 3)
            for schedule in ("gpipe", "interleaved1f1b")
        ]
        + [{"pp": 2, "dp": 2, "schedule": s} for s in ("zbh1", "vmin", "interleavedzerobubble")]
        + [{"dp": 4, "replicate": 2, "fsdp": Fsdp(zero=zero)} for zero in (1, 2, 3)]
        + [{"dp": 2, "fsdp": Fsdp(cpu_offload=True)}, {"pp": 4, **FULL}],
    ),
    "three ranks": ({"batch_size": 18}, [{"dp": 3}, {"dp": 3, "replicate": 3}, {"dp": 2}]),
    "muon": (MUON, [{"dp": 2}, {"pp": 2, "dp": 2, "replicate": 2}]),
    "sgd": ({"optimizer": Sgd()}, [{"dp": 2}, {"pp": 2, "dp": 2}]),
    "own optimizer": (
        OWN
        | {"optimizer": CustomOptimizer("torch.optim.Adam", {"fused": True, "weight_decay": 0.1})},
        [{"dp": 2}, {"pp": 2, "dp": 2, "fsdp": Fsdp(zero=3)}],
    ),
    "attention, more": (
        ATTENDING,
        [{"dp": 4, "fsdp": Fsdp(zero=3)}, {"pp": 2, "dp": 2, "schedule": "zbvzerobubble"}],
    ),
    "own, more": (
        OWN,
        [{"pp": 2, "dp": 2, "schedule": "dualpipev", "fsdp": Fsdp(zero=1)}, {"pp": 4}],
    ),
    "gpt2 bf16, more": (GPT2, [{"pp": 2, "dp": 2, "schedule": "zbvzerobubble"}, {"dp": 4}]),
    "moe": (MOE, [{"dp": 2}, {"pp": 2, "dp": 2}, *EXPERTS]),
    "moe with top_k=1 in bf16": (
        {"model": moe(num_hidden_layers=4, num_experts_per_tok=1), "precision": BF16},
        EXPERTS,
    ),
    "moe with top_k=4, three ranks": (
        {"model": moe(num_local_experts=6, num_experts_per_tok=4), "batch_size": 12},
        [{"dp": 3, "ep": 3}, {"dp": 6, "ep": 3, "fsdp": Fsdp(zero=2)}, {"dp": 4, "ep": 2}],
    ),
    "mixtral": (
        {"model": hf("mixtral", None, num_hidden_layers=4)},
        [{"dp": 2, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2, "fsdp": Fsdp(zero=3)}],
    ),
    "moe with muon": (MOE | MUON, [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "replicate": 2}]),
}


@pytest.mark.parametrize("case", cells(LAYOUTS, {}, MORE_LAYOUTS, most=1))
def test_exact_layouts_are_bitwise_equal(case: Any, tmp_path: Path) -> None:
    trained, others = case
    first = bits(exact(tmp_path, **trained))
    for other in others:
        assert bits(exact(tmp_path, **trained | other)) == first, other


@pytest.mark.parametrize(
    ("trained", "layouts"),
    [
        ({}, MOVES[:2]),
        pytest.param({}, MOVES, marks=GRID),
        pytest.param(MOE, [EXPERTS[0], {"pp": 2}, *EXPERTS[1:]], marks=GRID),
    ],
    ids=["one", "eight", "experts"],
)
def test_exact_runs_resumed_in_other_layouts_are_bitwise_equal(
    trained: dict[str, Any], layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    steps, trained = len(layouts) + 1, RESUMED | trained
    whole = bits(exact(tmp_path, **trained, steps=steps), steps)
    for step, layout in enumerate(layouts, 2):
        config = exact(tmp_path, **trained, steps=step, **layout)
        moved = bits(replace(config, run_dir=str(tmp_path / "moved")), step)
    assert moved == whole


def test_a_schedule_that_needs_more_microbatches_is_given_smaller_grains() -> None:
    config = tiny(pp=2, schedule="dualpipev", numerics=Numerics("exact", 8))
    schedule = replace(config.schedule, microbatches=None)
    (problem,) = preflight(replace(config, schedule=schedule))
    assert (problem.key, problem.fix) == ("numerics.grain", "numerics.grain=4")


class Products(nn.Module):
    """Experts that say nothing of their rows."""

    sorted_by_expert = True

    def __init__(self, experts: int, top_k: int, dim: int, _: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts, top_k
        self.weight = nn.Parameter(torch.empty(experts, dim, dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        return expert_linear(tokens, self.weight, counts)


def test_experts_that_are_not_bitwise_reproducible_are_refused() -> None:
    def refused(model: Any) -> list[tuple[str, str]]:
        found = preflight(tiny(dp=2, ep=2, model=model, numerics=Numerics("exact")))
        return [(problem.reason, problem.fix) for problem in found]

    assert refused(moe()) == []
    ((reason, fix),) = refused(moe(moe_intermediate_size=33))
    assert "model.layers.0.mlp.experts has rows of 33 elements" in reason and fix == "ep=1"
    real = moe_model.RoutedMLP.forward
    with patch.object(moe_model.RoutedMLP, "forward", lambda self, x: F.dropout(real(self, x))):
        ((reason, fix),) = refused(moe())
    assert "model.layers.0.mlp.experts is in draws random numbers" in reason and fix == "ep=1"
    with patch.object(moe_model, "Experts", Products):
        ((reason, fix),) = refused(moe())
    assert "independent_rows" in reason and fix == "ep=1"


def test_a_resume_with_other_grains_is_refused(tmp_path: Path) -> None:
    first = exact(tmp_path, steps=1)
    assert saved_runs.train_all(first) == [""]
    for numerics, key in (
        (Numerics("exact", 2), "numerics.grain=2: .*write numerics.grain=1"),
        (Numerics(), "numerics=fast: .*write numerics=exact"),
    ):
        schedule = replace(first.schedule, microbatches=None)
        config = replace(first, steps=2, numerics=numerics, schedule=schedule)
        (told,) = saved_runs.train_all(config)
        assert re.search(key, told), told


def test_settings_that_are_not_exact_are_refused() -> None:
    wrong = {
        "tp": {"tp": 2},
        "cp": {"cp": 2},
        "compile": {"compile": True},
        "precision": {"precision": Float8Precision()},
        "mixes_samples": {"mixes_samples": True},
        "batch_size": {"seq_len": 2**21},
        "numerics.grain": {"numerics": Numerics("exact", grain=5)},
    }
    for key, changes in wrong.items():
        config = replace(tiny(), numerics=Numerics("exact"))
        (problem,) = problems(replace(config, **changes))
        assert problem.key == key and problem.fix


# --- verify ---------------------------------------------------------------------------------------


def scaled(give: Any) -> Any:
    """Gradients are 0.2% too large."""
    return lambda self, part, *more: give(self, part * 1.002, *more)


def flipped(forward_backward: Any) -> Any:
    """The lowest bit of one element of a gradient is another one."""

    def flipping(run: Run, config: Config, step: int, stream: Any) -> Any:
        gradients = forward_backward(run, config, step, stream)
        if step == 2 and _of_second_rank():
            named = dict(run.stage_states[0].parameters())
            rows = named["model.norm.weight"].grad.to_local()
            rows.view(torch.int32)[3] ^= 1
        return gradients

    return flipping


def off_at_the_loss(backward: Any) -> Any:
    """What the backward begins with is 0.05% too large."""

    def beginning(self: Any, kind: str, kwargs: dict[str, Any], last: bool) -> Any:
        if self.is_last and _of_second_rank():
            kwargs["output_grads"] = torch.tensor(1.0005)
        return backward(self, kind, kwargs, last)

    return beginning


def elsewhere(mine: Any) -> Any:
    """Two microbatches stand in each other's place. Fp32 alone rounds a sum of so few."""
    places = {1: 2, 2: 1}
    return lambda self, at: mine(self, places.get(at, at) if _of_second_rank() else at)


def other_eps(optimizer_step: Any) -> Any:
    """A rank updates its shards with another eps."""

    def stepping(run: Run, *more: Any) -> Any:
        for group in _groups(run) if _of_second_rank() else ():
            group["eps"] = 2e-8
        return optimizer_step(run, *more)

    return stepping


def other_clip(optimizer_step: Any) -> Any:
    """A rank clips by another norm."""

    def stepping(run: Run, config: Config, step: int, norm: Tensor) -> Any:
        norm = norm * 1.01 if _of_second_rank() else norm
        return optimizer_step(run, config, step, norm)

    return stepping


def other_lr(set_lr: Any) -> Any:
    """A stage's learning rate is one fp32 number further."""

    def setting(optimizers: Any, *more: Any) -> None:
        set_lr(optimizers, *more)
        for group in _groups(optimizers) if _of_second_rank() else ():
            group["lr"] *= 1 + 2**-23

    return setting


def rounded(forward: Any) -> Any:
    """A stage's inputs lack their last bit."""

    def computing(self: Any, x: Tensor, *more: Any, **kwargs: Any) -> Any:
        if not self.is_first:
            with torch.no_grad():
                x.view(torch.int16).bitwise_and_(-2)
        return forward(self, x, *more, **kwargs)

    return computing


def _of_second_rank() -> bool:
    """In a layout, not in the process that it is compared with."""
    return dist.get_world_size() > 1 and dist.get_rank() == 1


def _groups(owner: Any) -> list[Any]:
    if isinstance(owner, Run):
        owner = [optimizer for state in owner.stage_states for optimizer in state.optimizers]
    return [group for optimizer in owner for group in optimizer.param_groups]


# each smaller than the rounding of bf16: where it is planted, what is said of it
FAULTS: dict[str, list[tuple[Any, str, Callable[[Any], Any], str]]] = {
    "dp=2 ep=2": [
        (ShardedGradients, "give", scaled, r"step 1: gradient of model.embed_tokens.weight\["),
        (exact_proof, "forward_backward", flipped, r"step 2: gradient of model.norm.weight\[19\]"),
        (_Stage, "_backward", off_at_the_loss, "step 1: gradient of "),
        (Grains, "mine", elsewhere, "step 1: gradient of "),
        (exact_proof, "optimizer_step", other_eps, "step 1: weight of "),
        (exact_proof, "optimizer_step", other_clip, "step 1: weight of "),
    ],
    "pp=2": [
        (_Stage, "_backward", off_at_the_loss, "step 1: gradient of "),
        (PipelineStage, "forward_maybe_with_nosync", rounded, "step 1: gradient of "),
        (steps, "set_lr", other_lr, r"step 1: weight of model.layers.2\."),
    ],
}


def differences(config: Config, worker: Worker, layout: str) -> list[str]:
    """What verify says of the layout as it is, and with each fault."""
    data, found = open_data(config), []
    for number, fault in enumerate([None, *FAULTS[layout]]):
        store = worker.store and dist.PrefixStore(f"{number}", worker.store)
        c = config
        with ExitStack() as planted:
            if fault is not None:
                place, name, change, _ = fault
                c = replace(config, precision=Precision()) if change is elsewhere else config
                planted.enter_context(patch.object(place, name, change(getattr(place, name))))
            difference = first_difference(c, data, replace(worker, store=store))
        found.append("" if difference is None else str(difference))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp=2", *slow("dp=2 ep=2", marks=GRID)])
def test_verify_names_the_first_bit_that_differs(layout: str, tmp_path: Path) -> None:
    mesh = {"dp": 2, "ep": 2, **MOE} if layout == "dp=2 ep=2" else {"pp": 2}
    more = {"optimizer": AdamW(clip=0.1), "precision": BF16, "verify": Verify(steps=2)}
    config = exact(tmp_path, **mesh, **more)
    right, *wrong = run_world(differences, config, tmp_path / "run", layout, timeout=240)[0]
    assert right == ""
    for said, (_, _, change, expected) in zip(wrong, FAULTS[layout], strict=True):
        assert re.match(expected, said), (change.__name__, said)


def test_a_digest_copies_no_number_to_the_device() -> None:
    """Which would wait for the device, for each million of elements."""
    with patch.object(torch, "tensor", side_effect=AssertionError("waits for the device")):
        one, other = (digest_of("w", x, x.shape, (0, 0)) for x in torch.eye(4).split(2))
    assert one != other
