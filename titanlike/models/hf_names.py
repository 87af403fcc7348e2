"""Maps built-in models to equal transformers models, and their parameters to the names in folders.

Parameters and sizes have transformers' names already. To add a family: a `Counterpart` in
`FAMILIES`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titanlike.config.errors import override_text
from titanlike.models.yarn import Yarn, yarn_of


@dataclass(frozen=True)
class Counterpart:
    """A transformers model that a built-in model equals.

    prefix: of names, which some folders omit. keys: sizes that its config has; renamed: those with
    another name there. repeated: keys of transformers 4 -> keys with the same value. needs: other
    sizes, which must have this value. present: sizes that must not be null or 0 -> a possible
    value. fixed: keys of its config that must have this value, or one of a tuple. stored: (pattern,
    replacement) from a parameter's name to its name in files, where # is an expert's number; "" =
    not stored. transposed: a pattern of matrices stored as [..., in, out].
    """

    model_type: str
    architecture: str
    prefix: str
    keys: tuple[str, ...]
    fixed: Mapping[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, Any] = field(default_factory=dict)
    stored: tuple[tuple[str, str], ...] = ()
    transposed: str | None = None

    def stored_name(self, name: str) -> str:
        """Return a parameter's name in files."""
        for pattern, replacement in self.stored:
            name = re.sub(pattern, replacement, name)
        return name

    def config_json(self, sizes: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Return config.json for a model of these sizes, and sequences of `length`."""
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }
        config |= {self.renamed.get(key, key): whole_sizes(sizes)[key] for key in self.keys}
        config |= self.fixed
        if "rope_theta" in config:  # transformers 4; version 5 has an object
            kind = "yarn" if config.get("rope_scaling") else "default"
            rope = {"rope_theta": config["rope_theta"], "rope_type": kind}
            rope |= config.get("rope_scaling") or {}
            config |= {"rope_parameters": rope, "max_position_embeddings": length}
            config = {key: value for key, value in config.items() if key not in _OF_ROPE}
        if pattern := config.pop("sliding_window_pattern", None):
            config["layer_types"] = _layer_types(pattern, config["num_hidden_layers"])
        return config | {key: config[same] for key, same in self.repeated.items()}

    def our_sizes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the built-in model's sizes for a transformers config."""
        values = _flat(config)
        sizes = {key: values.get(self.renamed.get(key, key)) for key in self.keys}
        if "rope_scaling" in sizes:
            yarn = {key: values[key] for key in Yarn._fields if values.get(key) is not None}
            sizes["rope_scaling"] = yarn if values["rope_type"] == "yarn" else None
        return {**whole_sizes(sizes), **self.needs}

    def unsupported(self, config: Mapping[str, Any]) -> list[str]:
        """Return key=value for what a config has and the built-in model does not compute."""
        values = _flat(config)
        types = values.get("layer_types") or []
        same = types == _layer_types(values["sliding_window_pattern"], len(types))
        other = [] if same else [f"layer_types={types}"]
        return other + [
            f"{key}={values.get(key)}"
            for key, value in self.fixed.items()
            if values.get(key) not in (value if isinstance(value, tuple) else (value,))
            and key not in (*_HARMLESS, *_OF_OTHERS)
        ]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    values = {**config, **(config.get("rope_parameters") or {})}
    types = values.get("layer_types") or []
    return values | {"sliding_window_pattern": [*types, _FULL].index(_FULL) + 1}


def _layer_types(pattern: int, layers: int) -> list[str]:
    """Full attention in every pattern-th layer, sliding windows in the others."""
    return [_FULL if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]


_HARMLESS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # may differ: weights are the same
_DECODER = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings"),
)
_FULL = "full_attention"
_ROPE = {"hidden_act": "silu", "rope_type": "default"}
_OF_ROPE = ("rope_type", "attention_factor", "rope_scaling")  # keys of the rope object
_YARN = _ROPE | {"rope_type": ("default", "yarn"), "attention_factor": None}

_MTP = (r"mtp\..*", "")  # blocks that only training uses

LLAMA = Counterpart(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    keys=(*_DECODER, "intermediate_size"),
    fixed=_ROPE | {"attention_bias": False, "mlp_bias": False},
    stored=(_MTP,),
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
        **dict.fromkeys(_HARMLESS, 0.0),
    },
    transposed=r"\.(c_attn|c_proj|c_fc)\.weight",  # transformers' Conv1D
)

