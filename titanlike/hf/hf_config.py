"""Configs of transformers models: the supported families, and the user's keys applied to one."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.core.config.errors import nearest, override_text
from titanlike.core.config.files import read_object
from titanlike.hf.hf_names import with_older_keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# model_type, in transformers, of the families that are tested.
_TESTED = """
    apertus arcee bloom cohere cohere2 cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 exaone4 falcon
    flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss
    granite granitemoe granitemoeshared helium hunyuan_v1_dense llama minimax_m2 ministral
    ministral3 mistral mixtral mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon
    phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma
    """
_MOST_LAYERS, _MOST_COUNT = 2_000, 65_536  # of a folder's config
FAMILIES = tuple(_TESTED.split())
_SCANS = "its layers scan over the sequence with kernels that are neither split nor packed here"
_CHUNKS = "its attention in chunks is not rebuilt here"
_OLDER_KEYS = {"rope_theta", "rope_scaling"}  # of transformers 4, which version 5 reads, too
# Families that are known not to work -> reason.
REFUSED = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2"), _SCANS),
    **dict.fromkeys(("qwen3_next", "minimax", "recurrent_gemma"), _SCANS),
    **dict.fromkeys(("llama4_text", "llama4"), _CHUNKS),
    "phimoe": "no gradient reaches its router",
    "biogpt": "it draws its layers at random",
    "lfm2": "its convolutions reach across documents",
    "gemma3": "it has images; its text model is family gemma3_text",
}


def settings_of(
    transformers: Any,
    path: str | None,
    family: str | None,
    config: dict[str, Any],
    vocab_size: int | None,
    max_seq_len: int | None,
) -> PreTrainedConfig:
    """transformers' config for `hf`'s arguments. Raises ValueError with one argument per
    problem."""
    if (path is None) == (family is None):
        reason = "give a folder or a family" if path is None else "give model.path or model.family"
        raise ValueError(f"path={path or 'null'}: {reason}; write model.family=llama")
    if path is not None:
        settings = read_config(transformers, path)
        _check_family(settings.model_type, "path", path)
    else:
        assert family is not None
        _check_family(family, "family", family)
        settings = transformers.AutoConfig.for_model(family)
        _add_sizes_of_data(settings, config, vocab_size, max_seq_len)
    problems, keys = [], {*settings.to_dict(), *settings.attribute_map}
    keys |= _OLDER_KEYS if "rope_parameters" in keys else set()
    for key in config.keys() - keys - inspect.signature(type(settings)).parameters.keys():
        near, value = nearest(key, keys), override_text(config[key])
        fix = f"; write model.config.{near}={value}" if near else ""
        reason = f"{settings.model_type} has no such key in transformers"
        problems.append(f"model.config.{key}={value}: {reason}{fix}")
    if problems:
        raise ValueError(*problems)
    plain = settings.to_dict() if path else {}
    changes = {settings.attribute_map.get(key, key): value for key, value in config.items()}
    if "layer_types" in plain and {"num_hidden_layers", "sliding_window"} & changes.keys():
        plain.pop("layer_types")  # its length is the number of layers
    if _OLDER_KEYS & changes.keys() and plain:
        plain = with_older_keys(plain)
        del plain["rope_parameters"]  # which would count more
    try:
        settings = type(settings)(**{**plain, **changes})
    except Exception as error:  # transformers checks types and sizes with its own errors
        raise ValueError(f"model.config={override_text(config)}: {_line(error)}") from None
    if problems := _untrainable(settings, path, vocab_size, max_seq_len):
        raise ValueError(*problems)
    return settings


def read_config(transformers: Any, path: str) -> PreTrainedConfig:
    """The config of a folder; for a model with images, its text model's. Raises ValueError."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        if folder.is_dir():
            reason = "has no config.json; write model.path=..., a folder that has one"
        elif path.count("/") == 1 and not path.startswith((".", "/", "~")):
            reason = "is not a folder, and nothing is downloaded here; write model.path=FOLDER "
            reason += f"after hf download {path} --local-dir FOLDER"
        else:
            reason = "is not a folder; write model.path=..., one that save_pretrained wrote"
        raise ValueError(f"path={path}: {reason}")
    local = {"local_files_only": True, "trust_remote_code": False}  # None asks on stdin
    try:
        check_sizes(folder)
        settings = transformers.AutoConfig.from_pretrained(folder, **local)
    except (ValueError, OSError) as error:
        raise ValueError(f"path={path}: its config.json: {_line(error)}") from None
    return settings.get_text_config() if settings.model_type in FAMILIES else settings


def check_sizes(folder: Path) -> None:
    """Check the counts in a folder's config.json and generation_config.json: building a model of
    10^7 layers, or searching with as many beams, would not end. Raises ValueError, OSError."""
    for name in ("config.json", "generation_config.json"):
        parts = [read_object(folder / name)] if (folder / name).exists() else []
        while parts:
            part = parts.pop()
            parts += [value for value in part.values() if isinstance(value, dict)]
            for key, value in part.items():
                most = _MOST_LAYERS if "layer" in key else _MOST_COUNT
                if is_count(key) and isinstance(value, int | float) and not 0 <= value <= most:
                    raise ValueError(f"{name}: {key}={value} is more than {most:,} (or below 0)")


def is_count(key: str) -> bool:
    """Return whether a size is the number of parts that are built or run one by one."""
    parts = ("layer", "head", "expert", "beam", "group")
    return key.startswith(("num_", "n_")) and any(part in key for part in parts)


