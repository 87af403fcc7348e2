"""Folders as published ones are: configs as they are of `published.yaml`, with small sizes, and
weights, tokenizer and generation config."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **{"intermediate_size": 64, "moe_intermediate_size": 16, "vocab_size": 128},
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **{"head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "query_pre_attn_scalar": 16},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token"), 2),
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
LAYERS = {"layer_types", "no_rope_layers"}  # lists of which the table has a period
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings", "initial_context_length")
LENGTHS += ("n_positions", "n_ctx")


@cache
def published() -> dict[str, Any]:
    table = yaml.safe_load((Path(__file__).parents[1] / "checkpoint/published.yaml").read_text())
    for entry in table.values():
        for key in LAYERS & entry["config"].keys():
            layers = entry["config"]["num_hidden_layers"]
            entry["config"][key] = (entry["config"][key] * layers)[:layers]
    return table


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The config with small sizes; lengths are divided by 128, and ids fit the vocabulary."""
    out = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = small(value)
        elif key.endswith("token_id") and value is not None:
            value = [id % 128 for id in value] if isinstance(value, list) else value % 128
        elif key in LAYERS:
            value = value[:4]
        elif key == "num_key_value_heads":
            value = 4 if value == config["num_attention_heads"] else min(value, 2)
        elif key in LENGTHS:
            value = max(value // 128, 32)
        elif key == "sliding_window" and value is not None:
            value = max(value // 128, 5)
        elif value not in (None, 1):
            value = SMALL.get(key, value)
        out[key] = value
    if "sliding_window_pattern" in config:
        out["sliding_window_pattern"] = 2
    return out


def write_published(name: str, folder: Path) -> dict[str, Any]:
    """Write a folder with random weights; return its config."""
    entry = published()[name]
    config = small(entry["config"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(small(entry.get("generation", {}))))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    settings = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(folder / "as written")
    for file in (folder / "as written").glob("*.safetensors"):
        file.rename(folder / file.name)
    return config
