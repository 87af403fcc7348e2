"""What transformers calls the sizes and tensors of our own families: data, and how to look it up.

A family is added by a `Family` in `FAMILIES`. Nothing else is needed to export it, to start it from
a folder, or to load it for generation. No torch, no transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Name:
    """A parameter here and there; a `*` stands for the same number in both.

    form: same; transposed (transformers' Conv1D has [in, out]); or stacked: ours is [N, ...], theirs
    are N tensors, whose name has a `#` for the number.
    """

    ours: str
    theirs: str
    form: Literal["same", "transposed", "stacked"] = "same"


@dataclass(frozen=True)
class Family:
    """A family of ours as one of transformers'.

    prefix: of names, which some folders leave out. sizes: argument of our constructor -> key in
    config.json, dotted where it is within an object. fixed: keys that have one value here. legacy:
    keys of transformers 4 -> those that they repeat. length: the key of the longest sequence, where
    it is none of the sizes.
    """

    model_type: str
    architecture: str
    prefix: str
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    names: tuple[Name, ...]
    legacy: Mapping[str, str] | None = None
    length: str | None = None


def _both(ours: str, theirs: str, form: Any = "same") -> tuple[Name, Name]:
    """Weight and bias of a module; only a weight has two dimensions to transpose."""
    return Name(f"{ours}.weight", f"{theirs}.weight", form), Name(f"{ours}.bias", f"{theirs}.bias")


_OURS, _LLAMA, _GPT2 = "layers.*", "model.layers.*", "transformer.h.*"

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    sizes={
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn_dim": "intermediate_size",
        "rope_theta": "rope_parameters.rope_theta",
        "norm_eps": "rms_norm_eps",
        "tied": "tie_word_embeddings",
    },
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters.rope_type": "default",
    },
    legacy={"rope_theta": "rope_parameters.rope_theta"},
    length="max_position_embeddings",
    names=(
        Name("embedding.weight", "model.embed_tokens.weight"),
        Name(f"{_OURS}.attention_norm.weight", f"{_LLAMA}.input_layernorm.weight"),
        # both rotate the two halves of a head, so q and k are the same
        Name(f"{_OURS}.attention.wq.weight", f"{_LLAMA}.self_attn.q_proj.weight"),
        Name(f"{_OURS}.attention.wk.weight", f"{_LLAMA}.self_attn.k_proj.weight"),
        Name(f"{_OURS}.attention.wv.weight", f"{_LLAMA}.self_attn.v_proj.weight"),
        Name(f"{_OURS}.attention.wo.weight", f"{_LLAMA}.self_attn.o_proj.weight"),
        Name(f"{_OURS}.ffn_norm.weight", f"{_LLAMA}.post_attention_layernorm.weight"),
        Name(f"{_OURS}.ffn.gate.weight", f"{_LLAMA}.mlp.gate_proj.weight"),
        Name(f"{_OURS}.ffn.up.weight", f"{_LLAMA}.mlp.up_proj.weight"),
        Name(f"{_OURS}.ffn.down.weight", f"{_LLAMA}.mlp.down_proj.weight"),
        Name("norm.weight", "model.norm.weight"),
        Name("head.weight", "lm_head.weight"),
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

# by `model.name`
FAMILIES = {"llama": LLAMA, "gpt2": GPT2}
_HARMLESS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # differences that change no weight


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
    return {ours: value_at(config, theirs) for ours, theirs in family.sizes.items()}


def unsupported(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """key=value of what a config asks for and our family does not compute."""
    for key, value in family.fixed.items():
        found = value_at(config, key)
        if found != value and key not in _HARMLESS:
            yield f"{key}={found}"