def _check_family(family: str, key: str, value: str) -> None:
    if family in REFUSED:
        raise ValueError(f"{key}={value}: {family} is refused: {REFUSED[family]}")
    if family not in FAMILIES:
        near = nearest(family, FAMILIES) if key == "family" else None
        tested = f"is not among the families that are tested here ({', '.join(FAMILIES)})"
        fix = f"; write model.family={near}" if near else ""
        raise ValueError(f"{key}={value}: {family} {tested}{fix}")


def _add_sizes_of_data(
    settings: PreTrainedConfig,
    config: dict[str, Any],
    vocab_size: int | None,
    max_seq_len: int | None,
) -> None:
    """Set sizes that depend on the data in `config`, unless they are set."""
    configured = {settings.attribute_map.get(key, key) for key in config}
    keys = {*settings.to_dict(), *settings.attribute_map}
    for key, value in (("vocab_size", vocab_size), ("max_position_embeddings", max_seq_len)):
        own_key = settings.attribute_map.get(key, key)
        if value is not None and own_key not in configured and key in keys:
            config[key] = value
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):  # of the family's tokenizer
        token = getattr(settings, key, None)
        outside = type(token) is int and token >= config.get("vocab_size", settings.vocab_size)
        if outside and key not in configured:
            config[key] = None


def _untrainable(
    settings: PreTrainedConfig, path: str | None, vocab_size: int | None, max_seq_len: int | None
) -> list[str]:
    """Problems with what no layout can train, and with sizes that the data exceed."""
    problems = []
    if getattr(settings, "quantization_config", None):
        problems.append(f"path={path}: its weights are quantized; write a folder in bf16 or fp32")
    if getattr(settings, "add_cross_attention", False) or not getattr(settings, "is_causal", True):
        problems.append("model.config.is_causal=false: only decoders are trained here")
    for key, off, reason in (
        ("use_bidirectional_attention", False, "only decoders are trained here"),
        ("output_router_logits", False, "the loss that balances experts is not added here"),
        ("layerdrop", 0.0, "a stage cannot skip its layers"),
    ):
        if value := getattr(settings, key, off):
            text, write = override_text(value), f"model.config.{key}={override_text(off)}"
            problems.append(f"model.config.{key}={text}: {reason}; write {write}")
    vocabulary, longest = settings.vocab_size, getattr(settings, "max_position_embeddings", None)
    if vocab_size is not None and vocabulary < vocab_size:
        reason = f"smaller than the {vocab_size} token ids of the data"
        problems.append(
            f"model.config.vocab_size={vocabulary}: is {reason}; write "
            f"model.config.vocab_size={vocab_size}"
            if path is None
            else f"path={path}: its vocabulary of {vocabulary} is {reason}; use the tokenizer of the "
            "same folder"
        )
    fixed = longest_with_fixed_frequencies(settings)
    if max_seq_len is not None and fixed is not None and fixed < max_seq_len:
        problems.append(
            f"seq_len={max_seq_len}: its rotary frequencies change with the longest sequence of a "
            f"batch beyond {fixed} tokens; write seq_len={fixed}"
        )
    elif max_seq_len is not None and longest is not None and longest < max_seq_len:
        problems.append(
            f"seq_len={max_seq_len}: is longer than the max_position_embeddings={longest} of the "
            f"model; write seq_len={longest} or model.config.max_position_embeddings={max_seq_len}"
        )
    return problems


def longest_with_fixed_frequencies(settings: PreTrainedConfig) -> int | None:
    """Return the tokens beyond which a sequence's length changes rotary frequencies; None = any."""
    found = getattr(settings, "rope_parameters", None) or {}
    lengths = []
    for rope in (found, *(kind for kind in found.values() if isinstance(kind, dict))):
        of = {
            "dynamic": getattr(settings, "max_position_embeddings", None),
            "longrope": rope.get("original_max_position_embeddings"),
        }
        lengths.append(of.get(rope.get("rope_type", "")))
    return min((length for length in lengths if length is not None), default=None)


def exported_config(
    transformers: Any, settings: PreTrainedConfig, path: str | None
) -> dict[str, Any]:
    """Return config.json of an export: the keys of the folder that the model is from, with what the
    user changed, else those that transformers writes; in either case what its version 4 reads."""
    of_all = transformers.PreTrainedConfig().to_dict()  # keys of the program, not of the model
    of_model = {key: value for key, value in settings.to_dict().items() if key not in of_all}
    own = read_object(Path(path) / "config.json") if path is not None else {}
    if path is None or "text_config" in own:
        of_model["model_type"] = settings.model_type
        return with_older_keys(of_model)
    before = read_config(transformers, path).to_dict()
    changed = {key: value for key, value in of_model.items() if before.get(key) != value}
    aliases = settings.attribute_map.items()
    own |= changed | {
        alias: changed[key] for alias, key in aliases if alias in own and key in changed
    }
    return with_older_keys(own) if "rope_parameters" in own else own


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def routes(settings: PreTrainedConfig) -> bool:
    """Whether a family has a mixture of experts."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(settings, key, None) for key in counts)


def needs_eager(transformers: Any, settings: PreTrainedConfig) -> bool:
    """Whether torch's fused attention does not support a family's attention."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    capped = getattr(settings, "attn_logit_softcapping", None) is not None
    return capped or not kind._supports_sdpa
