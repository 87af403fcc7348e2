"""tp divides models of every origin: ours, transformers' by their own plans, and users' by theirs.

Each layout is verified against one process in plain torch, gradients included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from support.cells import GRID, cells, slow
from support.command_lines import examined
from support.counted_calls import CountedCalls
from support.families import hf, llama
from support.hf_tiny import folder_of
from support.models import tiny
from support.opened import opened
from support.paths import ROOT
from support.proven import assert_proven
from support.world import run_world
from support.wrong_plans import FUSED, PLAN
from titanlike.core.config.groups.computation import ActivationCheckpoint
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy
from titanlike.core.config.groups.pipeline import TraceSplit, ZeroBubbleSchedule
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.training.loop import train
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan
from titanlike.hf.hf_config import FAMILIES
from titanlike.techniques.tp.tensor_parallel import TensorParallel

SEQ_LEN = 16
# packed queries, keys and values, gate and up; biases; embedded positions; norms of heads
OWN = Model(
    "support.wrong_plans.Model",
    {"attention": "Fused", "between": "places"},
    FUSED | {"places": "split"},
)


def divided(model: Model, pp: int = 1, dp: int = 1, tp: int = 2, **changes: Any) -> Config:
    return tiny(pp=pp, dp=dp, model=model, tp=tp, batch_size=8, seq_len=SEQ_LEN, **changes)


SCALING = divided(Model("support.wrong_plans.Model", {"attention": "Scaling"}, PLAN))
LAYOUTS = {
    # a part of the sequence between layers
    "own": divided(OWN, activation_checkpoint=ActivationCheckpoint("full")),
    # whole activations between layers; both ranks have the one head of keys and values
    "hf llama": divided(hf("llama", num_key_value_heads=1, num_hidden_layers=2)),
}
MORE_LAYOUTS = {
    "own, which changes what is gathered": SCALING,
    "own, weight gradients later": divided(OWN, 2, schedule=ZeroBubbleSchedule()),
    "a vocabulary of 97": divided(llama(vocab_size=97), 2, 1, 2),
    "hf llama, 4 ranks for 2 heads": divided(hf("llama"), 1, 1, 4),
    "hf gpt2, compiled": divided(hf("gpt2"), 1, 2, 2, compile=True),
    "hf phi3": divided(hf("phi3", num_key_value_heads=4), 2, 1, 2),
    "hf gemma2": divided(hf("gemma2"), 1, 2, 2),
}


def trained_with_noise(config: Config, worker: Worker) -> dict[str, list[float]]:
    """The weights that all ranks hold, whose gradients on rank 1 have noise, as those of kernels
    that add in any order."""
    held: dict[str, nn.Parameter] = {}
    on_states, after_backward = TensorParallel.on_states, TensorParallel.after_backward

    def keep(self: TensorParallel, states: Any) -> None:
        on_states(self, states)
        for state in states.values():
            named = dict(state.parameters())
            held.update((n, p) for n, p in named.items() if self.placements[n].copies > 1)

    def noisy(self: TensorParallel) -> None:
        for parameter in held.values():
            parameter.grad += worker.rank / 1000 * torch.arange(parameter.numel())
        after_backward(self)

    with mock.patch.multiple(TensorParallel, on_states=keep, after_backward=noisy):
        train(config, worker)
    return {name: parameter.flatten().tolist() for name, parameter in held.items()}


def test_copies_on_several_ranks_do_not_drift_apart(tmp_path: Path) -> None:
    config = divided(hf("qwen2", num_hidden_layers=2), steps=3)
    one, other = run_world(trained_with_noise, config, tmp_path)
    assert "model.layers.0.input_layernorm.weight" in one
    assert one == other


def copies_into_gradients(config: Config, worker: Worker) -> tuple[int, Counter[str]]:
    """How many gradients all ranks have after a step, and the calls that write them."""
    counted, right = CountedCalls(), TensorParallel.after_backward
    kept: list[int] = []

    def after_backward(self: TensorParallel) -> None:
        kept.append(sum(len(parameters) for _, parameters, _ in self._copied))
        with counted:
            right(self)

    with (
        opened(config, worker) as job,
        mock.patch.object(TensorParallel, "after_backward", after_backward),
    ):
        job.train()
    names: Counter[str] = Counter()
    for call, number in counted.calls.items():
        names[call.name] += number if "copy" in call.name else 0
    return kept[0], +names


def test_gradients_of_what_all_ranks_hold_are_copied_together(tmp_path: Path) -> None:
    """One call for all norms of all layers, not one for each."""
    for kept, names in run_world(copies_into_gradients, divided(llama()), tmp_path):
        assert kept > 8 and names == {"aten::_foreach_copy_": 1}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
def test_a_tensor_parallel_model_matches_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path, timeout=300)


def test_an_activation_changed_in_place_is_not_gathered_again() -> None:
    """Nor where blocks are compiled, which do not look at it."""
    again = [make_plan(c).transforms["tp"].ranks.gathers_again for c in (SCALING, LAYOUTS["own"])]
    assert again == [False, True]


@pytest.mark.parametrize("family", slow("gpt2", "phi3"))
def test_pretrained_weights_are_sharded_on_loading(family: str, tmp_path: Path) -> None:
    """Also transposed and fused ones; the loss takes a few tokens of divided logits at a time."""
    folder_of(family, tmp_path / "model", tie_word_embeddings=True)
    model = Model("hf", {"path": str(tmp_path / "model")})
    config = tiny(dp=2, model=model, tp=2, batch_size=8, loss=ChunkedCrossEntropy(chunk=16))
    assert_proven(config, tmp_path / "run")


# --- plans ---------------------------------------------------------------------------------------


LAYERS = "model.layers.*"
SEQUENCE = {
    "model.embed_tokens": "vocab",
    f"{LAYERS}.*_layernorm": "sequence",
    f"{LAYERS}.self_attn": "gather",
    f"{LAYERS}.self_attn.q_proj": {"colwise": 8},
    f"{LAYERS}.self_attn.[kv]_proj": {"colwise_kv": 8},
    f"{LAYERS}.self_attn.o_proj": "rowwise",
    f"{LAYERS}.mlp": "gather",
    f"{LAYERS}.mlp.gate_proj": "colwise",
    f"{LAYERS}.mlp.up_proj": "colwise",
    f"{LAYERS}.mlp.down_proj": "rowwise",
    "model.norm": "sequence",
    "lm_head": "vocab",
}
_DIVIDED = """
    apertus arcee cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2
    gpt_neox granite helium hunyuan_v1_dense llama ministral ministral3 mistral nanochat nemotron
    olmo olmo2 olmo3 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
    vaultgemma
    """
DIVIDED = _DIVIDED.split()
NOT_DIVIDED = ("bloom", "falcon", "gpt_bigcode", "gpt_oss", "mpt")  # the others have experts
SAMPLE = ("olmo2", "bloom", "qwen3_moe")
# a plan that gathers heads, matrices in one, transposed ones, norms of heads; the others are `grid`
CHOSEN = ("cohere", "gpt_neox", "gpt2", "qwen3")


def of_family(family: str, tp: int, plan: Any = None, **changes: Any) -> Config:
    changes.setdefault("num_hidden_layers", 2)
    model = replace(hf(family, **changes), tp_plan=plan)
    return tiny(model=model, tp=tp, batch_size=4, seq_len=SEQ_LEN)


@pytest.mark.parametrize(
    "family", [*slow(*CHOSEN), *slow(*sorted(set(DIVIDED) - set(CHOSEN)), marks=GRID)]
)
def test_every_tensor_parallel_family_matches_one_process(family: str, tmp_path: Path) -> None:
    more = {"qk_layernorm": True} if family == "phi" else {}
    assert_proven(of_family(family, 2, **more), tmp_path)


@pytest.mark.slow
def test_a_users_plan_of_a_transformers_model(tmp_path: Path) -> None:
    """Its words are ours: here activations are divided along the sequence."""
    config = of_family("llama", 2, SEQUENCE, num_hidden_layers=4)
    assert_proven(replace(config, pp=2, schedule=ZeroBubbleSchedule()), tmp_path)


def problems_of(config: Config) -> str:
    return "\n".join(map(str, preflight(config)))


@pytest.mark.parametrize(
    "family", [*SAMPLE, *slow(*(name for name in FAMILIES if name not in SAMPLE), marks=GRID)]
)
def test_a_family_has_a_tp_plan_or_is_refused_by_name(family: str) -> None:
    told = problems_of(of_family(family, 2))
    if family in DIVIDED:
        assert not told
    elif family in NOT_DIVIDED:
        assert told.startswith(f"tp=2: {family} has no tensor-parallel plan; ")
    else:
        assert f"transformers' plan of {family} has model.layers.*." in told
        assert "experts are not divided by tp; write tp=1, or" in told


Q = f"{LAYERS}.self_attn.q_proj"
HEADS = "num_attention_heads=4 and num_key_value_heads=2; write tp=2"
TRACED = {"pp": 2, "split": TraceSplit(points=["model.layers.1"])}


@pytest.mark.parametrize(
    "config, told",
    [
        (of_family("llama", 3), HEADS),
        (of_family("gpt2", 3), "of model.config: n_head=4; write tp=2"),
        (of_family("phi3", 4), HEADS),
        (of_family("llama", 2, intermediate_size=33), "mlp.gate_proj has 33 features"),
        (of_family("cohere", 2, use_qk_norm=True), "cohere leaves out model.layers.0.self_attn."),
        (of_family("llama", 2, {Q: "colwis"}), "no such style; colwise"),
        (
            of_family("llama", 2, {f"{LAYERS}.mlp": "moe_tp_experts"}),
            "no such style; no entry: what",
        ),
        (of_family("llama", 2, {f"{LAYERS}.mlp": ["colwise"]}), "no such style"),
        (of_family("llama", 2, {f"{LAYERS}.self_attn.q_prj": "colwise"}), "matches no module; "),
        (of_family("llama", 2, {Q: {"colwise": 8}}), "self_attn.k_proj is whole"),
        (replace(of_family("llama", 2), **TRACED), "a graph that is traced has no collectives"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_layers_and_wrong_tp_plans_are_refused(config: Config, told: str) -> None:
    assert told in problems_of(config)


MIXER = ["--config-dir", str(ROOT / "examples" / "my_models" / "conf"), "model=mixer", "data=echo"]
MIXER += ["model.width=16", "seq_len=16", "batch_size=8", "logger=none", "tp=2"]


def test_a_users_yaml_declares_the_tp_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    config = examined(*MIXER).config
    assert config is not None and not preflight(config)
    blocks = make_plan(config).model_graph.model.trunk.blocks
    assert blocks[0].mlp[0].out_features == 16 and blocks[0].mlp[2].in_features == 16
    told = examined(*MIXER, "model.tp_plan={write: colwis}").config
    assert told is not None and "model.tp_plan.write=colwis: no such style" in problems_of(told)
