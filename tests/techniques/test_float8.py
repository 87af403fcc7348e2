"""precision=float8 and mxfp8: which layers compute so, and what; layouts: `proof/test_layouts.py`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.torch_version import TorchVersion

from support.cells import cells, slow
from support.commands import TINY, command
from support.counted_calls import CountedCalls
from support.families import gpt_oss, hf, llama, moe
from support.hf_tiny import model_of, tiny_hf
from support.models import tiny
from support.proven import assert_proven
from support.records import losses
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import (
    Float8Precision,
    Mxfp8Precision,
    Precision,
)
from titanlike.core.config.groups.jobs import Checkpoint, Validation, Verify
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator, nvml
from titanlike.core.device.accelerator import multiplies_float8
from titanlike.core.distributed.placement import experts_of, in_bf16
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.training.loop import train
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan
from titanlike.planning.estimate import make_estimate
from titanlike.proof.reference import in_one_process
from titanlike.techniques.low_precision import float8
from titanlike.techniques.low_precision.float8 import use_float8

FLOAT8 = Float8Precision(min_features=16)
MXFP8 = Mxfp8Precision(min_features=32)
BF16 = Precision("bf16")
CPU = torch.device("cpu")

# --- what is computed ---------------------------------------------------------------------------


def in_float8(config: Config) -> set[str]:
    """Names of the layers that compute in float8."""
    model = build_model(resolve_model(config))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    layers = use_float8(model, config, CPU)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    found = {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    assert layers is not None and layers.count == len(found) and layers.emulated
    experts = {n for n, m in model.named_modules() if getattr(m, "product", None) is not None}
    assert layers.experts == len(experts)
    return found | experts


@pytest.mark.parametrize("precision", [FLOAT8, MXFP8])
@pytest.mark.parametrize(
    "model",
    [
        moe(num_local_experts=64, n_shared_experts=1, num_nextn_predict_layers=1),
        gpt_oss(num_local_experts=64),
        hf("qwen2_moe", num_experts=64),
        hf("granitemoe", num_local_experts=64),
        hf("gpt_oss", num_local_experts=64),
        Model("test_float8.Listed", {}),
    ],
    ids=lambda model: f"{model.name} {model.args.get('family', '')}",
)
def test_a_router_stays_in_bf16_whatever_its_size(model: Any, precision: Any) -> None:
    """Rounded to float8 it sends every fourth token to other experts than in bf16."""
    low = in_float8(tiny(model=model, precision=precision, seq_len=32))
    assert low and not any(
        name.endswith(("gate", "router", "router.layer", "choose")) for name in low
    )
    assert model.name != "test_float8.Listed" or "layers.1.value" in low or precision is MXFP8


class Listed(nn.Module):
    """Experts in a list of a module of theirs, or in a stack of the layer's own, and a layer that
    chooses; and a convolution, whose weight is no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for block in self.layers:
            block.choose = nn.Linear(32, 32)
            block.experts = nn.Module()
            block.experts.each = nn.ModuleList(nn.Linear(32, 32) for _ in range(32))
            block.stacked = nn.Module()
            block.stacked.choose = nn.Linear(32, 48)
            block.stacked.up = nn.Parameter(torch.zeros(48, 32, 32))
            block.value = nn.Linear(32, 80)
            block.conv = nn.Conv1d(80, 80, 4, groups=80)


WIDE = llama(hidden_size=64, num_key_value_heads=4, intermediate_size=128)  # whole blocks of mxfp8
MOE = {f"model.layers.{block}.mlp.experts" for block in range(2)}
LLAMA = {
    f"model.layers.{block}.{name}"
    for block in range(2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    + ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
}


class Chain(nn.Sequential):
    """Layers without blocks: the last one is the head; one that is given twice stays in bf16."""

    def __init__(self) -> None:
        twice = nn.Linear(32, 32)
        middle = nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32), nn.Linear(32, 24)
        super().__init__(nn.Embedding(64, 32), *middle, nn.Linear(24, 32), twice, twice)
        self.append(nn.Linear(32, 64))