_MIXTURE = (*_DECODER, "head_dim", "num_local_experts", "num_experts_per_tok")
_MIXTURE += ("moe_intermediate_size",)
_PLAIN: dict[str, Any] = {"attention_bias": False, "attention_sinks": False}
_PLAIN |= {"sliding_window": None, "swiglu_limit": None}
_UNSCALED = _PLAIN | {"rope_scaling": None}
_MIXTURE_NEEDS = {
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "bias_rate": 0.0,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "kv_lora_rank": None,
}
_MIXTURE_FIXED = _ROPE | {"sliding_window": None, "attention_dropout": 0.0}
_OF_EXPERT = (r"\.experts\.(\w+)$", r".experts.#.\1.weight")
_BUFFER = (r".*\.mlp\.load", "")  # a buffer of the balance loss
# what other programs read of DeepSeek-V3's config, and transformers does not write; its blocks of
# further tokens are not read
_OF_OTHERS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}

MIXTRAL = Counterpart(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    prefix="model.",
    keys=_MIXTURE,
    renamed={"moe_intermediate_size": "intermediate_size"},
    needs=_MIXTURE_NEEDS | _UNSCALED | {"qk_norm": False, "norm_topk_prob": True},
    fixed=_MIXTURE_FIXED,
    stored=(
        *(_MTP, _BUFFER, _OF_EXPERT, (r"\.mlp\.", ".block_sparse_moe.")),
        *((r"\.gate_proj\.", ".w1."), (r"\.up_proj\.", ".w3."), (r"\.down_proj\.", ".w2.")),
    ),
)
QWEN3_MOE = Counterpart(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    prefix="model.",
    keys=(*_MIXTURE, "norm_topk_prob"),
    repeated={"num_experts": "num_local_experts"},
    needs=_MIXTURE_NEEDS | _UNSCALED | {"qk_norm": True},
    fixed=_MIXTURE_FIXED
    | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    stored=(_MTP, _BUFFER, _OF_EXPERT),
)
DEEPSEEK_V3 = Counterpart(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    prefix="model.",
    keys=(
        *(key for key in _MIXTURE if key not in ("head_dim", "num_key_value_heads")),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("rope_interleave", "rope_scaling", "intermediate_size", "norm_topk_prob"),
        *("n_shared_experts", "first_k_dense_replace"),
        *("routed_scaling_factor", "n_group", "topk_group"),
    ),
    renamed={"num_local_experts": "n_routed_experts"},
    repeated={"num_key_value_heads": "num_attention_heads"},
    needs=_PLAIN | {"scoring_func": "sigmoid", "qk_norm": False},
    present={"kv_lora_rank": 512, "n_shared_experts": 1},
    fixed=_YARN | _OF_OTHERS | {"attention_bias": False, "attention_dropout": 0.0},
    stored=(_MTP, _BUFFER, _OF_EXPERT, (r"\.mlp\.bias$", ".mlp.gate.e_score_correction_bias")),
)
GPT_OSS = Counterpart(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    prefix="model.",
    keys=(*_MIXTURE, "rope_scaling", "sliding_window", "sliding_window_pattern", "swiglu_limit"),
    renamed={"moe_intermediate_size": "intermediate_size"},
    needs=_MIXTURE_NEEDS
    | {"attention_bias": True, "attention_sinks": True, "qk_norm": False, "norm_topk_prob": True},
    present={"sliding_window": 128, "swiglu_limit": 7.0},
    fixed=_YARN | {"attention_bias": True, "attention_dropout": 0.0, "swiglu_alpha": 1.702},
    stored=(_MTP, _BUFFER, (r"\.sinks\.weight$", ".sinks"), (r"\.mlp\.gate\.", ".mlp.router.")),
    transposed=r"\.experts\.\w+_proj$",
)

# by `model.name`
FAMILIES = {"llama": (LLAMA,), "gpt2": (GPT2,), "moe": (MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS)}


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
    """Return the sizes with a null head_dim replaced by its value, and all keys of `rope_scaling`."""
    whole = dict(sizes)
    if "head_dim" in sizes and sizes["head_dim"] is None:
        whole["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if yarn := yarn_of(sizes.get("rope_scaling")):
        whole["rope_scaling"] = yarn._asdict()
    return whole
