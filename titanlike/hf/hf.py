"""Decoders of Hugging Face transformers, from a folder or from a family and sizes; never the hub.

The model is transformers' own, so parameter names and checkpoints are compatible. Changed is what a
pipeline needs; none of it changes the results:

1. `forward` takes the batch's fields and returns the logits only.
2. Masks are computed from the batch without reading values (transformers reads them to decide
   whether a mask is needed), so that each stage computes its own.
3. Rotary tables are computed from positions only: transformers also passes the hidden state, for
   its dtype, and the tables would then be sent from stage to stage.

Initial weights: `hf_init.py` from scratch, `hf_weights.py` from a folder's safetensors.

Shapes: B batch, T tokens, V vocab_size.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from titanlike.core.config.imports import quiet_import
from titanlike.core.models import documents
from titanlike.hf import hf_layers
from titanlike.hf.hf_config import longest_with_fixed_frequencies, needs_eager, routes, settings_of
from titanlike.hf.hf_init import ScratchWeights
from titanlike.hf.hf_weights import FolderWeights
from titanlike.hf.safetensors_folder import INDEX, SINGLE, has_weights, other_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from titanlike.core.distributed.initialize import InitialWeights

# Mask functions that transformers' models import by name -> config key of the sliding window.
_MASKS = {"create_causal_mask": None, "create_sliding_window_causal_mask": "sliding_window"}


def hf(
    *,
    path: str | None = None,
    family: str | None = None,
    config: dict[str, Any] | None = None,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    attention: str | None = None,
    weights: str = "auto",
) -> nn.Module:
    """A causal language model of transformers: token ids [B, T] -> logits [B, T, V].

    path: a folder with config.json, optionally with safetensors. family: without a folder,
    transformers' `model_type`, one of `hf_config.FAMILIES`. config: transformers' keys that differ
    from the folder's or the family's config. vocab_size, max_seq_len: a family's, unless set in
    `config`; a folder must support them. attention: sdpa or eager. weights: load (the folder's),
    scratch, or auto (the folder's if it has any).

    Raises ValueError with one argument per problem.
    """
    try:
        with quiet_import():
            import transformers
            import transformers.modeling_utils  # imports torchao
    except ImportError:
        reason = "name=hf: transformers is not installed; run pip install 'titanlike[hf]'"
        raise ValueError(reason) from None
    settings = settings_of(transformers, path, family, dict(config or {}), vocab_size, max_seq_len)
    eager = needs_eager(transformers, settings)
    _check_choices(settings, path, attention, weights, eager)
    folder = Path(path) if path else None
    load = folder is not None and weights != "scratch" and has_weights(folder)
    try:
        model = _construct(settings, attention or ("eager" if eager else "sdpa"))
    except (KeyError, AttributeError) as error:  # of a wrong config
        raise ValueError(f"config={{...}}: {type(error).__name__} {error}") from error
    model.set_up(folder if load else None)
    return model


def _check_choices(
    settings: PreTrainedConfig, path: str | None, attention: str | None, weights: str, eager: bool
) -> None:
    """Raise ValueError for `attention` and `weights` that do not fit the model or the folder."""
    stored = path is not None and has_weights(Path(path))
    others = other_weights(Path(path)) if path is not None and not stored else []
    if attention not in (None, "sdpa", "eager"):
        raise ValueError(f"attention={attention}: must be sdpa or eager; write attention=sdpa")
    if weights not in ("auto", "load", "scratch"):
        raise ValueError(f"weights={weights}: must be auto, load or scratch; write weights=auto")
    if weights == "load" and not stored:
        where = f"{path} has no safetensors" if path else "model.path is not set"
        raise ValueError(f"weights=load: {where}; write model.weights=scratch")
    if others and weights == "auto":
        raise ValueError(
            f"path={path}: has weights in {others[0]}, and only {SINGLE} or {INDEX} are read; write "
            "model.weights=scratch to ignore them, or save it as safetensors (save_pretrained does)"
        )
    if attention == "sdpa" and eager:
        raise ValueError(
            f"attention=sdpa: {settings.model_type} caps its scores or has sinks, which torch's "
            "fused attention does not support; write model.attention=eager"
        )


class Decoder(nn.Module):
    """A mixin: the first base class of the model, before transformers' own class."""

    sizes_of_rank = True  # of attention modules, which tensor parallelism sets

    def set_up(self, folder: Path | None) -> None:
        """folder: where initial weights are stored. Raises ValueError if they do not fit the model."""
        self._folder = folder
        self.max_seq_len = getattr(self.config, "max_position_embeddings", None)
        module: Any
        for module in self.modules():
            if "RotaryEmbedding" in type(module).__name__:
                module.register_forward_pre_hook(_without_hidden_state, with_kwargs=True)
                if longest_with_fixed_frequencies(cast(Any, self.config)) is not None:
                    module.rope_type = "default"  # no longer sequence, for which it reads values
        if folder is not None and next(self.parameters()).is_meta:
            FolderWeights(self, folder).check()

    def forward(
        self,
        ids: Tensor,
        *,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """document_ids, positions, mask: see `attention_inputs` in `documents.py`."""
        config: Any = self.config
        by_offsets = config._attn_implementation == hf_layers.NAME
        positions, allowed = documents.attention_inputs(
            ids, document_ids, positions, mask, by_offsets
        )
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if "position_ids" in inspect.signature(super().forward).parameters:
            arguments["position_ids"] = positions[None] if positions.dim() == 1 else positions
        with _our_masks(self, ids, allowed), _shapes_of_experts(config, ids):
            return super().forward(**arguments).logits

    def warn_if_padding_and_no_attention_mask(self, *_: Any) -> None:
        """Does nothing: transformers would read the batch's values to find padding."""

    def folder_weights(self) -> FolderWeights | None:
        """Where the initial weights are stored; None = they are drawn."""
        return None if self._folder is None else FolderWeights(self, self._folder)

    def initial_weights(self, seed: int) -> InitialWeights:
        """The model's initial weights, see `titanlike.core.distributed.initialize`."""

        def build() -> Decoder:
            config: Any = self.config
            return _construct(config, config._attn_implementation)

        scratch = ScratchWeights(build, seed, everything=self._folder is None)
        folder = self._folder
        return scratch if folder is None else FolderWeights(self, folder, scratch.buffer)

    def flops_per_token(self, tokens: int) -> float:
        """FLOPs of forward and backward per token, see `CausalLM.flops_per_token`.

        Only the experts that a token is routed to count.
        """
        model: Any = self
        config = model.config
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedding
        chosen = getattr(config, "num_experts_per_tok", None) or 1
        matrices = 0.0
        for parameter in self.parameters():
            if parameter is embedding and not tied:
                continue
            if parameter.dim() == 3:  # [experts, out, in]
                matrices += parameter.numel() * chosen / parameter.size(0)
            elif parameter.dim() == 2:
                matrices += parameter.numel()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return 6 * matrices + 12 * config.num_hidden_layers * heads * width * tokens


def _construct(settings: PreTrainedConfig, attention: str) -> Any:
    """The model in fp32 on torch's default device."""
    with quiet_import():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    hf_layers.register()
    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if attention == "sdpa" and hf_layers.takes_documents(kinds[type(settings)]):
        attention = hf_layers.NAME

    # of a mixture of experts: one that does not branch on values
    experts = {"experts_implementation": "grouped_mm"} if routes(settings) else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        settings, dtype=torch.float32, attn_implementation=attention, **experts
    )
    kind = type(model)
    model.__class__ = type(kind.__name__, (Decoder, kind), {"__module__": kind.__module__})
    module: Any
    for module in model.modules():  # GPT-2 calls it of its inner model
        if hasattr(module, "warn_if_padding_and_no_attention_mask") and module is not model:
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    if routes(settings):
        hf_layers.sort_tokens(model, settings.num_experts_per_tok)
    return model


# --- masks and positions, from the batch alone ----------------------------------------------------


def _without_hidden_state(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A rotary embedding's arguments with an empty tensor in place of the hidden state."""

    def replace(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return torch.empty((), dtype=x.dtype, device=x.device) if floating else x

    return tuple(map(replace, args)), {key: replace(x) for key, x in kwargs.items()}


@contextlib.contextmanager
def _shapes_of_experts(config: PreTrainedConfig, ids: Tensor) -> Iterator[None]:
    """Use batched_mm on meta, which gives the same shapes: grouped_mm accepts bf16 only."""
    if not (ids.is_meta and routes(config)):
        yield
        return
    before = config._experts_implementation
    config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        config._experts_implementation = before


@contextlib.contextmanager
def _our_masks(model: nn.Module, ids: Tensor, allowed: documents.Mask) -> Iterator[None]:
    """A context in which transformers' mask functions do not read values.

    allowed: documents; bool [B, 1, T, T]; or None = causal over the whole sequence.
    """
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, window in _MASKS.items():
                if hasattr(module, name):
                    function = _mask_function(ids, allowed, window)
                    stack.enter_context(patch.object(module, name, function))
        yield


def _mask_function(ids: Tensor, allowed: documents.Mask, window: str | None) -> Any:
    """Replaces transformers' `create_causal_mask` and `create_sliding_window_causal_mask`."""
    tokens = ids.size(1)

    def make(
        config: PreTrainedConfig,
        inputs_embeds: Tensor,
        *_: Any,
        or_mask_function: Any = None,
        and_mask_function: Any = None,
        allow_is_causal_skip: bool = True,
        **__: Any,
    ) -> documents.Mask:
        """[B or 1, 1, T, T]: True = attends; for eager attention, what is added to the scores.
        Documents, of which a whole sequence may be one, where attention takes them."""
        assert or_mask_function is None and and_mask_function is None, "refused by `settings_of`"
        eager = config._attn_implementation == "eager"
        width = getattr(config, window) if window else None
        slides = width is not None and width < tokens
        if allowed is None and not slides and not eager and allow_is_causal_skip:
            return None  # sdpa's own causal mask
        slides_by_offsets = allowed is None and slides and documents.takes_documents(ids)
        if slides_by_offsets and config._attn_implementation == hf_layers.NAME:
            return documents.Documents(documents.sequence_spans(ids), width)
        if isinstance(allowed, documents.Documents):
            return allowed._replace(window=width if slides else None)
        positions = torch.arange(tokens, device=ids.device)
        mask = (positions[:, None] >= positions)[None, None] if allowed is None else allowed
        if slides and width is not None:
            mask = mask & (positions[:, None] - positions < width)
        if not allow_is_causal_skip:  # the model uses the mask's shape
            mask = mask.expand(ids.size(0), 1, tokens, tokens)
        if not eager:
            return mask
        zero = torch.zeros((), dtype=inputs_embeds.dtype, device=ids.device)
        return torch.where(mask, zero, torch.finfo(inputs_embeds.dtype).min)

    return make
