"""titanlike's own families compute what transformers' do, of weights under transformers' names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from support.hf_tiny import sizes
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.models.llama import MLP
from titanlike.core.models.registry import build_model
from titanlike.hf.hf_names import FAMILIES, Counterpart
from titanlike.hf.hf_weights import own_weights

KINDS = {theirs.model_type: (ours, theirs) for ours, each in FAMILIES.items() for theirs in each}
# what a default would hide
CHANGES = {
    "llama": {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 50}},
    "qwen3": {"rms_norm_eps": 1e-2, "sliding_window": None, "head_dim": 16},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32},
    "mixtral": {"num_hidden_layers": 2, "rms_norm_eps": 1e-2, "sliding_window": None},
    "qwen3_moe": {"num_hidden_layers": 2, "rms_norm_eps": 1e-2, "sliding_window": None}
    | {"norm_topk_prob": True, "head_dim": 16},
    "deepseek_v3": {"num_hidden_layers": 2, "rms_norm_eps": 1e-2, "n_group": 2}
    | {"q_lora_rank": None, "rope_interleave": False},
    # scores, and what the experts clamp, are far from 0
    "gpt_oss": {"num_hidden_layers": 2, "rms_norm_eps": 1e-2, "swiglu_limit": 0.5}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 8}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MORE = {
    "llama": {"rope_parameters": LLAMA3, "head_dim": 16},
    "qwen3": {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}},
    "mixtral": {"rope_parameters": YARN | {"attention_factor": 0.5}},
    "qwen3_moe": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0}},
    "gpt_oss": {"rope_parameters": YARN | {"truncate": False}, "num_hidden_layers": 3},
    "deepseek_v3": {
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        **{"q_lora_rank": 12, "rope_interleave": True, "routed_scaling_factor": 1.5},
    },
}


def saved(model_type: str, folder: Path, **changes: object) -> nn.Module:
    config = sizes(model_type, **CHANGES[model_type] | changes) | {"vocab_size": 64}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **config)
    )
    for tensor in model.state_dict().values():
        nn.init.normal_(tensor, 0, 0.3)
    model.save_pretrained(folder)
    return model.eval()


def ours_of(name: str, theirs: Counterpart, folder: Path) -> nn.Module:
    """Our model of a folder's sizes and weights."""
    config = json.loads((folder / "config.json").read_text())
    model = build_model(Custom(name, theirs.our_sizes(config)), "cpu")
    both = (*model.named_parameters(), *model.named_buffers())
    state = {key: tensor.detach() for key, tensor in both if theirs.stored_name(key)}
    weights = own_weights(theirs, folder, {key: tensor.shape for key, tensor in state.items()})
    for key, tensor in state.items():
        place = tuple(slice(0, size) for size in tensor.shape)
        tensor.copy_(weights.block(key, tensor.shape, place))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", KINDS)
def test_built_in_families_have_transformers_logits(
    model_type: str, tied: bool, tmp_path: Path
) -> None:
    more = MORE.get(model_type, {}) if tied else {}
    theirs = saved(model_type, tmp_path, tie_word_embeddings=tied, **more)
    mine = ours_of(*KINDS[model_type], tmp_path)
    ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(mine(ids), expected, rtol=1e-4, atol=1e-4)
    assert (mine.lm_head.weight.data_ptr() == next(mine.parameters()).data_ptr()) == tied


@pytest.mark.parametrize("model_type", KINDS)
def test_the_config_of_an_export_asks_for_the_same_sizes(model_type: str) -> None:
    name, theirs = KINDS[model_type]
    settings = transformers.AutoConfig.for_model(model_type, **sizes(model_type)).to_dict()
    wanted = theirs.our_sizes(settings | {"vocab_size": 64})
    build_model(Custom(name, wanted))
    again = theirs.our_sizes(theirs.config_json(wanted, length=32))
    assert again == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_saves_only_gate_and_up_with_equal_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp = MLP(16, 24).to(dtype)
    kept: list[torch.Size] = []

    def gradients(forward: object) -> list[torch.Tensor]:
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        x.requires_grad_()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.shape) or t, lambda t: t
        ):
            y = forward(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])]

    plain = gradients(lambda x: mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    before = sum(shape[-1] == 24 for shape in kept)
    ours = gradients(mlp)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert sum(shape[-1] == 24 for shape in kept) == before - 1  # without silu(gate)