class Normed(nn.Module):
    """A block whose matrix is computed from others."""

    def __init__(self) -> None:
        super().__init__()
        plain = nn.Linear(64, 32), nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.layers = nn.ModuleList([nn.Sequential(*plain)])


@pytest.mark.parametrize(
    "settings, expected",
    [
        (FLOAT8, LLAMA),
        (
            replace(FLOAT8, min_features=32),
            {n for n in LLAMA if not n.endswith(("k_proj", "v_proj"))},
        ),
        (
            replace(FLOAT8, skip=["model.layers.0.*", "*.o_proj"]),
            {n for n in LLAMA if "model.layers.1" in n and not n.endswith("o_proj")},
        ),
    ],
)
def test_linear_layers_of_blocks_compute_in_float8_but_small_and_named_ones(
    settings: Float8Precision, expected: set[str]
) -> None:
    assert in_float8(tiny(layers=2, precision=settings)) == expected


def test_experts_compute_in_float8_but_small_and_named_ones() -> None:
    attention = {name for name in LLAMA if "mlp" not in name}
    assert in_float8(tiny(model=moe(), precision=FLOAT8)) == attention | MOE
    clamped = in_float8(tiny(model=gpt_oss(), precision=FLOAT8))
    assert clamped == attention | MOE
    one = replace(FLOAT8, skip=["*.0.mlp.experts", "*self_attn*"])
    assert in_float8(tiny(model=moe(), precision=one)) == {"model.layers.1.mlp.experts"}


def test_a_chain_of_layers_keeps_its_head_shared_and_odd_layers() -> None:
    chain = Custom("techniques.test_float8.Chain", {})
    assert in_float8(tiny(model=chain, precision=FLOAT8)) == {"1", "3"}
    normed = Custom("techniques.test_float8.Normed", {})
    assert in_float8(tiny(model=normed, precision=FLOAT8)) == {"layers.0.0"}


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """To float8, with one scale."""
    scale = torch.finfo(kind).max / x.abs().max().double()
    return (x * scale.float()).to(kind).float() / scale.float()


