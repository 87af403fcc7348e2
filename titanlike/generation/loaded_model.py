"""A trained model in this process: of a run, a checkpoint, or a folder of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titanlike.checkpoint.metadata import MODEL
from titanlike.checkpoint.shard_reader import (
    SavedModel,
    ShardReader,
    add_evaluation,
    model_to_build,
    saved_model,
)
from titanlike.checkpoint.storage import Storage
from titanlike.config.schema import ChatData
from titanlike.data.chat_template import find_template
from titanlike.data.checks import tokenizer_of
from titanlike.data.errors import DataError
from titanlike.data.tokenizer import Tokenizer, open_tokenizer
from titanlike.distributed.initialize import parameters_on_meta
from titanlike.models.quiet_import import quiet_import
from titanlike.models.registry import build_model, constructed_buffers


class Coder(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class LoadedModel:
    """model: in evaluation, on its device. transformers: whether it has their own `generate`."""

    model: nn.Module
    transformers: bool
    coder: Coder | None  # None = the data were token ids without a tokenizer
    boundary: int | None  # id that separates documents, which ends a text
    most_tokens: int | None  # of a sequence; None = any number
    origin: str
    chat_template: Callable[[list[dict[str, str]]], str] | None = None
    ends: frozenset[int] = frozenset()  # further ids that end a text
    checkpoint: Storage | None = None  # None = a folder of transformers, `origin`

    def record(self, result: dict[str, Any]) -> str:
        """Write a result beside the checkpoint, or into the folder; where it is."""
        return add_evaluation(self.checkpoint or Storage(self.origin).at("model"), result)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def all_ends(self) -> frozenset[int]:
        return self.ends if self.boundary is None else self.ends | {self.boundary}

    @property
    def takes_cache(self) -> bool:
        return "cache" in inspect.signature(self.model.forward).parameters


def load_model(
    location: str, device: torch.device, dtype: torch.dtype, trust_code: bool = False
) -> LoadedModel:
    """trust_code: whether a model that is none of titanlike's own, and whose name is in the
    checkpoint alone, may be imported and built. Raises ValueError where it may not, where there is
    no model, or where transformers is missing."""
    folder = Path(location).expanduser()
    if (folder / "config.json").is_file():
        return _from_folder(folder, device, dtype)
    rows = ShardReader.open("RUN", location)
    saved = saved_model(rows.folder)
    saved = replace(saved, model=model_to_build(saved, rows.folder, trust_code))
    tensors = len(rows.entries(MODEL))
    for key in ("layers", "num_hidden_layers"):
        count = saved.model.args.get(key, 1)
        if isinstance(count, int) and count > tensors:  # it would be built for hours
            reason = f"the checkpoint has {tensors} tensors, and its model {key}={count}"
            raise ValueError(f"{rows.folder}: {reason}; it is damaged")
    is_hf = saved.model.name == "hf"
    model = _of_transformers(saved) if is_hf else build_model(saved.model)
    _fill(model, rows, saved, device, dtype)
    tokenizer, boundary = _coder(saved)
    most = _most_of_transformers(model) if is_hf else getattr(model, "max_seq_len", None)
    origin = f"step {saved.step} of {rows.folder}"
    place: dict[str, Any] = {"checkpoint": rows.folder}
    coder: Coder | None = tokenizer
    if isinstance(saved.config.data, ChatData) and tokenizer is not None:
        template = find_template(saved.config.data.template, saved.config.data.tokenizer)
        place["chat_template"] = lambda messages: template.render(messages, ask=True)
        place["ends"] = template.ends(tokenizer)
        coder = _OfTemplates(tokenizer)
    return LoadedModel(model.eval(), is_hf, coder, boundary, most, origin, **place)


def _coder(saved: SavedModel) -> tuple[Tokenizer | None, int | None]:
    try:
        name, boundary = tokenizer_of(saved.config.data)
    except DataError:  # files of tokens on another machine
        return None, None
    return None if name is None else open_tokenizer(name), boundary


@torch.no_grad()
def _fill(
    model: nn.Module, rows: ShardReader, saved: SavedModel, device: torch.device, dtype: torch.dtype
) -> None:
    """Read the checkpoint's values, a few rows at a time, into the model, which is on meta but for
    buffers. Raises ValueError, before it takes memory, for parameters that it lacks."""
    entries = rows.entries(MODEL)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        has = tuple(entries[name].shape) if name in entries else "none"
        if has != tuple(parameter.shape):
            size = tuple(parameter.shape)
            reason = f"its {name} would be of shape {size}, and the checkpoint has {has}"
            raise ValueError(f"{rows.folder} is of another model: {reason}")
    first: dict[int, nn.Parameter] = {}
    for name, parameter in parameters.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if id(parameter) not in first:
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            empty = torch.empty(parameter.shape, dtype=kind, device=device)
            first[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            _copy(rows, name, first[id(parameter)])
        module.register_parameter(last, first[id(parameter)])
    made: dict[str, Tensor] | None = None
    for name, buffer in model.named_buffers():
        path, _, last = name.rpartition(".")
        if name in entries:
            value = rows.whole(MODEL + name)
        elif buffer.is_meta:
            made = made or constructed_buffers(saved.model, saved.config.seed)
            value = made[name]
        else:
            value = buffer
        model.get_submodule(path)._buffers[last] = value.to(device)


def _copy(rows: ShardReader, name: str, target: Tensor) -> None:
    at = 0
    for slab in rows.rows(MODEL + name):
        if not target.dim():
            target.copy_(slab)
            return
        target[at : at + len(slab)] = slab
        at += len(slab)


# --- transformers -------------------------------------------------------------------------------


def _of_transformers(saved: SavedModel) -> Any:
    """Their own model, with its `generate`; parameters on meta, buffers with their values."""
    settings: Any = build_model(saved.model).config
    with quiet_import():
        from transformers import AutoModelForCausalLM, GenerationConfig
    with quiet_import(), parameters_on_meta(), torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(settings)
    path = saved.model.args.get("path")
    if path and (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    try:
        with quiet_import():
            import transformers
    except ImportError:
        reason = f"RUN={folder}: transformers, which loads this folder, is not installed"
        raise ValueError(f"{reason}; run pip install 'titanlike[hf]'") from None
    transformers.logging.disable_progress_bar()
    try:
        with quiet_import():
            load: Any = transformers.AutoModelForCausalLM.from_pretrained
            settings = {"local_files_only": True, "trust_remote_code": False}  # None asks on stdin
            model = load(folder, dtype=dtype, **settings).to(device).eval()
        coder, template = None, None
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            coder = _TheirTokenizer(transformers.AutoTokenizer.from_pretrained(folder, **settings))
            template = coder.chat if coder.tokenizer.chat_template else None
    except Exception as error:  # theirs are of any class for a damaged folder
        said = " ".join(str(error).split())[:300] or "no reason is given"
        raise ValueError(f"RUN={folder}: {type(error).__name__}: {said}") from None
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [] if end is None else [end]
    if template is not None and coder is not None and coder.tokenizer.eos_token_id is not None:
        ends = [*ends, coder.tokenizer.eos_token_id]
    boundary = ends[0] if ends else None
    most, known = _most_of_transformers(model), frozenset(ends)
    return LoadedModel(model, True, coder, boundary, most, str(folder), template, known)


def _most_of_transformers(model: Any) -> int | None:
    """Tokens of the longest sequence, where positions are learned: others go on beyond what is trained."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if all(module is model.get_input_embeddings() for module in embeddings):
        return None
    return getattr(model.config, "max_position_embeddings", None)


class _OfTemplates:
    """A tokenizer that reads special tokens where they are spelled out, as chat templates do."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode, self.decode = tokenizer.encode_template, tokenizer.decode


class _TheirTokenizer:
    """transformers' tokenizer of a folder."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: list[dict[str, str]]) -> str:
        """A conversation as the text after which the answer follows."""
        options = {"tokenize": False, "add_generation_prompt": True}
        return self.tokenizer.apply_chat_template(messages, **options)
