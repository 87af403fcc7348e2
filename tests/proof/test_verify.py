"""verify compares all there is of a layout, and forgives nothing but rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cells import cells
from support.families import moe
from support.models import tiny
from support.proven import assert_proven
from support.world import run_world
from titanlike.core.config.groups.computation import ActivationCheckpoint
from titanlike.core.config.groups.data import SyntheticData, TextData
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import StageState
from titanlike.core.launch.worker import Worker
from titanlike.core.models.llama import Attention, Llama
from titanlike.core.pipeline.pipeline import Pipeline
from titanlike.proof import verification
from titanlike.proof.comparison import Comparison, compare, merge, reliable
from titanlike.proof.verification import compare_with_one_process


class Normed(Llama):
    """Queries and keys are normalized, each head by itself."""

    def __init__(self, *, vocab_size: int, **more: Any) -> None:
        super().__init__(vocab_size=vocab_size, hidden_size=32, num_attention_heads=4, **more)
        for block in self.model.layers:
            block.self_attn = Attention(32, 4, 2, qk_norm_eps=1e-5)

    def initial(self, name: str) -> tuple[float, float]:
        # not 1 alone: a norm's gradient is then not the same for all heads
        return (1.0, 0.2) if "norm" in name else super().initial(name)

    def tp_plan(self) -> dict[str, Any]:
        return super().tp_plan() | {"model.layers.*.self_attn.[qk]_norm": "replicate_sum"}


# --- one comparison ----------------------------------------------------------------------------

DRAW = torch.Generator().manual_seed(0)
RIGHT = torch.randn(1000, generator=DRAW)
SMALL, UPDATE = 1e-4 * RIGHT, 1e-3 * torch.randn(1000, generator=DRAW)
NOISE = [0.01 * torch.randn(1000, generator=DRAW) * RIGHT.abs() for _ in range(2)]  # of bf16
SHRUNK = 0.96 * RIGHT  # as float8 makes a gradient in one process, too


def with_first(value: float, tensor: Tensor = RIGHT) -> Tensor:
    return torch.cat([torch.tensor([value]), tensor[1:]])


def update(mine: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """Of parameters, which are large beside it."""
    return {"mine": RIGHT + mine, "reference": RIGHT + UPDATE, "base": RIGHT, "mask": mask}


NOT_FIRST = with_first(0.0, torch.ones(1000)).bool()
ONE = torch.ones(1, dtype=torch.float64)
AGREES: dict[str, tuple[str, dict[str, Any]]] = {
    "the same weights": ("initial", {"mine": RIGHT}),
    "a loss but for rounding": ("loss", {"mine": ONE + 1e-7, "reference": ONE}),
    "a gradient but for rounding": ("gradient", {"mine": RIGHT * (1 + 1e-7)}),
    "a true gradient of zero": ("gradient", {"mine": 1e-10 * RIGHT, "reference": 0 * RIGHT}),
    "an update but for rounding": ("update", update(UPDATE * 1.0001)),
    "an element whose sign is rounding": ("update", update(with_first(1.0, UPDATE), NOT_FIRST)),
    "bf16": ("gradient", {"mine": RIGHT + NOISE[0], "in_bf16": RIGHT + NOISE[1]}),
    "float8, smaller": ("gradient", {"mine": SHRUNK + NOISE[0], "in_bf16": SHRUNK + NOISE[1]}),
}
DIFFERS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights in their last digit": ("initial", {"mine": RIGHT * (1 + 2**-22)}),
    "a loss in its sixth digit": ("loss", {"mine": ONE + 1e-5, "reference": ONE}),
    "one element of a gradient": ("gradient", {"mine": with_first(RIGHT[0].item() + 1e-4)}),
    "a small gradient by 1%": ("gradient", {"mine": 1.01 * SMALL, "reference": SMALL}),
    "a missing gradient": ("gradient", {"mine": None}),
    "a NaN": ("gradient", {"mine": with_first(math.nan)}),
    "a gradient where none should be": ("gradient", {"mine": 1e-5 * RIGHT, "reference": 0 * RIGHT}),
    "an update by 1%": ("update", update(UPDATE * 1.01)),
    "an element that is compared": ("update", update(with_first(1.0, UPDATE), ~NOT_FIRST)),
    "an optimizer's state by 0.1%": ("state", {"mine": 1.001 * SMALL, "reference": SMALL}),
    "a buffer by 0.1%": ("buffer", {"mine": 1.001 * RIGHT}),
    "bf16 that is 2% too large": ("gradient", {"mine": 1.02 * RIGHT, "in_bf16": RIGHT + NOISE[1]}),
    "float8 that is 2% too small": ("gradient", {"mine": 0.98 * SHRUNK, "in_bf16": SHRUNK}),
    "bf16 of others": ("gradient", {"mine": RIGHT.flip(0), "in_bf16": RIGHT + NOISE[1]}),
}


def compared(kind: str, given: dict[str, Any]) -> Comparison:
    more = {"reference": RIGHT} | given
    return compare(kind, "x", more.pop("mine"), more.pop("reference"), **more)


@pytest.mark.parametrize("name", AGREES)
def test_rounding_differences_are_accepted(name: str) -> None:
    """What is as large as the value itself, but next to nothing, is told as such."""
    row = compared(*AGREES[name])
    assert row.agrees
    assert row.verdict == ("below 1e-09" if name == "a true gradient of zero" else "ok")


@pytest.mark.parametrize("case", DIFFERS.values(), ids=DIFFERS.keys())
def test_larger_differences_than_rounding_fail(case: tuple[str, dict[str, Any]]) -> None:
    """Also where another rank's part is right."""
    row = compared(*case)
    assert not row.agrees
    zeros = torch.zeros(10)
    nothing = dict.fromkeys(("base", "mask")) | dict.fromkeys(("mine", "reference"), zeros)
    nothing |= {"in_bf16": zeros} if "in_bf16" in case[1] else {}
    right = compared(row.kind, nothing)
    (both,) = merge([[row], [right]])
    assert not both.agrees and both.elements == row.elements + 10