def test_a_layer_in_bf16_keeps_a_forward_that_was_replaced_before() -> None:
    """As blocks that are linear layers have, where they are recomputed or compiled."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    use_float8(model, tiny(precision=Float8Precision()), torch.device("cpu"))
    plain, replaced = model[0], model[1]
    replaced.forward = kept = lambda x: x
    with in_bf16(model.modules()):
        assert replaced(torch.ones(64)).abs().max() != 1 and "forward" in vars(plain)
    assert replaced.forward is kept and "forward" not in vars(plain)


def test_a_layer_multiplies_what_is_rounded_to_float8() -> None:
    config = tiny(layers=1, precision=FLOAT8)
    model = build_model(resolve_model(config), "cpu")
    use_float8(model, config, CPU)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    x = torch.randn(4, 16, 32, requires_grad=True)
    gradient = torch.randn(4, 16, 64)
    output = layer(x)
    output.backward(gradient)
    weight = rounded(layer.weight.detach(), torch.float8_e4m3fn)
    inputs = rounded(x.detach(), torch.float8_e4m3fn)
    gradient = rounded(gradient, torch.float8_e5m2)
    torch.testing.assert_close(output, inputs @ weight.t())
    torch.testing.assert_close(x.grad, gradient @ weight)
    torch.testing.assert_close(layer.weight.grad, gradient.flatten(0, 1).t() @ inputs.flatten(0, 1))
    plain = x.detach() @ layer.weight.detach().t()
    assert 0.01 < (output - plain).norm() / plain.norm() < 0.1


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"])
def test_mxfp8_has_a_scale_for_32_elements_that_are_summed_over(recipe: str) -> None:
    """The last block of tokens has fewer."""
    config = tiny(model=WIDE, precision=replace(MXFP8, recipe=recipe))
    model = build_model(resolve_model(config), "cpu")
    use_float8(model, config, CPU)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    torch.manual_seed(0)
    size = layer.weight.shape
    layer.weight = nn.Parameter(torch.randn(size) * 10 ** torch.randn(size[0], 1))
    x, g = torch.randn(3, 16, size[1], requires_grad=True), torch.randn(3, 16, size[0])
    out = layer(x)
    out.backward(g)
    weight, rows, of_rows = layer.weight.detach(), x.detach().flatten(0, 1), g.flatten(0, 1)
    torch.testing.assert_close(out.flatten(0, 1), by_block(rows) @ by_block(weight).t())
    torch.testing.assert_close(x.grad.flatten(0, 1), by_block(of_rows) @ by_block(weight.t()).t())
    low = (lambda matrix: matrix) if recipe.endswith("hp") else by_block
    torch.testing.assert_close(layer.weight.grad, low(of_rows.t()) @ low(rows.t()).t())
    plain = rows @ weight.t()
    assert 0.01 < (out.flatten(0, 1) - plain).norm() / plain.norm() < 0.06


def test_mxfp8_copies_a_matrix_only_where_blocks_need_it() -> None:
    """Full blocks of rows are cast as they lie, those of columns are copied once."""
    from titanlike.techniques.low_precision.mxfp8 import BlockConfig

    config = BlockConfig(emulate=True)
    with pytest.MonkeyPatch.context() as patch:
        # torchao's own cast copies as well
        patch.setattr("titanlike.techniques.low_precision.mxfp8.to_mx", lambda x, *_: (x, x))
        for (tokens, dim), copies in {(64, 1): 0, (64, 0): 1, (48, 0): 2}.items():
            with CountedCalls() as counted:
                config.cast_blocks(torch.ones(tokens, 96), dim)
            assert counted.calls.total() == copies + 1, (tokens, dim)  # and `ones`


def by_block(x: Tensor) -> Tensor:
    """Rounded to e4m3, 32 elements of a row with a scale that is a power of 2."""
    blocks = pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = (blocks.abs().amax(2, keepdim=True) / 448).log2().ceil().exp2()
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("recipe", "inputs", "weight_gradient"),
    [
        ("tensorwise", "TENSORWISE", "TENSORWISE"),
        ("rowwise", "AXISWISE", "AXISWISE"),
        ("rowwise_with_gw_hp", "AXISWISE", "DISABLED"),
    ],
)
def test_a_recipe_sets_the_scaling_granularity(
    recipe: str, inputs: str, weight_gradient: str
) -> None:
    """One for a tensor, or one for each row; or none, in bf16."""
    config = tiny(layers=1, precision=replace(FLOAT8, recipe=recipe))
    model = build_model(resolve_model(config), "cpu")
    use_float8(model, config, CPU)
    found = model.get_submodule("model.layers.0.mlp.up_proj").config
    kinds = [found.cast_config_input, found.cast_config_input_for_grad_weight]
    names = [
        (
            kind.scaling_type if kind.scaling_type.name == "DISABLED" else kind.scaling_granularity
        ).name
        for kind in kinds
    ]
    assert names == [inputs, weight_gradient]


@pytest.mark.parametrize("weights", [True, False])
def test_experts_multiply_rows_that_are_rounded_to_float8(weights: bool) -> None:
    """A row with a scale of its own; in weight gradients a feature of an expert's tokens, or bf16."""
    from titanlike.techniques.low_precision.float8_experts import Product

    torch.manual_seed(0)
    counts, (weight, x, g) = [5, 0, 20, 7], map(torch.randn, [(4, 16, 48), (32, 48), (32, 16)])
    x.requires_grad_()
    weight.requires_grad_()
    out = Product(nn.Module(), weights, kernels=False)(x, weight, torch.tensor(counts))
    out.backward(g)
    parts = zip(x.detach().split(counts), g.split(counts), weight.detach(), strict=True)
    for i, (rows, gradients, matrix) in enumerate(parts):
        if not len(rows):
            assert not weight.grad[i].any()
            continue
        torch.testing.assert_close(out.split(counts)[i], by_row(rows) @ by_row(matrix).t())
        expected = by_row(gradients) @ by_row(matrix.t()).t()
        torch.testing.assert_close(x.grad.split(counts)[i], expected)
        low = by_row if weights else lambda matrix: matrix
        torch.testing.assert_close(weight.grad[i], low(gradients.t()) @ low(rows.t()).t())
    assert 0.01 < (out[:5] - x[:5] @ weight[0].t()).norm() / out[:5].norm() < 0.1


