"""A run of our own families starts from a folder of transformers, whatever its layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from support.cells import cells
from support.families import deepseek, gpt_oss
from support.hf_tiny import folder_of
from support.saved_runs import a_run, events, train_all
from support.saved_state import load_in_silence
from support.world import run_world
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.hf.hf_export import export
from titanlike.run.checks import problems

SIZES = {"vocab_size": None, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "rms_norm_eps": 1e-6}
MOE = SIZES | {
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def the_folder(family: str, folder: Path, **changes: Any) -> Path:
    if family == "gpt2":
        changes |= {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16}
        changes |= {"bos_token_id": None, "eos_token_id": None}
    folder_of(family, folder, **changes)
    return folder


def started(run_dir: Path, model: Model, folder: Path, **more: Any) -> Config:
    config = replace(a_run(run_dir, steps=1, last=True, every=0), model=model, **more)
    settings = replace(config.checkpoint, start_from=f"hf:{folder}")
    optimizer = replace(config.optimizer, lr=1e-30)
    return replace(config, checkpoint=settings, optimizer=optimizer, validation=Validation(every=0))


def first_loss(config: Config, folder: Path) -> float:
    """transformers' own, of the run's first batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = next(batches(open_data(config).train, replace(config, dp=1), dp_rank=0))
    with torch.no_grad():
        logits = model.eval()(batch["inputs"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).item()


TIED = {"tie_word_embeddings": True}
GPT2 = Model(
    "gpt2", {"vocab_size": None, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16}
)
MIXTRAL = Model("moe", MOE | {"moe_intermediate_size": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e6})
QWEN3 = Model("moe", MOE | {"qk_norm": True, "norm_topk_prob": False})
GROUPS = {"n_group": 2, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
OSS = {"rope_parameters": YARN, "swiglu_limit": 0.5, "intermediate_size": 32}
DEEPSEEK = deepseek(num_hidden_layers=4)
TIED_LLAMA = Model("llama", LLAMA | {"tie_word_embeddings": True})
CASES = cells(
    {"gpt2-tp2": ("gpt2", GPT2, {"tp": 2}, {})},
    {
        "mixtral-ep2": ("mixtral", MIXTRAL, {"dp": 2, "ep": 2}, {"sliding_window": None}),
        "llama-tied-pp2-tp2": ("llama", TIED_LLAMA, {"pp": 2, "tp": 2}, TIED),
    },
    {
        "qwen3-moe-pp2": ("qwen3_moe", QWEN3, {"pp": 2}, {}),
        "gpt-oss-tp2": (
            "gpt_oss",
            gpt_oss(num_hidden_layers=4, rope_theta=150000.0),
            {"tp": 2},
            OSS,
        ),
        "deepseek-v3-pp2-tp2": ("deepseek_v3", DEEPSEEK, {"pp": 2, "tp": 2}, GROUPS),
    },
)


@pytest.mark.parametrize("case", CASES)
def test_the_first_loss_is_that_of_transformers(case: Any, tmp_path: Path) -> None:
    family, model, layout, changes = case
    folder = the_folder(family, tmp_path / "in", **changes)
    if family != "gpt2":  # so that an export has it again
        longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        model = replace(model, args=model.args | {"max_position_embeddings": longest})
    config = started(tmp_path / "run", model, folder, **layout)
    assert list(problems(config)) == []
    assert train_all(config) == [""]
    [record] = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert abs(record["loss"] - first_loss(config, folder)) < 1e-6
    [event] = events(tmp_path / "run", "warm_start")
    assert str(folder) in event["text"]
    export(config.run_dir, str(tmp_path / "out"))  # and back to where it came from
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, tmp_path / "out")
    ]
    for (name, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def test_a_start_from_a_folder_tells_no_rank_what_all_others_have(tmp_path: Path) -> None:
    folder = the_folder("llama", tmp_path / "in")
    model = Model("llama", LLAMA | {"max_position_embeddings": 2048})
    config = started(tmp_path / "run", model, folder, dp=2)
    every = run_world(load_in_silence, config, tmp_path / "run")
    assert [(one.step, one.error) for one in every] == [(0, "")] * 2


def told(config: Config) -> str:
    return "\n".join(map(str, problems(config)))


def test_every_size_that_differs_from_the_folder_is_listed(tmp_path: Path) -> None:
    folder = the_folder("llama", tmp_path / "in")
    sizes = LLAMA | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "num_hidden_layers": 2}
    text = told(started(tmp_path / "run", Model("llama", sizes), folder))
    for fix in (
        "model.num_key_value_heads=2",
        "model.rms_norm_eps=1e-06",
        "model.num_hidden_layers=4",
    ):
        assert f"write {fix}" in text, text
    assert "model.hidden_size" not in text


def test_a_folder_with_an_unsupported_feature_is_refused(tmp_path: Path) -> None:
    scaled = the_folder("llama", tmp_path / "scaled", mlp_bias=True)
    config = json.loads((scaled / "config.json").read_text())
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config |= {"rope_scaling": rope, "quantization_config": {"quant_method": "fp8"}}
    (scaled / "config.json").write_text(json.dumps(config))
    text = told(started(tmp_path / "run", Model("llama", LLAMA), scaled))
    assert f"model.path={scaled}" in text
    for key in ("rope_type:longrope", "mlp_bias=True", "quantization_config="):
        assert key in text, text
    other = the_folder("qwen2", tmp_path / "other")
    text = told(started(tmp_path / "run", Model("llama", LLAMA), other))
    assert "is a qwen2" in text and f"model=hf model.path={other}" in text
    text = told(started(tmp_path / "run", Model("llama", LLAMA), tmp_path / "none"))
    assert "no model of transformers" in text
    text = told(started(tmp_path / "run", GPT2, scaled))
    assert "model.name=llama" in text
