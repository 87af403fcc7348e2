"""Tensor-parallel plans of transformers' models.

transformers writes a plan into a config (`base_model_tp_plan`) and its class (`_tp_plan`), with its
own styles. It is translated to `techniques/tp/plan.py`'s, with what it lacks: queries sharded by
heads, keys and values repeated if there are fewer heads than ranks, embedding and head sharded over
the vocabulary, and one collective for what q, k and v (or gate and up) share. Fused layers, which
transformers gathers or has no plan for, are sharded matrix by matrix.

Activations between sharded layers stay full: transformers' forwards read lengths from them. A plan
in a model's YAML may shard them (`sequence`) if a forward does not.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.distributed.placement import style_of
from titanlike.techniques.tp.plan import TRANSFORMERS, Entry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_FUSED_HEADS = ("qkv_proj", "c_attn", "query_key_value")  # q, k and v in one matrix
_TAKES_WHOLE = ("colwise", "colwise_kv", "colwise_gather")
_LLAMA = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
# plans for families without one in transformers
_OWN: dict[str, Any] = {
    "gpt2": {
        "h.*.attn.c_attn": {"packed_colwise": 3},
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "hunyuan_v1_dense": _LLAMA,
    "opt": {
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
    "persimmon": {
        "layers.*.self_attn.query_key_value": "colwise",
        "layers.*.self_attn.dense": "rowwise",
        "layers.*.mlp.dense_h_to_4h": "colwise",
        "layers.*.mlp.dense_4h_to_h": "rowwise",
    },
    "stablelm": _LLAMA,
}
# per-head norms and activations with weights, which plans omit
_BETWEEN = re.compile(r"self_attn\.(q|k|query|key)_layernorm|mlp\.act_fn")
_EXPERTS = "experts are not divided by tp"


def has_transformers_plan(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether the model is a transformers model."""
    return hasattr(getattr(model, "config", None), "base_model_tp_plan")


def sets_sizes(model: nn.Module) -> bool:
    """Whether titanlike sets the sizes that attention modules read; a user's transformers model
    sets them itself."""
    return getattr(model, "sizes_of_rank", False)


def transformers_plan(model: PreTrainedModel, size: int) -> dict[str, Any]:
    """Pattern -> style, for `plan.parse_plan`; empty if transformers has no plan for the family.

    model: full, on meta; size: ranks. Raises ConfigError if they cannot share its heads.
    """
    settings, local = model.config, sets_sizes(model)
    base: dict[str, Any] = getattr(settings, "base_model_tp_plan", None) or {}
    if local:
        base = base or _OWN.get(settings.model_type, {})
    if not base:
        return {}
    plan = _translated(model, base, size)
    heads, kv_heads, width = _heads(settings)
    if local:  # shard fused layers matrix by matrix, which transformers gathers
        rows: dict[str, Any] = {"gate_up_proj": 2}
        if settings.model_type == "phi3":
            rows["qkv_proj"] = [heads * width, kv_heads * width, kv_heads * width]
        for pattern, style in list(plan.items()):
            parent, _, last = pattern.rpartition(".")
            if style == "colwise_gather" and last in rows:
                plan[pattern] = {"packed_colwise": rows[last]}
                behind = f"{parent}.{'down_proj' if last == 'gate_up_proj' else 'o_proj'}"
                assert plan[behind] == "rowwise_split", behind
                plan[behind] = "rowwise"
    # shard queries, keys and values by heads
    fused = [
        pattern
        for pattern, style in plan.items()
        if isinstance(style, Mapping) and pattern.rpartition(".")[2] in _FUSED_HEADS
    ]
    repeats = local and not fused
    kv_style = {"colwise_kv" if repeats else "colwise": width}
    by_head = {"q_proj": {"colwise": width}, "k_proj": kv_style, "v_proj": kv_style}
    by_head["query_key_value"] = {"colwise": 3 * width}
    separate = {
        pattern: by_head[last]
        for pattern, style in plan.items()
        if style == "colwise" and (last := pattern.rpartition(".")[2]) in by_head
    }
    plan |= separate

    def share(ranks: int) -> bool:
        shared = kv_heads % ranks == 0 or repeats and ranks % kv_heads == 0
        return heads % ranks == 0 and shared

    if (fused or separate) and not share(size):
        keys = [("num_attention_heads", heads), ("num_key_value_heads", kv_heads)]
        keys = keys[: 1 if kv_heads == heads else 2]
        named = settings.attribute_map
        shown = " and ".join(f"{named.get(key, key)}={value}" for key, value in keys)
        fits = next(ranks for ranks in range(size - 1, 0, -1) if share(ranks))
        reason = f"so many ranks cannot share the heads of model.config: {shown}"
        raise ConfigError([Problem("tp", size, reason, f"tp={fits}")])
    # modules in which several sharded layers take the same activations
    taking = Counter(
        pattern.rpartition(".")[0]
        for pattern, style in plan.items()
        if (next(iter(style)) if isinstance(style, Mapping) else style) in _TAKES_WHOLE
    )
    plan = {parent: "gather" for parent, count in taking.items() if count > 1} | plan
    # embedding and head, which may be tied
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    modules = dict(model.named_modules())
    vocabulary = {name: "vocab" for name, m in modules.items() if any(m is end for end in ends)}
    return plan | _between(model, plan, size) | vocabulary


