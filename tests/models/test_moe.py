"""A mixture of experts: the published models by their sizes, routing, and products by expert."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from support.cells import slow
from support.command_lines import examined
from support.hf_tiny import model_of, own, sizes
from support.models import tiny
from titanlike.core.config.groups.user_code import Model
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.training.preflight import preflight
from titanlike.planning.costs.node_costs import EXPERTS_PRODUCT
from titanlike.techniques.activation_checkpoint import PRODUCTS
from titanlike.techniques.mixture import experts
from titanlike.techniques.mixture.experts import EXPERT_LINEAR, expert_linear, runs_grouped
from titanlike.techniques.mixture.moe import RoutedMLP, Routing

# --- the published models ------------------------------------------------------------------------

PUBLISHED = {  # parameters; those of a token, without the embedding
    "mixtral_8x7b": (46_702_792_704, 12.75e9),
    "qwen3_30b_a3b": (30_532_122_624, 3.04e9),
    "qwen3_235b_a22b": (235_093_634_560, 21.6e9),
    "gpt_oss_120b": (116_829_156_672, 5.13e9),
    "deepseek_v3": (671_026_404_352, 36.6e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_number_of_parameters(name: str) -> None:
    checked = examined(f"model={name}")
    assert checked.config is not None
    model = build_model(resolve_model(checked.config))
    total, active = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == total
    assert model.flops_per_token(0) / 6 == pytest.approx(active, rel=0.01)


def test_routing_matches_deepseek_v3() -> None:
    more = {"num_local_experts": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    settings = transformers.AutoConfig.for_model("deepseek_v3", **sizes("deepseek_v3", **more))
    settings._experts_implementation = "eager"
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    theirs = DeepseekV3MoE(settings)
    routing = Routing(2, "sigmoid", True, settings.routed_scaling_factor, 4, 2, 0.1, 0.0, 0.0)
    mine = RoutedMLP(32, 8, 32, 32, routing)
    for tensor in [*theirs.parameters(), theirs.gate.e_score_correction_bias]:
        nn.init.normal_(tensor, 0, 0.3)
    state = {}
    for name, value in theirs.state_dict().items():
        if name == "experts.gate_up_proj":
            gate, up = value.chunk(2, dim=1)
            state |= {"experts.gate_proj": gate, "experts.up_proj": up}
        else:
            state[name.replace("gate.e_score_correction_bias", "bias")] = value
    mine.load_state_dict(state)
    x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_the_balance_bias_favours_idle_experts_and_ignores_skipped_steps() -> None:
    layer = RoutedMLP(8, 3, 8, 0, Routing(1, "softmax", True, 1.0, 1, 1, 0.3, 0.5, 0.0))
    counts = torch.tensor([9, 3, 0])
    layer.balance(counts, skip=torch.tensor(1.0))
    assert layer.bias.tolist() == [0, 0, 0] and layer.load.tolist() == pytest.approx([1 / 3] * 3)
    layer.balance(counts)
    assert layer.bias.tolist() == pytest.approx([-0.4, 0.2, 0.2])  # of mean 0
    assert layer.load.tolist() == pytest.approx([0.75, 0.25, 0])


@pytest.mark.parametrize(
    "args, said",
    [
        ({"scoring_func": "relu"}, "model.scoring_func=relu: must be softmax or sigmoid"),
        (
            {"num_experts_per_tok": 9},
            "a token has the choice of 8 experts; write model.num_experts_per_tok=8",
        ),
        (
            {"n_group": 3},
            "model.n_group=3: does not divide num_local_experts=8; write model.n_group=2",
        ),
        (
            {"first_k_dense_replace": 4},
            "model.first_k_dense_replace=4: leaves none of num_hidden_layers=4 with experts",
        ),
        ({"z_loss": -1.0}, "model.z_loss=-1.0: must not be negative; write model.z_loss=0"),
    ],
)
def test_invalid_expert_sizes_are_refused_before_launch(args: dict, said: str) -> None:
    (problem,) = preflight(tiny(model=Model("moe", {"vocab_size": None, **args})))
    assert said in str(problem)


# --- products by expert ---------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8, 12), (7, 5)], ids=["grouped", "in a loop"])
@pytest.mark.parametrize("counts", [(3, 0, 4, 3), (0, 0, 0, 0), (0, 10, 0, 0), (0, 1, 0, 0)])
def test_grouped_products_use_each_rows_expert(sizes: tuple, counts: tuple) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(sum(counts), sizes[0] + 2, generator=generator)  # a single row is a part
    rows = wide[:, :-2].requires_grad_()
    weight = torch.randn(4, sizes[1], sizes[0], generator=generator, requires_grad=True)
    assert runs_grouped(rows, weight) == (sizes == (8, 12) and len(rows) > 0)
    parts = zip(rows.split(counts), weight, strict=True)
    truth = torch.cat([part @ matrix.t() for part, matrix in parts])
    gradient = torch.randn(len(truth), sizes[1] + 2, generator=generator)[:, :-2]
    expected = torch.autograd.grad(truth, (rows, weight), gradient, allow_unused=True)
    found = expert_linear(rows, weight, torch.tensor(counts))
    torch.testing.assert_close(found, truth)
    for mine, right in zip(
        torch.autograd.grad(found, (rows, weight), gradient), expected, strict=True
    ):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(
    ("dtype", "capability", "writes"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 0), True),
        (torch.bfloat16, (12, 0), False),
        (torch.bfloat16, (8, 0), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_a_kernel_that_writes_zeros_for_experts_without_rows_is_trusted(
    dtype: torch.dtype, capability: tuple, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all matrices' gradients would be read once more."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    rows = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda"))
    assert experts._writes_all(rows) == writes
    monkeypatch.setattr(experts, "_writes_all", lambda _: writes)
    x, weight = torch.randn(10, 8), torch.randn(4, 12, 8, requires_grad=True)
    result = expert_linear(x, weight, torch.tensor([3, 0, 4, 3]))
    with mock.patch.object(torch.Tensor, "masked_fill_") as fill:
        result.sum().backward()
    assert fill.called != writes and not weight.grad[1].any()


def test_grouped_products_are_saved_and_counted_like_matmuls() -> None:
    assert EXPERT_LINEAR in PRODUCTS and EXPERT_LINEAR == EXPERTS_PRODUCT
    rows = torch.empty(24, 16, device="meta", requires_grad=True)
    weight = torch.empty(4, 8, 16, device="meta", requires_grad=True)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        result = expert_linear(rows, weight, torch.empty(4, dtype=torch.int64, device="meta"))
        result.backward(torch.empty_like(result))
    assert counter.get_total_flops() == 3 * 2 * 24 * 16 * 8


# --- transformers' families -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", *slow("qwen3_moe", "deepseek_v3", "glm4_moe")])
def test_expert_gradients_match_transformers(family: str) -> None:
    model = build_model(model_of(family), "cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    theirs = own(model)
    theirs.set_experts_implementation("eager")
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    model(ids).square().mean().backward()
    theirs(ids, use_cache=False).logits.square().mean().backward()
    for (name, mine), right in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-5, atol=1e-6, msg=name)
