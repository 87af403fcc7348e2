"""A layout that fails verify is told where: the first wrong tensor, what is wrong in it, and the
dimension of the layout that does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from support.families import hf, moe
from support.models import tiny
from support.opened import opened
from support.world import run_world
from titanlike.core.config import files
from titanlike.core.config.groups.computation import ActivationCheckpoint, Fsdp, Numerics, Precision
from titanlike.core.config.groups.data import TextData
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.models import llama
from titanlike.core.optim import optimizer
from titanlike.core.pipeline.pipeline import Pipeline
from titanlike.core.torch_private.dtensor import local
from titanlike.core.torch_private.pipeline_stage import _Stage
from titanlike.core.training import step
from titanlike.core.training.build import Run
from titanlike.proof import recorder
from titanlike.proof.comparison import compare
from titanlike.proof.localization import Attempts, first_place
from titanlike.proof.recorder import Recorder
from titanlike.proof.verification import Verdict
from titanlike.proof.verify import verify
from titanlike.techniques.cp import context_attention
from titanlike.techniques.tp import styles


def located(config: Config, worker: Worker, name: str) -> dict[str, Any]:
    FAULTS[name][1]()
    return verify(config, worker)


def recorded(config: Config, worker: Worker) -> tuple[Verdict | None, int]:
    """As a layout that fails is; (what is found, compared tensors)."""
    recorder, attempts = Recorder(), Attempts(config, worker)
    attempts.prepare(config, Recorder())
    return attempts.run(config, recorder), recorder.compared_tensors


def gradients(change: Callable[[Any, str, Tensor], object]) -> Callable[[], None]:
    """Plants change(mesh, parameter, its gradient) after each backward."""

    def plant() -> None:
        right = Pipeline.forward_backward

        def train(self: Pipeline, batch: dict[str, Tensor], *options: Any) -> Any:
            result = right(self, batch, *options)
            for stage in self._stages.values():
                for name, parameter in stage.named_parameters():
                    change(self._mesh, name, local(parameter.grad))
            return result

        Pipeline.forward_backward = train

    return plant


def replaced(place: Any, name: str, change: Callable[[Any], Any]) -> Callable[[], None]:
    return lambda: setattr(place, name, change(getattr(place, name)))


def other_collective(wrong: tuple[str, str], forward: str, backward: str) -> Any:
    """Those of `wrong` (forward, backward) are these."""
    return lambda right: (
        lambda x, ranks, *kinds: right(
            x, ranks, *((forward, backward) if kinds[:2] == wrong else kinds[:2]), *kinds[2:]
        )
    )


def off_at_the_loss(backward: Any) -> Any:
    """What the backward of a microbatch begins with is 0.05% too large on one rank."""

    def beginning(self: Any, kind: str, kwargs: dict[str, Any], last: bool) -> Any:
        if self.is_last and dist.get_world_size() > 1 and dist.get_rank() == 1 and last:
            kwargs["output_grads"] = torch.tensor(1.0005)
        return backward(self, kind, kwargs, last)

    return beginning


def other_norm(optimizer_step: Any) -> Any:
    def stepping(run: Any, config: Config, number: int, norm: Tensor, *more: Any) -> Any:
        return optimizer_step(run, config, number, norm * run.mesh.dp, *more)

    return stepping


def of_several(wrong: Callable[..., Any]) -> Callable[[Any], Any]:
    """wrong(the right function, its arguments) where there are several ranks."""

    def change(right: Any) -> Any:
        def computing(*args: Any, **kwargs: Any) -> Any:
            several = dist.is_initialized() and dist.get_world_size() > 1
            return wrong(right, *args, **kwargs) if several else right(*args, **kwargs)

        return computing

    return change


def late_rate(right: Any, config: Config, number: float) -> float:
    return right(config, number) * (2 if number > 1 else 1)


def recorded_twice(right: Any, run: Any, config: Any, pending: Any, numbers: Any) -> Any:
    return right(run, config, pending, numbers) | {"grad_norm": 2 * numbers["grad_norm"]}


def decayed(right: Any, optimizers: Any, config: Config, number: int) -> None:
    right(optimizers, config, number)
    for group in (group for each in optimizers for group in each.param_groups):
        group["weight_decay"] = 0.5


def one_rank_late(right: Any, optimizer: Any, *options: Any) -> None:
    """The second rank leaves out an update."""
    if dist.get_rank() == 0:
        right(optimizer, *options)


def counted_twice(run: Any) -> Tensor | None:
    assert run.mesh.layer_ranks > 1, "of this layout alone"
    return None


def without_the_second(backward: Any) -> Any:
    def beginning(self: Any, kind: str, kwargs: dict[str, Any], last: bool) -> Any:
        if self.is_last and dist.get_world_size() == 4 and last:
            kwargs["output_grads"] = torch.tensor(0.0)
        return backward(self, kind, kwargs, last)

    return beginning


def last_token(forward: Any) -> Any:
    """The MLP of a part of tp leaves out the last token of the sequence."""

    def computing(self: Any, x: Tensor) -> Tensor:
        y = forward(self, x)
        if dist.is_initialized() and dist.get_world_size() > 1:
            y = torch.cat([y[:, :-1], torch.zeros_like(y[:, -1:])], 1)
        return y

    return computing


def another_head(forward: Any) -> Any:
    """A rank's second head of the keys is negative."""

    def computing(self: Any, x: Tensor) -> Tensor:
        y = forward(self, x)
        if self.out_features == 16 and dist.is_initialized() and dist.get_world_size() > 1:
            sign = torch.ones(16)
            sign[8:] = -1
            y = y * sign
        return y

    return computing


