"""An optimizer and a learning-rate schedule of the user's own, by import path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.command_lines import examined
from support.commands import TINY, command
from support.models import tiny
from support.paths import ROOT
from support.proven import assert_proven
from titanlike.core.config.groups.computation import Numerics
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer
from titanlike.core.config.schema import Config
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.optim.custom import custom_optimizer, problems
from titanlike.core.optim.optimizer import learning_rate

LION = "my_models.optimizers.Lion"
SQUARE_ROOT = "my_models.optimizers.inverse_square_root"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))


class CountsInPython(torch.optim.SGD):
    """Keeps a number as state, which a checkpoint of tensors would lose."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = 1


class Normed(torch.optim.SGD):
    """Scales a stage's gradients by the norm of all of them, from some step on."""

    calls, first = 0, 1

    def step(self, closure: None = None) -> None:
        self.calls += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.calls >= self.first:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        super().step(closure)


class RowNormed(torch.optim.SGD):
    """Scales each row of a matrix's gradient by the row's norm."""

    def step(self, closure: None = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.dim() == 2:
                parameter.grad /= parameter.grad.norm(dim=1, keepdim=True)
        super().step(closure)


class NormedLater(Normed):
    first = 150


class AsksTheOthers(Normed):
    exact_on_shards = True


def negative(step: int, steps: int) -> float:
    return 1 - 2 * step / steps


def optimizer(name: str, **args: Any) -> Config:
    return Config(optimizer=CustomOptimizer(name, args))


def schedule(name: str, **args: Any) -> Config:
    return Config(lr=Custom(name, args))


@pytest.mark.parametrize(
    "config, said",
    [
        (optimizer("my_models.optimizers.Lino"), "write optimizer.name=my_models.optimizers.Lion"),
        (optimizer(LION, beta=3), "optimizer.beta=3: my_models.optimizers.Lion has no such"),
        (optimizer(LION, betas=[1]), "trying it raised ValueError: not enough values to unpack"),
        (optimizer(SQUARE_ROOT), "it takes (step: int, steps: int"),
        (optimizer("torch.optim.LBFGS"), "missing 1 required positional argument: 'closure'"),
        (optimizer("torch.optim.Muon"), "takes matrices alone, and on shards a dozen messages"),
        (optimizer("torch.nn.Linear"), "optimizer.name=torch.nn.Linear"),
        (optimizer(f"{__name__}.CountsInPython"), "keeps int 'count' as state"),
        (schedule(f"{__name__}.negative"), "returned -1.0 for step 300 of 300"),
        (schedule(SQUARE_ROOT, warmpu=3), "write lr.warmup=3"),
        (schedule(SQUARE_ROOT, warmup=0), "trying it raised ZeroDivisionError"),
        (schedule("torch.ones"), "lr.name=torch.ones"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unusable_custom_optimizer_is_refused_before_launch(config: Config, said: str) -> None:
    (problem,) = problems(config)
    assert said in str(problem)


def test_a_custom_lr_schedule_is_a_fraction_of_the_peak() -> None:
    config = Config(
        steps=400, optimizer=CustomOptimizer(LION, lr=2.0), lr=Custom(SQUARE_ROOT, {"warmup": 4})
    )
    assert [*problems(config)] == []
    assert [learning_rate(config, step) for step in (1, 4, 16, 400)] == [0.5, 2.0, 1.0, 0.2]


ADAFACTOR = "torch.optim.Adafactor"  # keeps means of rows and columns


@pytest.mark.parametrize(
    "name, layout, where, fix",
    [
        (ADAFACTOR, {"dp": 2}, "the shards of two ranks", "replicate=2"),
        (ADAFACTOR, {"dp": 4, "replicate": 2}, "the shards of two ranks", "replicate=4"),
        (ADAFACTOR, {"pp": 2, "dp": 2, "replicate": 2}, None, None),
        (ADAFACTOR, {"tp": 2}, "the parts of two tp ranks", "tp=1"),
        (f"{__name__}.RowNormed", {"dp": 2}, None, None),
        (f"{__name__}.RowNormed", {"tp": 2}, "the parts of two tp ranks", "tp=1"),
        (f"{__name__}.Normed", {"pp": 2}, "two stages", "pp=1"),
        (f"{__name__}.NormedLater", {"dp": 2}, "the shards of two ranks", "replicate=2"),
        (f"{__name__}.Normed", {"dp": 2, "replicate": 2}, None, None),
        (f"{__name__}.AsksTheOthers", {"pp": 2, "dp": 2}, None, None),
        (LION, {"pp": 2, "dp": 2, "tp": 2}, None, None),
        ("torch.optim.NAdam", {"pp": 2, "dp": 2}, None, None),
    ],
)
def test_a_non_elementwise_optimizer_is_refused_on_sharded_parameters(
    name: str, layout: dict, where: str | None, fix: str | None
) -> None:
    config = Config(**layout, optimizer=CustomOptimizer(name, lr=1e-9))
    in_layers = "tp=1" if config.tp > 1 else ""
    found = [*problems(config, in_layers)]
    if where is None:
        assert found == []
        return
    (problem,) = found
    assert f"is not elementwise: it updates a model in {where} otherwise" in problem.reason
    assert problem.fix == fix
    meant = CustomOptimizer(name, lr=1e-9, exact_on_shards=True)
    assert "optimizer.exact_on_shards=true" in problem.reason
    assert [*problems(replace(config, optimizer=meant), in_layers)] == []


def test_with_exact_numerics_an_optimizer_must_be_elementwise_in_every_layout() -> None:
    def refused(name: str, **layout: Any) -> list[tuple[str, str]]:
        config = Config(
            numerics=Numerics("exact"), optimizer=CustomOptimizer(name, lr=1e-9), **layout
        )
        return [(problem.reason, problem.fix) for problem in problems(config)]

    assert refused(LION) == refused("torch.optim.NAdam", pp=2, dp=2) == []
    ((reason, fix),) = refused(f"{__name__}.Normed")
    assert reason.endswith("updates a model in the shards of two ranks otherwise than a whole one")
    assert fix == "optimizer=adamw or numerics=fast"
    ((reason, fix),) = refused(f"{__name__}.AsksTheOthers")
    assert "asks other ranks" in reason and fix == "optimizer=adamw or numerics=fast"


@pytest.mark.parametrize("name", ["torch.optim.Adam", "torch.optim.SGD"])
def test_with_exact_numerics_an_elements_bits_do_not_depend_on_where_a_shard_ends(
    name: str,
) -> None:
    """torch's fused ones compute the last elements of a tensor by other instructions."""
    args = {"fused": True, "weight_decay": 0.1} | ({"momentum": 0.9} if "SGD" in name else {})
    torch.manual_seed(0)
    weight, gradients = torch.randn(37, 7), torch.randn(40, 37, 7)

    def trained(*cuts: int) -> tuple[Tensor, Tensor]:
        parts, states = [], []
        for rows in map(slice, (0, *cuts), (*cuts, 37)):
            part = nn.Parameter(weight[rows].clone())
            optimizer = custom_optimizer(
                CustomOptimizer(name, args, lr=0.01), [part], [], exact=True
            )
            for gradient in gradients:
                part.grad = gradient[rows].clone()
                optimizer.step()
            assert optimizer.param_groups[0]["params"] == [part]
            like = [s for s in optimizer.state[part].values() if s.shape == part.shape]
            assert len(like) == (1 if "SGD" in name else 2)
            parts.append(part.detach())
            states.append(like[0])
        return torch.cat(parts), torch.cat(states)

    (whole, state), *others = trained(), trained(19), trained(13, 26)
    for other, its_state in others:
        assert torch.equal(other, whole) and torch.equal(its_state, state)


def test_probing_an_optimizer_leaves_the_rng_state_unchanged() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert [*problems(Config(pp=2, dp=2, optimizer=CustomOptimizer(LION)))] == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_an_elementwise_optimizer_in_a_layout_matches_one_process(tmp_path: Path) -> None:
    choice = CustomOptimizer(LION, {"weight_decay": 0.1}, lr=1e-3)
    assert_proven(tiny(2, 2, optimizer=choice, lr=Custom(SQUARE_ROOT, {"warmup": 2})), tmp_path)


@pytest.mark.slow
def test_a_run_with_a_custom_optimizer_resumes_bitwise(tmp_path: Path) -> None:
    own = [f"optimizer.name={LION}", "optimizer.weight_decay=0.1", f"lr.name={SQUARE_ROOT}"]
    words = [*TINY, *own, "lr.warmup=2", "data=synthetic", "checkpoint.last=true"]
    for run, more in (("whole", []), ("parts", ["steps=3"]), ("parts", [])):
        assert command(*words, f"run_dir={run}", *more, cwd=tmp_path).returncode == 0
    whole, parts = (read_jsonl(tmp_path / run / "metrics.jsonl") for run in ("whole", "parts"))
    assert whole[-1]["loss"] == parts[-1]["loss"]


GROUPS = ("data", "loss", "schedule", "optimizer", "lr", "model")


@pytest.mark.parametrize("chosen", [False, True])
def test_custom_code_is_named_by_import_path(chosen: bool) -> None:
    """The arguments are keys of the group; the keys of the default choice are not passed."""
    words = [f"{group}=own" for group in GROUPS] if chosen else []
    words += [f"{group}.{word}" for group in GROUPS for word in ("name=my.code", "width=3")]
    checked = examined(*words)
    assert checked.problems == []
    for group in GROUPS:
        found = getattr(checked.config, group)
        assert (found.name, found.args) == ("my.code", {"width": 3})


def test_vectors_are_not_decayed() -> None:
    """Norms and biases, where an optimizer has weight_decay among its arguments."""
    for args, decays in (({"weight_decay": 0.5}, [0.5, 0.0]), ({}, [1e-2])):
        matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
        choice = CustomOptimizer("torch.optim.AdamW", args, lr=0.1)
        groups = custom_optimizer(choice, [matrix], [vector]).param_groups
        assert [group["weight_decay"] for group in groups] == decays


@pytest.mark.slow
def test_torchaos_optimizer_is_ones_own_as_the_docs_say(tmp_path: Path) -> None:
    """Its state takes a byte a mean, and its lr is a tensor."""
    words = *TINY, "steps=2", "optimizer.name=torchao.optim.AdamW8bit"
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
