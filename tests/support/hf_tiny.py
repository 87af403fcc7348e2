"""Tiny transformers models: their configs, saved folders and original forward."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from support.models import tiny
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.hf.hf_layers import SortedExperts

transformers.logging.set_verbosity_error()
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout")
DROPOUT += ("hidden_dropout", "residual_dropout", "embedding_dropout")


def sizes(family: str, **changes: Any) -> dict[str, Any]:
    """The keys of a family's config for a tiny model without dropout."""
    config = transformers.AutoConfig.for_model(family)
    known = {*config.to_dict(), *config.attribute_map}
    known.update(inspect.signature(type(config)).parameters)
    wanted = SIZES | EXPERTS | dict.fromkeys(DROPOUT, 0.0) | changes
    found = {key: value for key, value in wanted.items() if key in known}
    if family in ("deepseek_v2", "deepseek_v3"):
        found["num_key_value_heads"] = 4
        del found["head_dim"]
    return found


def model_of(family: str, **changes: Any) -> Custom:
    config = sizes(family, **changes)
    return Custom("hf", {"family": family, "config": config, "vocab_size": 64, "max_seq_len": 32})


def tiny_hf(model: Custom, pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **more: Any) -> Config:
    return replace(tiny(pp, dp, schedule), model=model, **more)


def own(model: nn.Module) -> nn.Module:
    """The same model with transformers' class and forward, without titanlike's changes."""
    theirs = copy.deepcopy(model)
    theirs.__class__ = next(
        kind
        for kind in type(model).__mro__
        if kind.__module__.startswith("transformers") and "forward" in vars(kind)
    )
    for module in theirs.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
        vars(module).pop("warn_if_padding_and_no_attention_mask", None)
        if isinstance(module, SortedExperts):
            module.__class__ = next(
                kind for kind in type(module).__mro__ if not issubclass(kind, SortedExperts)
            )
    return theirs


def logits_by_document(model: nn.Module, ids: Tensor, documents: Tensor) -> Tensor:
    """transformers' logits of each document run separately: ids, documents [B, T] -> [B, T, V]."""
    rows = []
    for row, of in zip(ids, documents, strict=True):
        lengths = of.unique_consecutive(return_counts=True)[1].tolist()
        parts = [part[None] for part in row.split(lengths)]
        rows.append(torch.cat([model(part, use_cache=False).logits for part in parts], dim=1))
    return torch.cat(rows)


def folder_of(family: str, folder: Path, shard: str = "20KB", **changes: Any) -> nn.Module:
    """Write a folder with save_pretrained, in shards; returns the saved model."""
    config = sizes(family, **changes) | {"vocab_size": 64}
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **config)
    )
    for tensor in model.state_dict().values():  # so that norms and biases differ as well
        tensor += 0.02 * torch.randn_like(tensor)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