@pytest.mark.parametrize("weights", [True, False])
def test_a_gpus_kernels_are_given_what_they_take(
    weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written down in plain torch, they give what is emulated."""
    import torchao.prototype.moe_training.kernels as triton

    from titanlike.techniques.low_precision import float8_experts
    from titanlike.techniques.low_precision.float8_experts import Product, operand

    def rowwise(x: Tensor, kind: torch.dtype, powers: bool) -> tuple[Tensor, Tensor]:
        assert x.is_contiguous() and kind == torch.float8_e4m3fn and powers
        return operand(x)

    def dual(g: Tensor, x: Tensor, ends: Tensor, kind: torch.dtype, powers: bool) -> Any:
        assert kind == torch.float8_e4m3fn and powers
        results = []
        for tensor in (g, x):
            parts = [operand(part.t()) for part in groups(tensor[: ends[-1]], ends)]
            data = torch.cat([data for data, _ in parts], 1)
            rest = torch.zeros(len(tensor) - int(ends[-1]), data.shape[0]).t().to(kind)
            results += [torch.cat([data, rest], 1).t(), torch.cat([s.flatten() for _, s in parts])]
        return results

    def groups(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        return x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())

    def grouped(a: Tensor, b: Tensor, scales: Any, ends: Tensor, dtype: torch.dtype) -> Tensor:
        assert a.stride(-1) == 1 and b.stride(-2) == 1 and not (ends % 16).any()
        of_a, of_b = scales
        result = []
        if b.dim() == 3:
            assert of_a.shape == a.shape[:1] and of_b.shape == (len(b), b.shape[2])
            rows = groups((a.float() / of_a[:, None])[: ends[-1]], ends)
            of_group = zip(rows, b.float() / of_b[:, None], strict=True)
            result = [part @ matrix for part, matrix in of_group]
            return torch.cat(
                [*result, a.new_zeros(len(a) - int(ends[-1]), b.shape[2], dtype=dtype)]
            )
        of_group = zip(groups(a.t()[: ends[-1]], ends), groups(b[: ends[-1]], ends), strict=True)
        pairs = zip(of_group, of_a.view(len(ends), -1), of_b.view(len(ends), -1), strict=True)
        for (left, right), of_left, of_right in pairs:
            result.append((left.float() / of_left).t() @ (right.float() / of_right))
        return torch.stack(result)

    monkeypatch.setattr(triton, "triton_fp8_rowwise_2d_scale_and_cast", rowwise)
    monkeypatch.setattr(triton, "triton_fp8_per_group_colwise_scales_dual", dual)
    monkeypatch.setattr(float8_experts, "scaled_grouped_mm", grouped)
    torch.manual_seed(0)
    counts, (weight, x, g) = [5, 0, 20, 7], map(torch.randn, [(4, 16, 48), (32, 48), (32, 16)])
    found = []
    for kernels in (False, True):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        out = Product(nn.Module(), weights, kernels)(*inputs, torch.tensor(counts))
        out.backward(g)
        found.append([out, *(tensor.grad for tensor in inputs)])
    for emulated, by_kernels in zip(*found, strict=True):
        torch.testing.assert_close(by_kernels, emulated)


def by_row(x: Tensor) -> Tensor:
    """Rounded to e4m3, each row with a scale that is a power of 2."""
    scale = (448 / x.abs().amax(1, keepdim=True)).log2().floor().exp2()
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.slow
def test_the_estimates_and_flops_are_those_of_bf16() -> None:
    config = tiny(pp=2, dp=2, layers=4, precision=BF16)
    float8 = replace(config, precision=FLOAT8)
    plans = [make_plan(config), make_plan(float8)]
    bf16, eight = (make_estimate(c, plan=d) for c, d in zip((config, float8), plans, strict=True))
    assert plans[0].flops_per_token == plans[1].flops_per_token
    # on the CPU it is emulated: operands are cast once more
    assert bf16.step_seconds <= eight.step_seconds < 1.05 * bf16.step_seconds
    # operands in float8 are beside those in bf16 while a layer runs; all-gathered weights take half
    assert 0.9 * bf16.fullest < eight.fullest < 1.1 * bf16.fullest


# --- what a user is told ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, said",
    [
        (
            tiny(precision=replace(FLOAT8, skip=["model.layers.0.mlp.up_prj"])),
            r"precision.skip=.*no linear layer of this name; write "
            r"precision.skip=\[model.layers.0.mlp.up_proj\]",
        ),
        (tiny(precision=replace(FLOAT8, skip=["*"])), r"leaves no .*; write precision.skip=\[\]"),
        (
            tiny(precision=Float8Precision()),
            "precision.min_features=64: .*largest has 32; write precision.min_features=32",
        ),
        (
            tiny(tp=2, precision=MXFP8),
            r"q_proj has 32 features, and 32/2 = 16 is not a multiple of 32, .*64/2 = 32 is.*; write tp=1",
        ),
        (
            tiny_hf(model_of("gpt2"), precision=FLOAT8),
            "no linear layers .* in the model's blocks; write precision=bf16",
        ),
    ],
)
def test_settings_that_convert_no_layer_are_refused(config: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        make_plan(config)
    assert len(raised.value.problems) == 1


def test_a_missing_torchao_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    [problem] = preflight(tiny(precision=FLOAT8))
    assert str(problem) == (
        "precision=float8: torchao is not installed; pip install 'titanlike[float8]', or "
        "precision=bf16"
    )


GPUS = {(8, 9): (True, False), (9, 0): (True, True)}
GPUS |= dict.fromkeys([(10, 0), (10, 3), (12, 0), (12, 1)], (True, False))


@pytest.mark.parametrize(("capability", "kernels"), GPUS.items(), ids=str)
def test_only_what_a_gpu_has_no_kernels_for_is_emulated(
    capability: tuple[int, int], kernels: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers and experts, and the opening table names each."""
    gpu = nvml.Gpu("a GPU", 80 << 30, 80 << 30, capability)
    monkeypatch.setattr(nvml, "visible_gpus", lambda: [gpu])
    device = torch.device("cuda")
    found = multiplies_float8(device), multiplies_float8(device, grouped=True)
    assert found == kernels
    config = tiny(model=moe(), precision=FLOAT8)
    monkeypatch.setattr(float8, "first_device", lambda _: device)
    made = float8.Float8(config, build_model(resolve_model(config)))
    [(_, said)] = made.describe(None)
    experts = "; experts emulated, which is slower: this device has no grouped float8 matrix"
    assert (experts in said, "emulated" in said) == (not kernels[1],) * 2
    products = [module.product for module in experts_of(made_model(config)).values()]
    assert [product.kernels for product in products] == [kernels[1]] * 2


def made_model(config: Config) -> nn.Module:
    model = build_model(resolve_model(config))
    use_float8(model, config, torch.device("cuda"))
    return model


OPERATORS = "import titanlike.core.torch_private.operators as o"


@pytest.mark.parametrize(
    ("trial", "kernels"),
    [
        ("pass", True),
        ("raise RuntimeError", False),
        ("import os; os.abort()", False),  # as a trap does
        *slow(("import time; time.sleep(600)", False)),
        *slow((f"{OPERATORS}; o.try_scaled_grouped_mm('meta')", True)),
        *slow((f"{OPERATORS}; o.try_scaled_grouped_mm('cpu')", False)),
    ],
    ids=str,
)
def test_a_later_torch_is_tried_in_another_process(
    trial: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has a grouped product for a GPU: here one that it raises for, or crashes or hangs."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.16.0"))
    monkeypatch.setattr(accelerator, "_TRIAL", trial)
    monkeypatch.setattr(accelerator, "_TRIAL_SECONDS", 3 if "sleep" in trial else 300)
    known = accelerator._multiplies_groups.__wrapped__
    assert known((10, 0), 0) == kernels
    assert (known((9, 0), 0), known((8, 9), 0)) == (True, False)  # without a trial