def set_local_sizes(model: nn.Module) -> None:
    """Set the local numbers of heads that forwards of a sharded model read from attention modules.

    Raises ConfigError if keys are not sharded as queries are.
    """
    configs: dict[int, PreTrainedConfig] = {}
    for name, module in model.named_modules():
        q, k = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
        if q is not None and k is not None:
            _set_heads(name, module, q, k)
        elif type(module).__name__ == "PersimmonAttention":
            module.num_heads = _output_features(module.query_key_value) // (3 * module.head_dim)
        elif type(module).__name__ == "GPT2Attention":
            module.split_size = _output_features(module.c_attn) // 3
        elif type(module).__name__ == "Phi3Attention":
            settings: PreTrainedConfig = module.config
            heads, kv_heads, width = _heads(settings)
            size = (heads + 2 * kv_heads) * width // _output_features(module.qkv_proj)
            if size > 1:
                module.num_key_value_heads //= size
                local = configs.setdefault(id(settings), copy.copy(settings))
                local.num_attention_heads = settings.num_attention_heads // size
                module.config = local


def _set_heads(name: str, attention: nn.Module, q: nn.Module, k: nn.Module) -> None:
    if _is_divided(q) != _is_divided(k):
        left = "k_proj" if _is_divided(q) else "q_proj"
        fix = "q, k and v divided alike"
        raise ConfigError([Problem("model.tp_plan", "", f"{name}.{left} is whole", fix)])
    if not _is_divided(q):
        return
    queries, keys = _output_features(q), _output_features(k)
    sizes = {"num_key_value_groups": queries // keys}
    if (width := getattr(attention, "head_dim", None)) is not None:
        sizes["num_heads"] = queries // width
        sizes["num_key_value_heads"] = keys // width
    for key, value in sizes.items():
        if hasattr(attention, key):
            setattr(attention, key, value)


def _is_divided(linear: nn.Module) -> bool:
    return style_of(linear) in ("colwise", "colwise_kv")


def _output_features(linear: Any) -> int:
    """The number of features that a linear layer of a sharded model returns."""
    if style_of(linear) == "colwise_gather":
        return linear.tp_rows
    return linear.nf if hasattr(linear, "nf") else linear.out_features


def _translated(model: PreTrainedModel, base: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Translate transformers' styles, without entries for modules that this model lacks: a plan is
    for all sizes of a family. Entries that name parameters stay, and are refused. Raises
    ConfigError."""
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    plan: dict[str, Any] = {}
    for pattern, style in base.items():
        pattern = f"{model.base_model_prefix}.{pattern}"
        if not any(Entry(pattern, "").matches(name) for name in names):
            continue
        if style == "packed_colwise" and "experts" not in pattern:
            style = {style: 2}
        elif isinstance(style, str):
            if style not in TRANSFORMERS or "experts" in pattern:
                why = _EXPERTS if "experts" in pattern else "which is not known here"
                reason = f"transformers' plan of {model.config.model_type} has {pattern}: {style}"
                fix = "tp=1, or a plan as tp_plan: in a YAML file that leaves it out: it is whole then"
                raise ConfigError([Problem("tp", size, f"{reason}; {why}", fix)])
            style = TRANSFORMERS[style]
        # its input is unsharded, whatever transformers does around it
        plan[pattern] = "replicate" if style == "sequence" else style
    return plan


def _between(model: PreTrainedModel, plan: Mapping[str, Any], size: int) -> dict[str, str]:
    """The modules of `_BETWEEN`, of which each rank has its heads or features. Raises ConfigError
    for other weights between sharded layers without an entry."""
    divided = {
        pattern.rpartition(".")[0]
        for pattern, style in plan.items()
        if style == "colwise" or isinstance(style, Mapping)
    }
    regions = [pattern for pattern in divided if plan.get(pattern) == "gather"]
    between: dict[str, str] = {}
    for name, module in model.named_modules():
        parameter = next(module.parameters(recurse=False), None)
        if parameter is None or any(Entry(pattern, "").matches(name) for pattern in plan):
            continue
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(len(parts))]
        if _BETWEEN.fullmatch(".".join(parts[-2:])) and parameter.dim() == 1:
            between[re.sub(r"\.\d+\.", ".*.", name)] = "replicate_sum"
        elif any(Entry(region, "").matches(path) for region in regions for path in above):
            family = model.config.model_type
            reason = f"transformers' plan of {family} leaves out {name}, between divided layers"
            fix = "tp=1 with pp or dp, or a config without it"
            raise ConfigError([Problem("tp", size, reason, fix)])
    return between


def _heads(settings: PreTrainedConfig) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size)."""
    heads = settings.num_attention_heads
    width = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    return heads, getattr(settings, "num_key_value_heads", None) or heads, width