def test_only_a_difference_that_rounding_explains_is_explained() -> None:
    row = compared("update", update(UPDATE * 1.01))
    assert row.explain(row.squared).agrees
    assert not row.explain(row.squared / 100).agrees
    assert not compared("gradient", {"mine": with_first(math.nan)}).explain(math.inf).agrees
    # in bf16 it adds to what one process differs by
    row = compared("gradient", {"mine": RIGHT + 5 * NOISE[0], "in_bf16": RIGHT + NOISE[1]})
    assert not row.agrees and row.explain(row.squared).verdict == "rounding"
    assert not row.explain(row.squared / 100).agrees


def test_a_sign_is_compared_unless_it_is_rounding() -> None:
    gradient = torch.tensor([1.0, 0.5, 1e-5, 0.0])
    assert reliable(gradient, "fp32").tolist() == [True, True, False, True]


# --- all of a layout ---------------------------------------------------------------------------


def verified(
    config: Config, worker: Worker, break_it: Callable[[Worker], None]
) -> tuple[int, set[tuple[str, str]], list[str]]:
    """Exit code; (kind, name) of all that was compared; what was not compared in full."""
    break_it(worker)
    found = compare_with_one_process(config, worker)
    return int(not found.agrees), {(row.kind, row.name) for row in found.rows}, found.missing


def sound(worker: Worker) -> None:
    """As it is."""


def unseen(worker: Worker) -> None:
    """One parameter of one rank is neither compared nor trained."""
    right = StageState.parameters
    left_out = "lm_head.weight" if worker.rank else ""
    StageState.parameters = lambda self: (p for p in right(self) if p[0] != left_out)


def test_all_of_a_model_is_compared_on_every_rank(tmp_path: Path) -> None:
    config = tiny(dp=2, layers=1, optimizer=AdamW(clip=None))
    block = (
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
    )
    block += ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    parameters = [f"model.layers.0.{name}.weight" for name in block]
    parameters += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    of_losses = [*(f"loss of step {step}" for step in (1, 2, 3)), "loss after the last step"]
    expected = {("loss", name) for name in (*of_losses, "validation loss")}
    expected |= {("norm", f"gradient norm of step {step}") for step in (1, 2, 3)}
    expected |= {("rate", f"learning rate of step {step}") for step in (1, 2, 3)}
    promised = ["loss of step 1 beside F.cross_entropy"]
    expected |= {("promise", name) for name in promised}
    for kind in ("initial", "gradient", "update"):
        expected |= {(kind, name) for name in parameters}
    for key in ("step", "exp_avg", "sqrt(exp_avg_sq)"):
        expected |= {("state", f"{name} {key}") for name in parameters}
    code, found, missing = run_world(verified, config, tmp_path, sound)[0]
    assert (code, missing) == (0, [])
    assert found == expected, found ^ expected
    code, _, missing = run_world(verified, config, tmp_path, unseen)[0]
    assert code == 1 and missing == ["lm_head.weight: 1024 of 2048 elements are in a stage"]


def as_a_gpu(worker: Worker) -> None:
    """Rounding depends on how many samples a layer gets."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * (1 + 1e-4 * math.sin(x.shape[0]))

    nn.Linear.forward = forward
    verification.is_accelerator = lambda device: True


def with_a_wrong_gradient(worker: Worker) -> None:
    as_a_gpu(worker)
    right = Pipeline.forward_backward

    def train(self: Pipeline, batch: dict[str, Tensor], *options: Any) -> Any:
        result = right(self, batch, *options)
        self._stages[0].get_parameter("model.layers.0.mlp.up_proj.weight").grad.mul_(1.01)
        return result

    Pipeline.forward_backward = train


def test_kernels_that_round_by_sizes_fail_no_layout_on_a_gpu(tmp_path: Path) -> None:
    config = tiny(dp=2, layers=2, schedule=Schedule("1f1b", 2), optimizer=Sgd())
    for break_it, code in ((as_a_gpu, 0), (with_a_wrong_gradient, 1)):
        assert run_world(verified, config, tmp_path / str(code), break_it)[0][0] == code


NORMED = Model(
    f"{__name__}.Normed",
    {"vocab_size": None, "num_hidden_layers": 2, "tie_word_embeddings": True},
)
RECOMPUTED = ActivationCheckpoint("full")
UNEVEN = Custom("support.data.uneven", {"vocab_size": 64})
CLIPPED = {"layers": 2, "optimizer": Sgd(clip=0.01)}
LAYOUTS = {
    "tp=2, heads normed, a tied head": tiny(
        tp=2, model=NORMED, **CLIPPED, data=SyntheticData(vocab_size=97)
    ),
    "cp=2, documents, recomputed": tiny(
        cp=2, context_parallel="gather", data=TextData(documents=True), layers=2,
        activation_checkpoint=RECOMPUTED,
    ),
    "ep=2": tiny(dp=2, ep=2, model=moe()),
    "dp=2, microbatches, uneven numbers of tokens": tiny(
        dp=2, schedule=Schedule("1f1b", 4), data=UNEVEN, **CLIPPED
    ),
}  # fmt: skip


@pytest.mark.parametrize("config", cells(LAYOUTS, {}, most=2))
def test_verify_accepts_correct_layouts(config: Config, tmp_path: Path) -> None:
    """In which each of the faults of `tests/faults/proof.yaml` shows."""
    assert_proven(config, tmp_path)