@pytest.mark.slow
def test_a_run_says_that_it_is_emulated_and_nothing_of_torchao(tmp_path: Path) -> None:
    words = [*TINY, "precision=float8", "precision.min_features=16", "steps=2", "device=cpu"]
    done = command(*words, f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bf16, and 28 of 29 linear layers in float8 (tensorwise); emulated" in done.stdout
    assert "torchao" not in done.stderr and "register_constant" not in done.stderr
    plain = [sys.executable, "-c", "import torchao"]
    noise = subprocess.run(plain, capture_output=True, text=True).stderr
    assert noise, "importing torchao is silent now: `quiet_import` can go"


# --- layouts ------------------------------------------------------------------------------------


MIXTURE = moe(num_hidden_layers=4, n_shared_experts=1)
WIDE_MIXTURE = moe(hidden_size=64, num_hidden_layers=4, num_local_experts=8, n_shared_experts=1)
TOGETHER: dict[str, Any] = {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "schedule": "zbvzerobubble"}
LAYOUTS: dict[
    str, Config
] = {  # of a model with and without experts; others: `proof/test_layouts.py`
    "tp": tiny(tp=2, layers=4),
    "tp, zbv": tiny(tp=2, pp=2, schedule="zbvzerobubble", layers=4),
    "cp": tiny(cp=2, layers=4),
    "ep": tiny(dp=2, ep=2, model=MIXTURE),
    "ep over tp": tiny(tp=2, dp=2, ep=4, model=MIXTURE),
    "a token with other experts": tiny(tp=2, dp=2, ep=4, model=WIDE_MIXTURE),
    "all together": tiny(model=MIXTURE, **TOGETHER),
}
LAYOUTS = {name: replace(config, precision=FLOAT8) for name, config in LAYOUTS.items()}
IN_BLOCKS = {
    "mxfp8, dp": tiny(dp=2, model=WIDE),
    "mxfp8, tp": tiny(tp=2, model=WIDE),
    "mxfp8, zbv": tiny(pp=2, schedule="zbvzerobubble", model=WIDE),
    "mxfp8, cp": tiny(cp=2, model=WIDE, seq_len=64),
}
IN_BLOCKS = {name: replace(config, precision=MXFP8) for name, config in IN_BLOCKS.items()}


@pytest.mark.parametrize("config", cells({}, LAYOUTS | IN_BLOCKS))
def test_every_mesh_axis_matches_one_process_in_float8(config: Config, tmp_path: Path) -> None:
    """`verify`, and the losses of 20 steps."""
    config = replace(config, validation=Validation(every=0), steps=20)
    run_world(train, config, tmp_path / "layout", timeout=300)
    run_world(train, in_one_process(config), tmp_path / "one", timeout=300)
    many, one = (losses(tmp_path / name) for name in ("layout", "one"))
    assert len(many) == 20 and many == pytest.approx(one, rel=2e-3)
    assert_proven(replace(config, validation=Validation(), verify=Verify(steps=1)), tmp_path, 300)


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.grid
def test_a_run_resumes_in_another_precision_and_back(tmp_path: Path) -> None:
    """Three steps in float8, then one each in fp32, in bf16, in float8; losses as in fp32 alone."""
    saving = Checkpoint(every=1, last=True)
    config = tiny(pp=2, dp=2, steps=3, precision=FLOAT8, checkpoint=saving, optimizer=Sgd())
    for step, precision in enumerate((FLOAT8, Precision("fp32"), BF16, FLOAT8), 3):
        run_world(train, replace(config, steps=step, precision=precision), tmp_path / "changing")
    run_world(train, replace(config, steps=6, precision=Precision("fp32")), tmp_path / "fp32")
    changing, exact = (losses(tmp_path / name) for name in ("changing", "fp32"))
    assert len(changing) == len(exact) == 6
    assert changing == pytest.approx(exact, rel=2e-3) and changing[0] != exact[0]
