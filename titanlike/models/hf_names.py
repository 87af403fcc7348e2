"""What transformers calls the sizes and tensors of our own families: data, and how to look it up.

A family is added by a `Family` in `FAMILIES`; one of ours may be several of theirs, by its sizes. Nothing else is needed to export it, to start it from
a folder, or to load it for generation. No torch, no transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Name:
    """A parameter here and there; a `*` stands for the same number in both.

    form: same; transposed (transformers' Conv1D has [in, out]); stacked: ours is [N, ...], theirs
    are N tensors, whose name has a `#` for the number; or unused: a buffer of training alone.
    """

    ours: str
    theirs: str
    form: Literal["same", "transposed", "stacked", "unused"] = "same"


@dataclass(frozen=True)
class Family:
    """A family of ours as one of transformers'.

    prefix: of names, which some folders leave out. sizes: argument of our constructor -> key in
    config.json, dotted where it is within an object. needs: arguments of ours that must have this value.
    fixed: keys that have one value here. legacy: keys of transformers 4 -> those that they repeat. length: the key of the longest sequence, where
    it is none of the sizes.
    """

    model_type: str
    architecture: str
    prefix: str
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    names: tuple[Name, ...]
    needs: Mapping[str, Any] = field(default_factory=dict)
    legacy: Mapping[str, str] | None = None
    length: str | None = None


def _both(ours: str, theirs: str, form: Any = "same") -> tuple[Name, Name]:
    """Weight and bias of a module; only a weight has two dimensions to transpose."""
    return Name(f"{ours}.weight", f"{theirs}.weight", form), Name(f"{ours}.bias", f"{theirs}.bias")


_OURS, _LLAMA, _GPT2 = "layers.*", "model.layers.*", "transformer.h.*"

_LLAMA_NAMES = (  # without the network of a block
    Name("embedding.weight", "model.embed_tokens.weight"),
    Name(f"{_OURS}.attention_norm.weight", f"{_LLAMA}.input_layernorm.weight"),
    # both rotate the two halves of a head, so q and k are the same
    Name(f"{_OURS}.attention.wq.weight", f"{_LLAMA}.self_attn.q_proj.weight"),
    Name(f"{_OURS}.attention.wk.weight", f"{_LLAMA}.self_attn.k_proj.weight"),
    Name(f"{_OURS}.attention.wv.weight", f"{_LLAMA}.self_attn.v_proj.weight"),
    Name(f"{_OURS}.attention.wo.weight", f"{_LLAMA}.self_attn.o_proj.weight"),
    Name("norm.weight", "model.norm.weight"),
    Name("head.weight", "lm_head.weight"),
)
_LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "rope_theta": "rope_parameters.rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    sizes=_LLAMA_SIZES | {"ffn_dim": "intermediate_size"},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters.rope_type": "default",
    },
    legacy={"rope_theta": "rope_parameters.rope_theta"},
    length="max_position_embeddings",
    names=(
        *_LLAMA_NAMES,
        Name(f"{_OURS}.ffn_norm.weight", f"{_LLAMA}.post_attention_layernorm.weight"),
        Name(f"{_OURS}.ffn.gate.weight", f"{_LLAMA}.mlp.gate_proj.weight"),
        Name(f"{_OURS}.ffn.up.weight", f"{_LLAMA}.mlp.up_proj.weight"),
        Name(f"{_OURS}.ffn.down.weight", f"{_LLAMA}.mlp.down_proj.weight"),
    ),
)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    sizes={
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "max_seq_len": "n_positions",
        "tied": "tie_word_embeddings",
    },
    fixed={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_inner": None,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        # it has no dropout; what was pretrained with some is the same function without
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    names=(
        Name("embedding.tokens.weight", "transformer.wte.weight"),
        Name("embedding.positions.weight", "transformer.wpe.weight"),
        *_both(f"{_OURS}.attention_norm", f"{_GPT2}.ln_1"),
        *_both(f"{_OURS}.attention.qkv", f"{_GPT2}.attn.c_attn", "transposed"),
        *_both(f"{_OURS}.attention.out", f"{_GPT2}.attn.c_proj", "transposed"),
        *_both(f"{_OURS}.ffn_norm", f"{_GPT2}.ln_2"),
        *_both(f"{_OURS}.up", f"{_GPT2}.mlp.c_fc", "transposed"),
        *_both(f"{_OURS}.down", f"{_GPT2}.mlp.c_proj", "transposed"),
        *_both("norm", "transformer.ln_f"),
        Name("head.weight", "lm_head.weight"),
    ),
)

_MOE_SIZES = _LLAMA_SIZES | {
    "head_dim": "head_dim",
    "experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
}
_MOE_NEEDS = {
    "scores": "softmax",
    "scale": 1.0,
    "groups": 1,
    "bias_rate": 0.0,
    "shared_experts": 0,
    "dense_layers": 0,
}
_MOE_FIXED = {
    "hidden_act": "silu",
    "sliding_window": None,
    "attention_dropout": 0.0,
    "rope_parameters.rope_type": "default",
}


def _moe_names(block: str, gate: str, up: str, down: str) -> tuple[Name, ...]:
    """block: transformers' name of the network; the others: of an expert's matrices."""
    expert = f"{_LLAMA}.{block}.experts.#"
    return (
        *_LLAMA_NAMES,
        Name(f"{_OURS}.moe_norm.weight", f"{_LLAMA}.post_attention_layernorm.weight"),
        Name(f"{_OURS}.moe.router.weight", f"{_LLAMA}.{block}.gate.weight"),
        Name(f"{_OURS}.moe.experts.gate", f"{expert}.{gate}.weight", "stacked"),
        Name(f"{_OURS}.moe.experts.up", f"{expert}.{up}.weight", "stacked"),
        Name(f"{_OURS}.moe.experts.down", f"{expert}.{down}.weight", "stacked"),
        Name(f"{_OURS}.moe.load", "", "unused"),  # of the balance loss
    )


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    prefix="model.",
    sizes=_MOE_SIZES | {"expert_dim": "intermediate_size"},
    needs=_MOE_NEEDS | {"qk_norm": False, "renormalize": True},
    fixed=_MOE_FIXED,
    legacy={"rope_theta": "rope_parameters.rope_theta"},
    length="max_position_embeddings",
    names=_moe_names("block_sparse_moe", "w1", "w3", "w2"),
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    prefix="model.",
    sizes=_MOE_SIZES | {"expert_dim": "moe_intermediate_size", "renormalize": "norm_topk_prob"},
    needs=_MOE_NEEDS | {"qk_norm": True},
    fixed=_MOE_FIXED | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    legacy={
        "rope_theta": "rope_parameters.rope_theta",
        "num_experts": "num_local_experts",
    },
    length="max_position_embeddings",
    names=(
        *_moe_names("mlp", "gate_proj", "up_proj", "down_proj"),
        Name(f"{_OURS}.attention.q_norm.weight", f"{_LLAMA}.self_attn.q_norm.weight"),
        Name(f"{_OURS}.attention.k_norm.weight", f"{_LLAMA}.self_attn.k_norm.weight"),
    ),
)

# by `model.name`
FAMILIES = {"llama": (LLAMA,), "gpt2": (GPT2,), "moe": (MIXTRAL, QWEN3_MOE)}
_HARMLESS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # differences that change no weight


def family_of(name: str, sizes: Mapping[str, Any]) -> Family:
    """Which family of theirs a model of ours is; sizes: all of its arguments. Raises ValueError, with
    the arguments that the nearest one does not have."""
    nearest = min(FAMILIES[name], key=lambda family: len(_unmet(family, sizes)))
    if unmet := _unmet(nearest, sizes):
        has = ", ".join(f"model.{key}={sizes[key]}" for key in unmet)
        fix = " ".join(f"model.{key}={str(value).lower()}" for key, value in unmet.items())
        raise ValueError(
            f"{has}: transformers' {nearest.model_type} has no such thing; train with {fix}"
        )
    return nearest


def _unmet(family: Family, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in family.needs.items() if sizes[key] != value}


def whole_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """With the head_dim that null stands for."""
    if sizes.get("head_dim", 0) is None and sizes.get("dim") and sizes.get("heads"):
        return {**sizes, "head_dim": sizes["dim"] // sizes["heads"]}
    return dict(sizes)


def their_name(family: Family, ours: str) -> Name:
    """A parameter's names with their numbers, and its form. Raises KeyError."""
    for name in family.names:
        found = re.fullmatch(re.escape(name.ours).replace(r"\*", r"(\d+)"), ours)
        if found:
            return Name(ours, _filled(name.theirs, found.groups()), name.form)
    raise KeyError(ours)


def _filled(pattern: str, numbers: Iterable[str]) -> str:
    rest = iter(numbers)
    return re.sub(r"\*", lambda _: next(rest), pattern)


def their_config(family: Family, sizes: Mapping[str, Any], length: int) -> dict[str, Any]:
    """config.json for a model of these arguments, all of `family.sizes`, and of sequences of `length`."""
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
    }
    sizes = whole_sizes(sizes)
    values = {theirs: sizes[ours] for ours, theirs in family.sizes.items()} | {**family.fixed}
    for key, value in values.items():
        *objects, last = key.split(".")
        place = config
        for part in objects:
            place = place.setdefault(part, {})
        place[last] = value
    if family.length is not None:
        config[family.length] = length
    for key, same in (family.legacy or {}).items():
        config[key] = value_at(config, same)
    return config


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def our_sizes(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of our constructor that a config of transformers asks for."""
    sizes = {ours: value_at(config, theirs) for ours, theirs in family.sizes.items()}
    return {**whole_sizes(sizes), **family.needs}


def unsupported(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """key=value of what a config asks for and our family does not compute."""
    for key, value in family.fixed.items():
        found = value_at(config, key)
        if found != value and key not in _HARMLESS:
            yield f"{key}={found}"
