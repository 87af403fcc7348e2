"""Load a trained model in one process, and continue several prompts at a time.

The model is from a run, a checkpoint or a transformers folder. Built-in model families use a KV
cache (`core/models/cache.py`), transformers' models use their own `generate`, and any other model
computes the full forward for each token. Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlike.core.checkpoint.integrity import MODEL
from titanlike.core.checkpoint.reader import SavedModel, ShardReader, add_evaluation, saved_model
from titanlike.core.checkpoint.storage import Storage
from titanlike.core.config.groups.data import ChatData
from titanlike.core.config.imports import quiet_import
from titanlike.core.config.received import Consent
from titanlike.core.data.kinds import DataError, vocabulary
from titanlike.core.distributed.initialize import parameters_on_meta
from titanlike.core.models.cache import KeyValueCache
from titanlike.core.models.registry import MODELS, build_model, constructed_buffers
from titanlike.formats.chat_template import ChatTemplate, find_template, first_day
from titanlike.formats.tokenizer import open_tokenizer, write_tokenizer
from titanlike.hf.hf_config import check_sizes, is_count
from titanlike.use.sampling import OnToken, Prompts, Sampling, continue_texts, next_tokens

_MOST_COUNT = 65_536  # heads, experts and the like of a model

# --- the loaded model ---------------------------------------------------------------------------


class Coder(NamedTuple):
    """Encodes text to token ids and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class LoadedModel:
    """A model for generation, in evaluation mode on its device."""

    model: nn.Module
    transformers: bool  # whether it is transformers' own, with `generate`
    boundary: int | None  # id that separates documents, and ends a text
    most_tokens: int | None  # longest sequence; None = unlimited
    origin: str
    coder: Coder | None = None  # None = the data are token ids without a tokenizer
    chat: ChatTemplate | None = None
    ends: frozenset[int] = frozenset()  # further ids that end a text
    checkpoint: Storage | None = None  # None = the transformers folder `origin`
    seq_len: int = 0  # of the run's training
    tokenizer: Callable[[], Any] | None = None  # opens transformers' tokenizer

    def record(self, result: dict[str, Any]) -> str:
        """Write a result next to the checkpoint, or into the folder; returns where."""
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