def table(cases: dict[str, Any], *default: str) -> Any:
    slow = pytest.mark.slow
    return [pytest.param(c, id=n, marks=() if n in default else slow) for n, c in cases.items()]


def rounded(forward: Any) -> Any:
    """What the second stage receives lacks its last bit."""

    def computing(self: Any, x: Tensor, *more: Any, **kwargs: Any) -> Any:
        if not self.is_first:
            with torch.no_grad():
                x.view(torch.int32).bitwise_and_(-2)
        return forward(self, x, *more, **kwargs)

    return computing


TWO = Schedule("1f1b", 2)
BF16 = {"precision": Precision("bf16"), "layers": 2}
CLIPPED = {"optimizer": Sgd(clip=0.01), "layers": 2}
FAULTS: dict[str, tuple[Config, Callable[[], None], list[str], str]] = {
    "summed over dp": (
        tiny(dp=2, pp=2, layers=2, schedule=TWO),
        gradients(lambda mesh, name, g: g.mul_(mesh.dp)),
        ["2 times: summed instead of averaged over dp", "what is done to gradients"],
        "fails with dp=2 alone; passes without it",
    ),
    "a divisor of 1.002 in bf16": (
        tiny(dp=2, **BF16),
        gradients(lambda mesh, name, g: g.mul_(1.002) if mesh.dp > 1 else g),
        ["1.002 times", "what is done to gradients"],
        "fails with dp=2 alone; passes without it",
    ),
    "0.05% of a chunk of the loss in bf16": (
        tiny(dp=2, schedule=TWO, loss=ChunkedCrossEntropy(), **BF16),
        replaced(_Stage, "_backward", off_at_the_loss),
        ["gradient of the output of model.norm", "rank 1, microbatch 3", "1.0005 times"],
        "fails with dp=2 alone; passes without it",
    ),
    "one parameter's sign on a rank": (
        tiny(dp=2, cp=2, layers=2),
        gradients(lambda mesh, name, g: g.neg_() if "up_proj" in name and mesh.cp_rank else g),
        ["gradient of model.layers.1.mlp.up_proj.weight", "rank 1: -1 times: the sign"],
        "fails with cp=2 alone; passes without it",
    ),
    "gradients of divided layers are not summed": (
        tiny(tp=2, dp=2, layers=2, tp_sequence=False),
        replaced(
            styles,
            "autograd_collective",
            other_collective(("identity", "all_reduce"), "identity", "identity"),
        ),
        ["gradient of the output of model.norm", "a part of a sum over ranks; none sums it"],
        "fails with tp=2 alone; passes without it",
    ),
    "keys get the gradient of a rank's own queries": (
        tiny(cp=2, dp=2, layers=2, context_parallel="gather"),
        replaced(
            context_attention,
            "autograd_collective",
            other_collective(("all_gather", "reduce_scatter"), "all_gather", "split"),
        ),
        ["gradient of the output of model.layers.1.self_attn"],
        "fails with cp=2 alone; passes without it",
    ),
    "the norm by which a rank clips": (
        tiny(dp=2, pp=2, schedule=TWO, **CLIPPED),
        replaced(step, "optimizer_step", other_norm),
        ["update of ", "the optimizer gets gradients 0.", "clipped by another norm"],
        "fails with dp=2 alone; passes without it",
    ),
    "the last token": (
        tiny(tp=2, pp=2, layers=2, tp_sequence=False),
        replaced(llama.MLP, "forward", last_token),
        ["output of model.layers.0.mlp", "only token 15 of 16 (the last): zeros"],
        "fails with tp=2 alone; passes without it",
    ),
    "a norm counts twice, and in one process fails": (
        tiny(tp=2, **CLIPPED),
        lambda: setattr(Run, "shares", property(counted_twice)),
        ["gradient norm"],
        "fails with tp=2 alone",
    ),
    "gradients are left for the next step": (
        tiny(dp=2, layers=2),
        replaced(step, "drop_gradients", of_several(lambda right, run: None)),
        ["in step 2: in what is done to gradients", "gradient of lm_head.weight"],
        "fails with dp=2 alone; passes without it",
    ),
    "a learning rate of a later step": (
        tiny(dp=2, pp=2, layers=2, schedule=TWO),
        replaced(optimizer, "_factor", of_several(late_rate)),
        ["in step 2: learning rate of step 2", "2 times"],
        "fails with dp=2 alone; passes without it",
    ),
    "a recorded norm": (
        tiny(dp=2, layers=2),
        replaced(step, "step_record", of_several(recorded_twice)),
        ["gradient norm of step 1", "2 times: summed instead of averaged over dp"],
        "fails with dp=2 alone; passes without it",
    ),
    "not clipped": (
        tiny(dp=2, **CLIPPED),
        replaced(step, "clip_divisor", of_several(lambda right, norm, limit: torch.ones(()))),
        ["update of ", "the optimizer gets gradients", "not clipped (optimizer.clip=0.01)"],
        "fails with dp=2 alone; passes without it",
    ),
    "decayed": (
        tiny(dp=2, layers=2, optimizer=Sgd(weight_decay=0.0)),
        replaced(step, "set_lr", of_several(decayed)),
        ["update of ", "weight decay"],
        "fails with dp=2 alone; passes without it",
    ),
    "a rank's update": (
        tiny(dp=2, layers=2),
        replaced(step, "step_unless", of_several(one_rank_late)),
        ["update of ", "rank 1: zeros"],
        "fails with dp=2 alone; passes without it",
    ),
    "a microbatch is forgotten": (
        tiny(dp=2, pp=2, layers=2, schedule=TWO),
        replaced(_Stage, "_backward", without_the_second),
        ["gradient of the output of", "microbatch 1, 3 of the global batch: zeros"],
        "fails with pp=2 dp=2 alone; passes without any of them",
    ),
    "one bit": (
        tiny(pp=2, layers=2, numerics=Numerics("exact", grain=8)),
        replaced(PipelineStage, "forward_maybe_with_nosync", rounded),
        ["input of model.layers.1, by", "rank 1", "from bit 0"],
        "",
    ),
    "one head": (
        tiny(dp=2, layers=2),
        replaced(nn.Linear, "forward", another_head),
        ["output of model.layers.0.self_attn.k_proj", "8 to 15 of 16: -1 times: the sign"],
        "fails with dp=2 alone; passes without it",
    ),
}


