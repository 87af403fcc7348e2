"""tp divides models of every origin: ours, transformers' by their own plans, and users' by theirs.

Each layout is verified against one process in plain torch, gradients included.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import forked
from support.cells import GRID, cells, slow
from support.command_lines import examined
from support.families import hf, llama
from support.hf_tiny import folder_of
from support.models import tiny
from support.paths import ROOT
from support.planned_models import PLAN
from support.proven import assert_proven
from titanlike.config.groups import ActivationCheckpoint, TraceSplit, ZeroBubbleSchedule
from titanlike.config.keys import Model
from titanlike.config.schema import ChunkedCrossEntropy, Config, TextData
from titanlike.models.hf_config import FAMILIES
from titanlike.training.draft import draft, preflight

SEQ_LEN = 16
OWN = Model("support.planned_models.Own", {"vocab_size": None, "max_seq_len": 16, "depth": 2}, PLAN)


def divided(model: Model, pp: int = 1, dp: int = 1, tp: int = 2, **changes: Any) -> Config:
    return tiny(pp, dp, model=model, tp=tp, batch_size=8, seq_len=SEQ_LEN, **changes)


QUICK = {
    # biases, packed and normalized heads, a part of the sequence between layers
    "own": divided(OWN, activation_checkpoint=ActivationCheckpoint("full")),
    # whole activations between layers; both ranks have the one head of keys and values
    "hf llama": divided(hf("llama", num_key_value_heads=1, num_hidden_layers=2)),
}
MORE = {
    "a vocabulary of 97": divided(llama(vocab_size=97), 2, 1, 2),
    "hf llama, 4 ranks for 2 heads": divided(hf("llama"), 1, 1, 4),
    "hf gpt2, compiled": divided(hf("gpt2"), 1, 2, 2, compile=True),
    "hf phi3": divided(hf("phi3", num_key_value_heads=4), 2, 1, 2),
    "hf gemma2": divided(hf("gemma2"), 1, 2, 2),
}


@pytest.mark.parametrize("config", cells(QUICK, MORE))
def test_a_divided_model_trains_as_one_process_does(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path, timeout=300)


@pytest.mark.parametrize("family", slow("gemma2", "gpt2"))
def test_documents_are_attended_with_a_ranks_own_heads(family: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "A text of some words.\n\nAnother one.\n\nAnd one more of them, longer.\n\n" * 200
    )
    data = TextData(path=str(text), cache=str(tmp_path / "cache"), documents=True)
    model = hf(family, num_hidden_layers=2)
    model = replace(model, args=model.args | {"vocab_size": None})
    assert_proven(tiny(model=model, tp=2, batch_size=8, data=data), tmp_path / "run")


@pytest.mark.parametrize("family", slow("gpt2", "phi3"))
def test_a_folders_weights_are_divided(family: str, tmp_path: Path) -> None:
    """Also transposed and fused ones; the loss takes a few tokens of divided logits at a time."""
    folder_of(family, tmp_path / "model", tie_word_embeddings=True)
    model = Model("hf", {"path": str(tmp_path / "model")})
    config = tiny(1, 2, model=model, tp=2, batch_size=8, loss=ChunkedCrossEntropy(chunk=16))
    assert_proven(config, tmp_path / "run")


# --- plans ---------------------------------------------------------------------------------------


LAYERS = "model.layers.*"
ATTENTION = {
    f"{LAYERS}.self_attn": "gather",
    f"{LAYERS}.self_attn.q_proj": {"colwise": 8},
    f"{LAYERS}.self_attn.[kv]_proj": {"colwise_kv": 8},
    f"{LAYERS}.self_attn.o_proj": "rowwise",
}
ENDS = {"model.embed_tokens": "vocab", "lm_head": "vocab"}
SEQUENCE = ATTENTION | {
    f"{LAYERS}.*_layernorm": "sequence",
    f"{LAYERS}.mlp": "gather",
    f"{LAYERS}.mlp.gate_proj": "colwise",
    f"{LAYERS}.mlp.up_proj": "colwise",
    f"{LAYERS}.mlp.down_proj": "rowwise",
    "model.norm": "sequence",
}
WHOLE_EXPERTS = ATTENTION | {f"{LAYERS}.self_attn.[qk]_norm": "replicate_sum"}
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
def test_every_family_that_is_divided_is_divided_right(family: str, tmp_path: Path) -> None:
    more = {"qk_layernorm": True} if family == "phi" else {}
    assert_proven(of_family(family, 2, **more), tmp_path)


@pytest.mark.parametrize(
    "family, plan", slow(("llama", SEQUENCE | ENDS), ("qwen3_moe", WHOLE_EXPERTS | ENDS))
)
def test_a_users_plan_of_a_transformers_model(
    family: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    """Its words are ours: here activations are divided along the sequence, or experts left whole."""
    config = of_family(family, 2, plan, num_hidden_layers=4)
    if family == "llama":
        config = replace(config, pp=2, schedule=ZeroBubbleSchedule())
    assert_proven(config, tmp_path)


def problems_of(config: Config) -> str:
    return "\n".join(map(str, preflight(config)))


@pytest.mark.parametrize(
    "family", [*SAMPLE, *slow(*(name for name in FAMILIES if name not in SAMPLE), marks=GRID)]
)
def test_a_family_is_divided_or_refused_by_name(family: str) -> None:
    told = problems_of(of_family(family, 2))
    if family in DIVIDED:
        assert not told
    elif family in NOT_DIVIDED:
        assert told.startswith(f"tp=2: {family} has no tensor-parallel plan; ")
    else:
        assert f"transformers' plan of {family} has model.layers.*." in told
        assert "experts are not divided by tp; write tp=1, or" in told


@pytest.mark.parametrize(
    "family, tp, sizes, told",
    [
        ("llama", 3, {}, "num_attention_heads=4 and num_key_value_heads=2; write tp=2"),
        ("gpt2", 3, {}, "of model.config: n_head=4; write tp=2"),
        ("phi3", 4, {}, "num_attention_heads=4 and num_key_value_heads=2; write tp=2"),
        ("llama", 2, {"intermediate_size": 33}, "mlp.gate_proj has 33 features"),
        ("cohere", 2, {"use_qk_norm": True}, "plan of cohere leaves out model.layers.0.self_attn."),
        ("stablelm", 2, {"qk_layernorm": True}, "leaves out model.layers.0.self_attn.q_layernorm"),
    ],
)
def test_what_ranks_cannot_share_is_told(
    family: str, tp: int, sizes: dict[str, Any], told: str
) -> None:
    assert told in problems_of(of_family(family, tp, **sizes))


@pytest.mark.parametrize(
    "plan, told",
    [
        ({f"{LAYERS}.self_attn.q_proj": "colwis"}, "no such style; colwise"),
        ({f"{LAYERS}.mlp": "moe_tp_experts"}, "no such style; no entry: what has none is whole"),
        ({f"{LAYERS}.mlp": ["colwise"]}, "no such style"),
        ({f"{LAYERS}.self_attn.q_prj": "colwise"}, "matches no module; "),
        ({f"{LAYERS}.self_attn.q_proj": {"colwise": 8}}, "self_attn.k_proj is whole"),
    ],
)
def test_a_wrong_plan_is_told_with_what_to_write(plan: dict[str, Any], told: str) -> None:
    assert told in problems_of(of_family("llama", 2, plan))


def test_a_traced_forward_is_not_divided() -> None:
    split = TraceSplit(points=["model.layers.1"])
    told = problems_of(replace(of_family("llama", 2), pp=2, split=split))
    assert "split=trace: a graph that is traced has no exchanges" in told


@pytest.mark.parametrize("tp, heads, kv_heads, groups", [(2, 2, 1, 2), (4, 1, 1, 1)])
def test_attention_knows_its_own_heads(tp: int, heads: int, kv_heads: int, groups: int) -> None:
    attention = draft(of_family("llama", tp)).model_graph.model.get_submodule(
        "model.layers.0.self_attn"
    )
    assert attention.q_proj.out_features == 8 * heads
    assert attention.k_proj.out_features == 8 * kv_heads
    assert attention.num_key_value_groups == groups


MIXER = ["--config-dir", str(ROOT / "examples" / "my_models" / "conf"), "model=mixer", "data=echo"]
MIXER += ["model.width=16", "seq_len=16", "batch_size=8", "logger=none", "tp=2"]


def test_a_users_yaml_has_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    config = examined(*MIXER).config
    assert config is not None and not preflight(config)
    blocks = draft(config).model_graph.model.trunk.blocks
    assert blocks[0].mlp[0].out_features == 16 and blocks[0].mlp[2].in_features == 16
    told = examined(*MIXER, "model.tp_plan={write: colwis}").config
    assert told is not None and "model.tp_plan.write=colwis: no such style" in problems_of(told)


@pytest.mark.slow
def test_a_plan_in_yaml_is_kept_with_the_run_and_divides_it_again(tmp_path: Path) -> None:
    words = [str(ROOT / "train.py"), *MIXER, "run_dir=run", "steps=1", "validation.every=0"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
    first = forked.run(words, tmp_path, env)
    assert first.returncode == 0, first.stderr
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["tp_plan"]
    assert kept["trunk.blocks.*.mlp.0"] == "colwise" and kept["write"] == "vocab"
    again = [words[0], "--config-path", str(tmp_path / "run"), "steps=2"]
    second = forked.run(again, tmp_path, env)
    assert second.returncode == 0, second.stderr
    assert "resuming from step 1" in second.stdout