@torch.inference_mode()
def generate(
    loaded: LoadedModel,
    prompts: Prompts,
    tokens: int,
    sampling: Sampling,
    *,
    cached: bool = True,
    on_token: OnToken = lambda prompt, token: None,
) -> Prompts:
    """Generate up to `tokens` ids after each prompt; a text stops before an id that ends it.

    cached: False = no KV cache, a full forward for each token. on_token: called with (index of the
    prompt, id). Raises ValueError for an empty prompt, and if prompt and tokens exceed the model's
    longest sequence.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens; write some text")
    width, ends = max(map(len, prompts)), loaded.all_ends
    if loaded.most_tokens is not None and width + tokens > loaded.most_tokens:
        fits = loaded.most_tokens - width
        fix = f"write --tokens {fits}" if fits > 0 else "write a shorter prompt"
        reason = f"the model takes {loaded.most_tokens} tokens, not {width + tokens}"
        raise ValueError(f"{reason}; {fix}")
    if loaded.transformers:
        texts = _by_transformers(loaded, prompts, tokens, sampling, cached)
        for number, ids in enumerate(texts):
            for token in ids:
                on_token(number, token)
        return texts
    random = sampling.generators(len(prompts))
    padding = torch.tensor([width - len(ids) for ids in prompts], device=loaded.device)
    cache = KeyValueCache(padding, width + tokens) if cached and loaded.takes_cache else None
    rows = [[0] * (width - len(ids)) + ids for ids in prompts]

    def choose(texts: Prompts) -> list[int]:
        nonlocal rows
        if cache is not None:
            logits = loaded.model(torch.tensor(rows, device=loaded.device), cache=cache)[:, -1]
        else:  # the model may not support padding, so each text is a batch of its own
            inputs = (torch.tensor([ids], device=loaded.device) for ids in texts)
            logits = torch.cat([loaded.model(ids)[:, -1] for ids in inputs])
        chosen = next_tokens(logits, sampling, random).tolist()
        rows = [[token] for token in chosen]
        return chosen

    return continue_texts(choose, prompts, tokens, ends, on_token)


def _by_transformers(
    loaded: LoadedModel, prompts: Prompts, tokens: int, sampling: Sampling, cached: bool
) -> Prompts:
    width, ends = max(map(len, prompts)), loaded.all_ends
    pad = 0 if loaded.boundary is None else loaded.boundary
    rows = [[pad] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    # greedy: None resets the folder's own sampling settings, of which transformers would warn
    draws = sampling.temperature > 0
    keys = ("temperature", "top_p", "top_k")
    settings = {key: getattr(sampling, key) if draws else None for key in keys}
    with torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        texts = loaded.model.generate(  # type: ignore[operator]
            torch.tensor(rows, device=loaded.device),
            attention_mask=torch.tensor(mask, device=loaded.device),
            max_new_tokens=tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad,
            do_sample=draws,
            use_cache=cached,
            **settings,
        )
    new = texts[:, width:].tolist()
    return [[*itertools.takewhile(lambda token: token not in ends, ids)] for ids in new]


# --- loading ------------------------------------------------------------------------------------


def load_model(
    location: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    ema: bool = False,
    consent: Consent = Consent(files=True),  # noqa: B008
) -> LoadedModel:
    """Load a model from a run, a checkpoint or a transformers folder.

    ema: load the averaged weights; consent: whether a custom model may be imported and built, and
    files opened. Raises ValueError if not, if there is no model, or if transformers is missing.
    """
    folder = Path(location).expanduser()
    if (folder / "config.json").is_file():
        if ema:
            raise ValueError(
                f"--ema: {folder} is a folder with one set of weights; write it without"
            )
        return _from_folder(folder, device, dtype)
    rows = ShardReader.open("RUN", location, ema=ema)
    saved = saved_model(rows.folder, location, consent)
    tensors = len(rows.entries(MODEL))
    for key, count in saved.model.args.items() if saved.model.name in MODELS else ():
        most = tensors if "layer" in key else _MOST_COUNT
        # building it would take hours
        if is_count(key) and isinstance(count, int) and count > most:
            reason = f"the checkpoint has {tensors} tensors, and its model {key}={count}"
            raise ValueError(f"{rows.folder}: {reason}; it is damaged")
    is_hf = saved.model.name == "hf"
    model = _of_transformers(saved) if is_hf else build_model(saved.model)
    _fill(model, rows, saved, device, dtype)
    data, text = saved.config.data, dict[str, Any]()
    name = boundary = None
    with contextlib.suppress(DataError):  # token files may be on a different machine
        _, name, boundary = vocabulary(data)
    if name is not None:
        tokenizer = open_tokenizer(name)
        text["tokenizer"] = partial(_exported_tokenizer, name)
        text["coder"] = Coder(tokenizer.encode, tokenizer.decode)
        if isinstance(data, ChatData):
            named = data.template, data.tokenizer, data.parse_special
            run_dir = Path(str(rows.folder)).parent.parent
            text["chat"] = chat = find_template(*named, first_day(run_dir))
            text["coder"] = Coder(chat.encode, tokenizer.decode)
            text["ends"] = chat.ends
    return LoadedModel(
        model.eval(),
        is_hf,
        boundary=boundary,
        most_tokens=_most_tokens(model) if is_hf else getattr(model, "max_seq_len", None),
        origin=f"step {saved.step} of {rows.folder}",
        checkpoint=rows.folder,
        seq_len=saved.config.seq_len,
        **text,
    )


def _fill(
    model: nn.Module, rows: ShardReader, saved: SavedModel, device: torch.device, dtype: torch.dtype
) -> None:
    """Load the checkpoint into a model whose parameters are on meta, a few rows at a time.

    Raises ValueError, before allocating, if parameters are missing or differ in shape, or if the
    checkpoint has more than the model, such as what a technique added: it would be left out.
    """
    entries = rows.entries(MODEL)
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if unread := entries.keys() - named - {name for name, _ in model.named_buffers()}:
        raise ValueError(f"{rows.folder} is of another model: it also has {min(unread)}")
    for name, parameter in model.named_parameters():
        has = tuple(entries[name].shape) if name in entries else "none"
        if has != tuple(parameter.shape):
            size = tuple(parameter.shape)
            reason = f"its {name} would be of shape {size}, and the checkpoint has {has}"
            raise ValueError(f"{rows.folder} is of another model: {reason}")
    filled: dict[int, nn.Parameter] = {}  # by the meta parameter's id, as parameters may be tied
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        if (value := filled.get(id(parameter))) is None:
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            empty = torch.empty(parameter.shape, dtype=kind, device=device)
            value = filled[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            row = 0
            for slab in rows.rows(MODEL + name):
                if value.dim():
                    value[row : row + len(slab)] = slab
                    row += len(slab)
                else:
                    value.copy_(slab)
        path, _, last = name.rpartition(".")
        model.get_submodule(path).register_parameter(last, value)
    constructed: dict[str, Tensor] | None = None
    for name, buffer in model.named_buffers():
        if name in entries:
            buffer = rows.whole(MODEL + name)
        elif buffer.is_meta:
            constructed = constructed or constructed_buffers(saved.model, saved.config.seed)
            buffer = constructed[name]
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._buffers[last] = buffer.to(device)


def _of_transformers(saved: SavedModel) -> Any:
    """Build transformers' own model, which has `generate`; parameters on meta, buffers with values."""
    settings: Any = build_model(saved.model).config
    with quiet_import():
        from transformers import AutoModelForCausalLM, GenerationConfig
    with quiet_import(), parameters_on_meta(), torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(settings)
    path = saved.model.args.get("path")
    if path and (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _exported_tokenizer(name: str) -> Any:
    """Open a tokenizer by transformers, from the files that an export would write."""
    with quiet_import():
        from transformers import AutoTokenizer
    with TemporaryDirectory() as folder:
        write_tokenizer(name, Path(folder))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    try:
        with quiet_import():
            import transformers
    except ImportError:
        reason = f"RUN={folder}: transformers, which loads this folder, is not installed"
        raise ValueError(f"{reason}; run pip install 'titanlike[hf]'") from None
    transformers.logging.disable_progress_bar()
    tokenizer: Any = None
    try:
        with quiet_import():
            settings = {"local_files_only": True, "trust_remote_code": False}  # None asks on stdin
            check_sizes(folder)
            if (folder / "tokenizer.json").exists():
                open_tokenizer(str(folder / "tokenizer.json"))  # refuses one without bounds
            config = transformers.AutoConfig.from_pretrained(folder, **settings)
            config._attn_implementation = None  # the folder's may be a kernel of the hub
            load: Any = transformers.AutoModelForCausalLM.from_pretrained
            model = load(folder, config=config, dtype=dtype, **settings).to(device).eval()
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **settings)
    except Exception as error:  # transformers raises any class for a damaged folder
        reason = " ".join(str(error).split())[:300] or "no reason is given"
        raise ValueError(f"RUN={folder}: {type(error).__name__}: {reason}") from None
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [] if end is None else [end]
    text: dict[str, Any] = {}
    if tokenizer is not None:
        text["tokenizer"] = lambda: tokenizer
        text["coder"] = Coder(
            lambda text: list(tokenizer(text)["input_ids"]),
            lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        )
        if tokenizer.chat_template:
            text["chat"] = chat = find_template(None, str(folder))
            ends = [*ends, *chat.ends]
    return LoadedModel(
        model,
        True,
        boundary=ends[0] if ends else None,
        most_tokens=_most_tokens(model),
        origin=str(folder),
        ends=frozenset(ends),
        **text,
    )


def _most_tokens(model: Any) -> int | None:
    """The longest sequence of a transformers model with learned position embeddings, else None."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if all(module is model.get_input_embeddings() for module in embeddings):
        return None
    return getattr(model.config, "max_position_embeddings", None)