DEFAULT = ("summed over dp",)
# of verdict.json
FIELDS: dict[str, dict[str, Any]] = {
    "summed over dp": {
        "phase": "reduction",
        "factor": 2.0,
        "cause": "summed instead of averaged over dp",
        "needed": ["dp=2"],
        "least": {"pp": 1, "cp": 1, "tp": 1, "ep": 1, "replicate": 1, "dp": 2},
    },
    "gradients are left for the next step": {"phase": "reduction", "step": 2},
    "0.05% of a chunk of the loss in bf16": {
        "phase": "gradient of the output",
        "name": "model.norm",
        "ranks": [1],
        "microbatches": [3],
        "factor": 1.0005,
    },
    "the last token": {"phase": "output", "factor": 0.0, "where": "only token 15 of 16 (the last)"},
    "one head": {"factor": -1.0, "cause": "the sign"},
}


@pytest.mark.parametrize("name", table(dict(zip(FAULTS, FAULTS, strict=True)), *DEFAULT))
def test_the_first_wrong_module_is_named(name: str, tmp_path: Path) -> None:
    config, _, texts, axis = FAULTS[name]
    result = run_world(located, config, tmp_path, name)[0]
    first = result["first_difference"]
    assert result["exit_code"] == 1
    said = "\n".join([*first["first"], first.get("operation", "")])
    assert all(text in said for text in texts), first
    assert first.get("axis", "") == axis, first
    in_file = files.read_object(tmp_path / "verdict.json")
    assert in_file["verdict"] == "FAIL" and in_file["first_difference"] == first
    for field, value in FIELDS.get(name, {}).items():
        found = first["place"] | first["differs"][0] | first
        assert found[field] == value, (field, found)
    tensors = [torch.load(path) for path in first.get("tensors", ())]
    assert all(set(pair) == {"layout", "one process"} for pair in tensors)
    assert bool(tensors) == ("ranks" in first["differs"][0] and bool(axis))


