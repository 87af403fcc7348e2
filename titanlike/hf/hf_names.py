"""Maps built-in models to equal transformers models, and their parameters to the names in folders.

Parameters and sizes have transformers' names already. To add a family: a `Counterpart` in
`FAMILIES`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from titanlike.core.config.errors import override_text
from titanlike.core.models.rope_scaling import scaling_of


@dataclass(frozen=True)
class Counterpart:
    """A transformers model that a built-in model equals.

    prefix: of names, which some folders omit. keys: sizes that its config has; renamed: those with
    another name there. repeated: keys of transformers 4 -> keys with the same value. needs: other
    sizes, which must have this value. present: sizes that must not be null or 0 -> a possible
    value. fixed: keys of its config that must have this value. stored: (pattern, replacement) from
    a parameter's name to its name in files, where # is an expert's number. transposed: a pattern of
    matrices stored as [..., in, out].
    """

    model_type: str
    architecture: str
    keys: tuple[str, ...]
    fixed: Mapping[str, Any]
    prefix: str = "model."
    renamed: Mapping[str, str] = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, Any] = field(default_factory=dict)
    stored: tuple[tuple[str, str], ...] = ()
    transposed: str | None = None

    def stored_name(self, name: str) -> str:
        """Return a parameter's name in files; "" for what only training uses."""
        if re.match(r"mtp\.|.*\.mlp\.load$", name):  # the buffer of the balance loss
            return ""
        for pattern, replacement in self.stored:
            name = re.sub(pattern, replacement, name)
        return name

    def config_json(self, sizes: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Return config.json for a model of these sizes, and sequences of `length`."""
        whole = whole_sizes(sizes)
        config: dict[str, Any] = {"model_type": self.model_type}
        config |= {"architectures": [self.architecture]}
        config |= {self.renamed.get(key, key): whole[key] for key in self.keys}
        config |= self.fixed
        if "rope_theta" in config:
            scaling = whole["rope_scaling"] or {"rope_type": "default"}
            config["max_position_embeddings"] = config["max_position_embeddings"] or length
            if scaling["rope_type"] == "yarn":  # transformers 4 computes the factor from it
                length = int(scaling["factor"] * scaling["original_max_position_embeddings"])
                config["max_position_embeddings"] = length
            # transformers 5 has an object in the place of the two keys
            config["rope_parameters"] = {"rope_theta": config["rope_theta"], **scaling}
        if pattern := config.pop("sliding_window_pattern", None):
            config["layer_types"] = _layer_types(pattern, config["num_hidden_layers"])
        return config | {key: config[same] for key, same in self.repeated.items()}

    def our_sizes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the built-in model's sizes for a transformers config."""
        values = _flat(config)
        sizes = {key: values.get(self.renamed.get(key, key)) for key in self.keys}
        return {**whole_sizes(sizes), **self.needs}

    def unsupported(self, config: Mapping[str, Any]) -> list[str]:
        """Return key=value for what a config has and the built-in model does not compute."""
        values = _flat(config)
        types = values.get("layer_types") or []
        same = types == _layer_types(values["sliding_window_pattern"], len(types))
        other = [] if same else [f"layer_types={types}"]
        try:
            scaling_of(values["rope_scaling"])
        except ValueError:
            other += [f"rope_scaling={override_text(values['rope_scaling'])}"]
        return other + [
            f"{key}={values.get(key)}"
            for key, value in {**self.fixed, "quantization_config": None}.items()
            if values.get(key) != value and key not in (*_HARMLESS, *_OF_OTHERS)
        ]


def with_older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of transformers 5 with the keys that version 4 has in the place of others."""
    kind, rope = config["model_type"], config.get("rope_parameters") or {}
    added: dict[str, Any] = {}
    if kind == "qwen3_moe" and "num_local_experts" in config:
        added["num_experts"] = config["num_local_experts"]
    if "full_attention" in rope:  # an object for each kind of layer
        added |= _rope_keys(rope["full_attention"])
        added["rope_local_base_freq"] = (rope.get("sliding_attention") or {}).get("rope_theta")
    elif rope:
        added |= _rope_keys(rope)
    if kind == "gpt_neox" and rope:
        added["rotary_emb_base"] = added["rope_theta"]
        added["rotary_pct"] = added["partial_rotary_factor"]
    if kind in ("gemma3_text", "cohere2"):
        added["sliding_window_pattern"] = _flat(config)["sliding_window_pattern"]
    return {**config, **added}


def _rope_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {"rope_type": "default", **rope}
    scaling.pop("type", None)
    added = {"rope_theta": scaling.pop("rope_theta")}
    if "partial_rotary_factor" in rope:
        added["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if scaling["rope_type"] == "longrope":  # of which three keys are allowed
        scaling = {key: rope[key] for key in ("long_factor", "short_factor")} | {"type": "longrope"}
    return added | {"rope_scaling": scaling if scaling != {"rope_type": "default"} else None}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or {})
    values = {**config, "rope_theta": rope.pop("rope_theta", None), "rope_scaling": rope or None}
    types = values.get("layer_types") or []
    return values | {"sliding_window_pattern": [*types, _FULL].index(_FULL) + 1}


def _layer_types(pattern: int, layers: int) -> list[str]:
    """Full attention in every pattern-th layer, sliding windows in the others."""
    return [_FULL if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]


# may differ: weights are the same
_HARMLESS = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout")
_DECODER = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "max_position_embeddings"),
)
_FULL = "full_attention"
_ACTIVATION = {"hidden_act": "silu", "attention_dropout": 0.0}

LLAMA = Counterpart(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=(*_DECODER, "intermediate_size"),
    needs={"qk_norm": False},
    fixed=_ACTIVATION | {"attention_bias": False, "mlp_bias": False},
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    needs={"qk_norm": True},
    fixed=_ACTIVATION | {"attention_bias": False, "sliding_window": None},
)
GPT2 = Counterpart(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    keys=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "tie_word_embeddings"),
    fixed={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_inner": None,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        # the built-in model has no dropout; a model pretrained with it is the same function
        **dict.fromkeys(_HARMLESS[:3], 0.0),
    },
    transposed=r"\.(c_attn|c_proj|c_fc)\.weight",  # transformers' Conv1D
)

_MIXTURE = (*_DECODER, "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
_PLAIN: dict[str, Any] = {"attention_bias": False, "attention_sinks": False}
_PLAIN |= {"sliding_window": None, "swiglu_limit": None}
_MIXTURE_NEEDS = {
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "bias_rate": 0.0,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "kv_lora_rank": None,
}
_MIXTURE_FIXED = _ACTIVATION | {"sliding_window": None}
_OF_EXPERT = (r"\.experts\.(\w+)$", r".experts.#.\1.weight")
# what other programs read of DeepSeek-V3's config, and transformers does not write; its blocks of
# further tokens are not read
_OF_OTHERS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}

MIXTRAL = Counterpart(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys=_MIXTURE,
    renamed={"moe_intermediate_size": "intermediate_size"},
    needs=_MIXTURE_NEEDS | _PLAIN | {"qk_norm": False, "norm_topk_prob": True},
    fixed=_MIXTURE_FIXED,
    stored=(
        *(_OF_EXPERT, (r"\.mlp\.", ".block_sparse_moe.")),
        *((r"\.gate_proj\.", ".w1."), (r"\.up_proj\.", ".w3."), (r"\.down_proj\.", ".w2.")),
    ),
)
QWEN3_MOE = Counterpart(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(*_MIXTURE, "norm_topk_prob"),
    repeated={"num_experts": "num_local_experts"},
    needs=_MIXTURE_NEEDS | _PLAIN | {"qk_norm": True},
    fixed=_MIXTURE_FIXED
    | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    stored=(_OF_EXPERT,),
)
DEEPSEEK_V3 = Counterpart(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys=(
        *(key for key in _MIXTURE if key not in ("head_dim", "num_key_value_heads")),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("rope_interleave", "intermediate_size", "norm_topk_prob"),
        *("n_shared_experts", "first_k_dense_replace"),
        *("routed_scaling_factor", "n_group", "topk_group"),
    ),
    renamed={"num_local_experts": "n_routed_experts"},
    repeated={"num_key_value_heads": "num_attention_heads"},
    needs=_PLAIN | {"scoring_func": "sigmoid", "qk_norm": False},
    present={"kv_lora_rank": 512, "n_shared_experts": 1},
    fixed=_ACTIVATION | _OF_OTHERS | {"attention_bias": False},
    stored=(_OF_EXPERT, (r"\.mlp\.bias$", ".mlp.gate.e_score_correction_bias")),
)
GPT_OSS = Counterpart(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=(*_MIXTURE, "sliding_window", "sliding_window_pattern", "swiglu_limit"),
    renamed={"moe_intermediate_size": "intermediate_size"},
    needs=_MIXTURE_NEEDS
    | {"attention_bias": True, "attention_sinks": True, "qk_norm": False, "norm_topk_prob": True},
    present={"sliding_window": 128, "swiglu_limit": 7.0},
    fixed=_ACTIVATION | {"attention_bias": True, "swiglu_alpha": 1.702},
    stored=((r"\.sinks\.weight$", ".sinks"), (r"\.mlp\.gate\.", ".mlp.router.")),
    transposed=r"\.experts\.\w+_proj$",
)

# by `model.name`
FAMILIES = {
    "llama": (LLAMA, QWEN3),
    "gpt2": (GPT2,),
    "moe": (MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS),
}


def counterpart(name: str, sizes: Mapping[str, Any]) -> Counterpart:
    """Return the transformers model that a built-in model with these arguments equals. Raises
    ValueError with the arguments that the nearest one does not support."""

    def unmet(theirs: Counterpart) -> dict[str, Any]:
        wrong = {key: value for key, value in theirs.needs.items() if sizes[key] != value}
        return wrong | {key: value for key, value in theirs.present.items() if not sizes[key]}

    nearest = min(FAMILIES[name], key=lambda theirs: len(unmet(theirs)))
    if wrong := unmet(nearest):
        has = ", ".join(f"model.{key}={sizes[key]}" for key in wrong)
        fix = " ".join(f"model.{key}={override_text(value)}" for key, value in wrong.items())
        raise ValueError(
            f"{has}: transformers' {nearest.model_type} has no such thing; train with {fix}"
        )
    return nearest


def whole_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes with a null head_dim replaced by its value, and `rope_scaling` in one
    form."""
    whole = dict(sizes)
    if "head_dim" in sizes and sizes["head_dim"] is None:
        whole["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if "rope_scaling" in sizes:
        scaling = scaling_of(sizes["rope_scaling"])
        whole["rope_scaling"] = None if scaling is None else scaling.as_config()
    return whole