ALL = {
    "pp=2 dp=2": tiny(dp=2, pp=2, layers=2, schedule=Schedule("1f1b", 2)),
    "tp=2": tiny(tp=2, layers=2),
    "tp=2, whole": tiny(tp=2, layers=2, tp_sequence=False),
    "cp=2": tiny(cp=2, layers=2),
    "cp=2 tp=2": tiny(cp=2, tp=2, layers=2),
    "gpt2 tp=2": tiny(tp=2, layers=2, family="gpt2"),
    "dp=2 ep=2": tiny(dp=2, ep=2, model=moe()),
    "hf llama, tp=2": tiny(tp=2, model=hf("llama")),
    "bf16, tp=2": tiny(tp=2, layers=2, precision=Precision("bf16")),
    "bf16, cp=2 dp=2, ring": tiny(
        cp=2, dp=2, layers=2, context_parallel="ring", precision=Precision("bf16")
    ),
    "documents, cp=2": tiny(
        cp=2, context_parallel="gather", data=TextData(documents=True), layers=2
    ),
    "ulysses": tiny(cp=2, context_parallel="ulysses", layers=2),
    "zbvzerobubble dp=2": tiny(pp=2, dp=2, layers=4, schedule="zbvzerobubble"),
    "dualpipev": tiny(pp=2, layers=4, schedule="dualpipev"),
    "recomputed": tiny(
        dp=2, layers=2, activation_checkpoint=ActivationCheckpoint("full"), fsdp=Fsdp(3)
    ),
}


@pytest.mark.parametrize("config", table(ALL, "tp=2"))
def test_a_correct_layout_is_correct_in_every_module(config: Config, tmp_path: Path) -> None:
    found, compared = run_world(recorded, config, tmp_path)[0]
    assert found.agrees and not found.wrong, found.wrong
    assert compared > 50, compared


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.5, 2.0, torch.nan, torch.inf])
@pytest.mark.parametrize("norm", [0.0, 0.5, 3.0])
def test_whatever_is_wrong_with_updates_is_told(scale: float, norm: float) -> None:
    """Of all updates: none at all, the sign, a factor, no numbers."""
    right = torch.randn(8, generator=torch.Generator().manual_seed(0))
    rows = [compare("gradient", "weight", right, right)]
    rows += [compare("norm", "gradient norm of step 1", *[torch.tensor([norm])] * 2)]
    rows += [compare("update", "weight", scale * right, right, base=torch.zeros(8))]
    config = tiny(dp=2, optimizer=Sgd(clip=1.0))
    first = first_place(Verdict(rows, [rows, rows], 1), config)["first"]
    assert first[0].startswith("first difference: update of weight")


def exchanged(config: Config, worker: Worker) -> list[torch.dtype]:
    with opened(config, worker):
        every = recorder.gathered({"x": torch.ones(3).to(torch.float8_e4m3fn)})
        return [each["x"].dtype for each in every]


def test_ranks_exchange_results_in_float8(tmp_path: Path) -> None:
    """Which cannot be pickled: "UntypedStorage has no attribute dtype" ended localization."""
    assert run_world(exchanged, tiny(dp=2), tmp_path) == [[torch.float8_e4m3fn] * 2] * 2
